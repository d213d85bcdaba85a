"""Pages: every number of a study where it belongs, and one of a profile and a worth alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from sparseflow.adaptive.plan.space import PlanSpace
from sparseflow.adaptive.profile import PlanProfile, compute_weights_id
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.adaptive.study import results
from sparseflow.adaptive.study.comparison import compare_with_baselines
from sparseflow.adaptive.study.figures import select_front
from sparseflow.adaptive.study.page import write_page, write_results_page
from sparseflow.core.training.history import History
from sparseflow.errors import FileFormatError, InputError
from tests.adaptive.study import small
from tests.adaptive.study.test_comparison import PLANS, controllers
from tests.adaptive.study.test_comparison import make_tables as tables


def text(page: Path) -> str:
    """What a reader sees, without tags."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page.read_text("utf-8")))


@pytest.fixture(scope="module")
def model(study_inputs: Path) -> Any:
    return small.opened(study_inputs / "model")


@pytest.fixture(scope="module")
def profile(model: Any) -> PlanProfile:
    """Of half of the plans."""
    return small.profile_of(model, plans=6)


def test_page_of_profile_and_plan_quality(model, profile: PlanProfile, tmp_path: Path) -> None:
    plans = profile.space.plans
    quality = PlanQuality(
        model_id=compute_weights_id(model), space=profile.space, samples=50, task="t",
        accuracy=tuple(0.2 + 0.05 * len(plan.blocks) + 0.1 * (plan.tier == "high") for plan in plans),
    )  # fmt: skip
    study_results = results.make_plan_results(profile, quality)
    assert study_results["size"] == {"text_tokens": 6, "new_tokens": 4}
    front = select_front(study_results["plans"])
    assert len(front) >= 2
    for first, two in pairwise(front):
        assert first["p50_ms"] < two["p50_ms"] and first["accuracy"] < two["accuracy"]
    for row in study_results["plans"]:
        beaten = any(
            other["p50_ms"] <= row["p50_ms"] and other["accuracy"] >= row["accuracy"]
            for other in front
            if other is not row
        )
        assert beaten != row["front"] and ("samples_ms" in row) == (row["front"] or row["measured"])
    read = text(write_results_page(json.loads(json.dumps(study_results)), tmp_path / "page.html"))
    assert f"{len(front)} of {len(plans)} plans are on the Pareto front" in read
    assert f"18 of {len(plans)} plans were measured. The others take" in read
    assert "Coverage of predicted quantiles" in read and "Who wins" not in read
    remaining_items = PlanSpace.from_importance(profile.space.geometry, [0.0, 1.0, 2.0, 3.0])
    other = PlanQuality(
        model_id="m", space=remaining_items, samples=1, task="t", accuracy=(0.5,) * len(remaining_items)
    )
    with pytest.raises(InputError, match="different plans"):
        results.make_plan_results(profile, other)


def test_page_of_small_profile_has_no_validation(model, profile: PlanProfile, tmp_path: Path) -> None:
    quality = PlanQuality(
        model_id="m", space=profile.space, samples=1, task="t", accuracy=(0.5,) * len(profile.space)
    )
    small_profile = replace(
        profile,
        measurements=tuple(measurement for measurement in profile.measurements if measurement.round == 0)[
            ::6
        ],
    )
    assert len(small_profile.measurements) == 6
    with pytest.raises(InputError, match=r"at least 5"):
        results.make_plan_results(small_profile, quality)
    study_results = results.make_plan_results(profile, quality) | {"predictor": None}
    read = text(write_results_page(study_results, tmp_path / "page.html"))
    assert "too few plans and lengths" in read


def test_page_of_study_shows_policies_and_training(profile: PlanProfile, tmp_path: Path) -> None:
    outcome_tables = tables()
    comparison = compare_with_baselines(
        outcome_tables, controllers=[controllers()], supervised=[controllers(1)], num_budgets=6
    )
    # Of the same plans as the synthetic requests.
    own_profile = replace(profile, metadata=replace(profile.metadata, space=PLANS))
    retained = results.make_study_results(
        own_profile, outcome_tables, comparison, metadata={"command": "sparseflow adaptive train x"}
    )
    results.save_results(tmp_path, retained)
    seed = tmp_path / "controllers" / "seed-0"
    seed.mkdir(parents=True)
    history = History(seed)
    history.log(0, "held_out", {"accuracy": 0.2, "attainment": 0.9})
    history.log(1, "train", {"multiplier": 1.0})
    history.log(1, "held_out", {"accuracy": 0.3, "attainment": 1.0})
    history.close()
    read = text(write_page(tmp_path, tmp_path / "page.html"))
    for name in (
        "controllers",
        "lookup table",
        "supervised on oracle",
        "best static plan",
        "random",
        "oracle",
    ):
        assert name in read
    for sentence in retained["verdict"]:
        assert sentence.replace("'", "&#39;") in read
    for title in ("Attainment", "Goodput", "Regret", "Plans on the Pareto front", "Lagrange multiplier"):
        assert title in read
    assert "sparseflow adaptive train x" in read and "mathdefault" not in read
    front = select_front(retained["plans"])
    assert all(
        row["low"] <= row["accuracy"] <= row["high"] and set(row["by_kind"]) == {"one", "other"}
        for row in front
    )


def test_page_without_entries_raises(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="KeyError"):
        write_results_page({}, tmp_path / "page.html")
