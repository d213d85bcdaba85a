"""Conformal intervals."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.errors import InputError

INTERVAL = {"low": 0.9, "high": 1.2, "coverage": 0.9, "samples": 12}


def contains(interval: ConformalInterval, error: float) -> bool:
    low, high = interval.bounds(1.0)
    return low * (1.0 - 1e-9) <= math.exp(error) <= high * (1.0 + 1e-9)


@given(st.lists(st.floats(-2.0, 2.0), min_size=2, max_size=60), st.sampled_from([0.5, 0.7, 0.8, 0.9, 0.95]))
def test_fit_covers_held_out_errors_at_the_requested_rate(errors: list[float], coverage: float) -> None:
    outside = 0
    for index, error in enumerate(errors):
        other_errors = [math.exp(e) for e in errors[:index] + errors[index + 1 :]]
        outside += not contains(
            ConformalInterval.fit([1.0] * len(other_errors), other_errors, coverage), error
        )
    # At least one per side: with few samples the ends are the largest observed errors.
    assert outside <= 2 * max(math.floor((1.0 - coverage) / 2.0 * len(errors) + 1e-9), 1)


def test_fit_coverage_on_lognormal_errors_is_close_to_the_target() -> None:
    source = random.Random(0)
    within = []
    for _ in range(300):
        predicted = [source.uniform(0.1, 100.0) for _ in range(120)]
        measured = [p * math.exp(source.gauss(0.05, 0.2)) for p in predicted]
        interval = ConformalInterval.fit(predicted[:99], measured[:99], 0.9)
        ends = [interval.bounds(p) for p in predicted[99:]]
        within += [low <= m <= high for (low, high), m in zip(ends, measured[99:], strict=True)]
    assert 0.89 <= sum(within) / len(within) <= 0.93


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=40),
    st.floats(0.5, 0.99),
)
def test_fit_contains_the_prediction_and_widens_with_coverage(
    pairs: list[tuple[float, float]], coverage: float
) -> None:
    predicted, measured = zip(*pairs, strict=True)
    interval = ConformalInterval.fit(predicted, measured, coverage)
    assert 0.0 < interval.low <= 1.0 <= interval.high
    assert (interval.coverage, interval.samples) == (coverage, len(pairs))
    wider = ConformalInterval.fit(predicted, measured, (1.0 + coverage) / 2.0)
    assert wider.low <= interval.low and interval.high <= wider.high


def test_fit_with_few_samples_uses_the_largest_errors() -> None:
    interval = ConformalInterval.fit([10.0, 10.0, 10.0], [8.0, 10.5, 15.0], 0.9)
    assert (interval.low, interval.high) == pytest.approx((0.8, 1.5))
    assert interval.bounds(4.0) == pytest.approx((3.2, 6.0))
    single = ConformalInterval.fit([10.0], [12.0])
    assert (single.low, single.high, single.samples) == (1.0, pytest.approx(1.2), 1)


def test_fit_ignores_one_outlier_among_many() -> None:
    measured = [1.0 + 0.001 * index for index in range(99)] + [50.0]
    assert ConformalInterval.fit([1.0] * 100, measured, 0.9).high < 1.1


def test_fit_with_biased_predictions_keeps_low_at_1() -> None:
    interval = ConformalInterval.fit([1.0] * 30, [2.0 + 0.01 * index for index in range(30)])
    assert interval.low == 1.0 and interval.high > 2.0


@pytest.mark.parametrize(("predicted", "measured"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_fit_with_different_lengths_raises(predicted: list[float], measured: list[float]) -> None:
    with pytest.raises(InputError, match=f"{len(predicted)} predictions and {len(measured)} measurements"):
        ConformalInterval.fit(predicted, measured)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_fit_with_values_not_above_0_raises(value: float) -> None:
    for predicted, measured in (([1.0, value], [1.0, 1.0]), ([1.0, 1.0], [value, 1.0])):
        with pytest.raises(InputError, match="0"):
            ConformalInterval.fit(predicted, measured)


@pytest.mark.parametrize("coverage", [-1.0, 0.0, 1.0, 1.5, 90, float("nan")])
def test_fit_with_coverage_out_of_range_raises(coverage: float) -> None:
    with pytest.raises(InputError, match="coverage"):
        ConformalInterval.fit([1.0, 1.0], [1.0, 1.1], coverage)


def test_interval_survives_json() -> None:
    interval = ConformalInterval.fit([1.0, 2.0, 3.0], [1.1, 1.7, 3.3])
    assert ConformalInterval.model_validate_json(interval.model_dump_json()) == interval


@pytest.mark.parametrize("missing", sorted(INTERVAL))
def test_interval_without_a_field_raises(missing: str) -> None:
    with pytest.raises(ValidationError, match=missing):
        ConformalInterval.model_validate({name: value for name, value in INTERVAL.items() if name != missing})


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        "interval",
        {**INTERVAL, "low": "wide"},
        {**INTERVAL, "high": None},
        {**INTERVAL, "samples": [1]},
        {**INTERVAL, "samples": float("inf")},
        {**INTERVAL, "low": float("nan")},
        {**INTERVAL, "low": 1.3},
        {**INTERVAL, "high": float("inf")},
    ],
)
def test_interval_of_a_malformed_record_raises(record: Any) -> None:
    with pytest.raises(ValidationError):
        ConformalInterval.model_validate(record)
