"""The worth of plans: read as it was written, refused where it is of something else; and which count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.profile.plan_quality import PlanQuality, select_pareto_plans
from sparseflow.errors import InputError
from tests.adaptive.synthetic import make_space
from tests.conformance import check_artifact_file

SPACE = make_space(depth=4, top_k=3)
PLANS = SPACE.plans
WORTH = PlanQuality(
    model_id="m",
    space=SPACE,
    accuracy=tuple(index / len(PLANS) for index in range(len(PLANS))),
    samples=7,
    task="t",
)


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan_quality.json"
    WORTH.save(path)
    quality = PlanQuality.load(path)
    assert (quality.model_id, quality.space, quality.samples, quality.task) == ("m", SPACE, 7, "t")
    assert quality.accuracy == pytest.approx(WORTH.accuracy, abs=1e-6)
    quality.check("m", SPACE)


def test_check_of_other_model_or_plans_raises() -> None:
    with pytest.raises(InputError, match=r"id m.*other"):
        WORTH.check("other", SPACE)
    with pytest.raises(InputError, match="other plans"):
        WORTH.check("m", make_space(depth=5, top_k=3))
    content: Any = {name: getattr(WORTH, name) for name in PlanQuality.model_fields}
    for accuracy in ((0.5,), (float("nan"),) * len(PLANS), (1.5,) * len(PLANS)):
        with pytest.raises(ValueError, match="accuracy"):
            PlanQuality(**{**content, "accuracy": accuracy})


def test_load_of_invalid_file_raises(tmp_path: Path) -> None:
    path = WORTH.save(tmp_path / "plan_quality.json")
    check_artifact_file(PlanQuality.load, path, PlanQuality.HINT)


@settings(deadline=None)
@given(
    points=st.lists(
        st.tuples(st.integers(1, 20).map(float), st.integers(0, 20).map(lambda share: share / 20)),
        min_size=1, max_size=30,
    ),
    max_plans_kept=st.integers(2, 12),
)  # fmt: skip
def test_select_pareto_plans_keeps_front_and_ends(
    points: list[tuple[float, float]], max_plans_kept: int
) -> None:
    ms, quality = map(list, zip(*points, strict=True))
    plans = PLANS[: len(points)]
    number = {plan: index for index, plan in enumerate(plans)}
    full = [number[plan] for plan in select_pareto_plans(plans, ms, quality, max_plans=len(plans) + 2)]
    for index in range(len(points)):
        beaten = any(
            (ms[other] < ms[index] and quality[other] >= quality[index])
            or (ms[other] <= ms[index] and quality[other] > quality[index])
            for other in range(len(points))
        )
        equal = any((ms[other], quality[other]) == (ms[index], quality[index]) for other in full)
        assert equal != beaten
    assert [ms[index] for index in full] == sorted(ms[index] for index in full)
    subset = [number[plan] for plan in select_pareto_plans(plans, ms, quality, max_plans=max_plans_kept)]
    assert len(subset) == min(max_plans_kept, len(full)) and set(subset) <= set(full)
    assert subset[0] == full[0] and subset[-1] == full[-1]


def test_select_pareto_plans_with_invalid_arguments_raises() -> None:
    with pytest.raises(InputError, match="equally many"):
        select_pareto_plans([], [], [])
    with pytest.raises(InputError, match="equally many"):
        select_pareto_plans(PLANS[:2], [1.0], [0.5, 0.5])
    for ms, limit in (([1.0, float("inf")], 2), ([1.0, 0.0], 2), ([1.0, 2.0], 1)):
        with pytest.raises(InputError, match="finite and above 0"):
            select_pareto_plans(PLANS[:2], ms, [0.5, 0.5], limit)
