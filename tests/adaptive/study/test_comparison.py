"""A contest: all policies by one table, at one attainment, and the sentences that say who wins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import OutcomeTable
from sparseflow.adaptive.study.comparison import compare_with_baselines, summarize_gains
from sparseflow.adaptive.study.latencies import LatencySamples, RequestSize
from sparseflow.adaptive.study.outcome_tables import StudyTables
from sparseflow.errors import InputError
from tests.adaptive.synthetic import WIDTH, make_outcomes, make_space

PLANS = make_space(depth=4, top_k=3)


def make_tables(*, samples: int = 64) -> StudyTables:
    """Tables of requests whose needs are known."""

    def sample_outcomes(seed: int) -> OutcomeTable:
        return make_outcomes(samples, seed=seed, plans=PLANS)

    half = torch.arange(samples) < samples // 2
    return StudyTables(
        train=sample_outcomes(1),
        validation=sample_outcomes(2),
        test=sample_outcomes(3),
        kinds={"one": half, "other": ~half},
        size=RequestSize(8, 2),
        latency=LatencySamples(
            ms=np.ones((1, len(PLANS), 2), np.float32), measured=np.ones(len(PLANS), bool), load=0.0
        ),
    )


def controllers(seed: int = 0) -> Controllers:
    return Controllers(PLANS, width=WIDTH, model_id="m", seed=seed)


def test_compare_calibrates_policies_to_attainment() -> None:
    messages: list[float] = []
    comparison = compare_with_baselines(
        make_tables(), controllers=[controllers(), controllers(1)], supervised=[controllers(2)],
        attainment=0.9, num_budgets=6, progress=lambda _, share: messages.append(share),
    )  # fmt: skip
    assert [policy.name for policy in comparison.evaluations] == [
        "controllers", "lookup table", "supervised on oracle", "best static plan", "random", "oracle"
    ]  # fmt: skip
    assert len(comparison.budgets_ms) == 6 and len(messages) == 6
    *calibrated, oracle = comparison.evaluations
    assert oracle.regret.mean == 0.0 and oracle.met is None
    for policy in calibrated:
        assert policy.met is not None and policy.regret.mean >= 0.0
        assert not policy.met or policy.attainment.mean > 0.8
    pairs = [(gain["baseline"], gain["subset"].partition(" (")[0]) for gain in comparison.gains]
    subsets = [
        "all requests", "tight budgets", "middle budgets", "loose budgets",
        "questions of the kind 'one'", "questions of the kind 'other'",
    ]  # fmt: skip
    assert pairs == [(policy.name, subset) for policy in calibrated[1:] for subset in subsets]
    gain = comparison.gains[0]["goodput"]
    assert gain["mean"] == pytest.approx(calibrated[0].goodput.mean - calibrated[1].goodput.mean, abs=1e-6)
    thirds = [third["goodput"]["mean"] for third in comparison.gains[1:4]]
    assert gain["mean"] == pytest.approx(sum(thirds) / 3, abs=1e-6)


def test_compare_without_controllers_starts_with_lookup_table() -> None:
    comparison = compare_with_baselines(make_tables(), num_budgets=3)
    assert [policy.name for policy in comparison.evaluations] == [
        "lookup table",
        "best static plan",
        "random",
        "oracle",
    ]
    assert {gain["policy"] for gain in comparison.gains} == {"lookup table"}


def test_compare_skips_kinds_with_few_samples() -> None:
    mask = torch.arange(64) < 10
    tables = make_tables()
    first = StudyTables(**{**vars(tables), "kinds": {"one": mask}})
    assert not any("kind" in gain["subset"] for gain in compare_with_baselines(first, num_budgets=3).gains)


def test_compare_with_invalid_arguments_raises() -> None:
    with pytest.raises(InputError, match=r"`attainment` \(=1.5\)"):
        compare_with_baselines(make_tables(), attainment=1.5)
    with pytest.raises(InputError, match="other plans"):
        compare_with_baselines(
            make_tables(), controllers=[Controllers(make_space(), width=WIDTH, model_id="m")], num_budgets=3
        )


def row(other: str, subset: str, low: float, high: float) -> dict[str, object]:
    return {
        "policy": "controllers", "baseline": other, "subset": subset,
        "goodput": {"mean": (low + high) / 2, "low": low, "high": high},
    }  # fmt: skip


def test_summarize_gains_names_better_and_worse_subsets() -> None:
    sentences = summarize_gains(
        [
            row("lookup table", "all requests", 0.01, 0.03),
            row("lookup table", "tight budgets", -0.04, -0.02),
            row("lookup table", "loose budgets", 0.02, 0.06),
            row("lookup table", "middle budgets", -0.1, 0.1),
            row("random", "all requests", -0.01, 0.03),
            row("best static plan", "all requests", -0.05, -0.03),
        ]
    )
    assert sentences == [
        "Controllers against lookup table: better, goodput +2.0 points, +1.0 to +3.0.",
        "Worse than lookup table: tight budgets (-3.0 points, -4.0 to -2.0).",
        "Better than lookup table: loose budgets (+4.0 points, +2.0 to +6.0).",
        "Controllers against random: no significant difference, goodput +1.0 points, -1.0 to +3.0.",
        "Controllers against best static plan: worse, goodput -4.0 points, -5.0 to -3.0.",
    ]
    assert summarize_gains([]) == []
