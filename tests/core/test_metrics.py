"""How good predictions are, in numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparseflow.core import metrics
from sparseflow.errors import InputError


def test_mape_is_the_mean_share_by_which_predictions_are_off() -> None:
    assert metrics.mape([1.0, 3.0, 4.0], [2.0, 2.0, 4.0]) == pytest.approx((0.5 + 0.5 + 0.0) / 3)


def test_mape_is_a_share_of_what_was_measured_and_not_of_what_was_predicted() -> None:
    assert metrics.mape([3.0], [1.0]) == pytest.approx(2.0)
    assert metrics.mape([1.0], [3.0]) == pytest.approx(2 / 3)


def test_within_counts_both_sides_and_the_edge() -> None:
    predicted = [90.0, 110.0, 89.0, 111.0, 100.0]
    assert metrics.fraction_within(predicted, [100.0] * 5) == pytest.approx(0.6)
    assert metrics.fraction_within(predicted, [100.0] * 5, tolerance=0.11) == pytest.approx(1.0)
    assert metrics.fraction_within(predicted, [100.0] * 5, tolerance=0.0) == pytest.approx(0.2)


@pytest.mark.parametrize("judge", [metrics.mape, metrics.fraction_within])
def test_the_unit_does_not_matter(judge: Callable[..., float]) -> None:
    random = np.random.default_rng(0)
    measured = random.uniform(0.1, 10.0, 50)
    predicted = measured * random.uniform(0.8, 1.2, 50)
    assert judge(list(predicted * 1024.0), measured * 1024.0) == judge(predicted, list(measured))


def test_covered_counts_measurements_within_their_interval_and_its_ends() -> None:
    assert metrics.interval_coverage([1, 1, 1, 1], [2, 2, 2, 2], [1, 2, 0.9, 2.1]) == pytest.approx(0.5)


@pytest.mark.parametrize("judge", [metrics.mape, metrics.fraction_within])
@pytest.mark.parametrize(
    ("predicted", "measured"),
    [([], []), ([1.0], []), ([1.0, 2.0], [1.0]), ([1.0], [0.0]), ([1.0], [-1.0]), ([1.0], [float("nan")])],
)
def test_predictions_need_as_many_measurements_above_0(
    judge: Callable[..., float], predicted: list[float], measured: list[float]
) -> None:
    told = f"{len(predicted)} predictions and {len(measured)} measurements"
    with pytest.raises(InputError, match=told):
        judge(predicted, measured)


@pytest.mark.parametrize("ends", [([], [], []), ([1.0], [2.0], [1.0, 1.5]), ([1.0, 1.0], [2.0], [1.5, 1.5])])
def test_covered_needs_as_many_measurements_as_intervals(ends: tuple[Any, Any, Any]) -> None:
    with pytest.raises(InputError, match=rf"{len(ends[2])} measurements"):
        metrics.interval_coverage(*ends)
