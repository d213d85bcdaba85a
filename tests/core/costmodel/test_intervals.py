"""Intervals hold the share of measurements that they promise."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.errors import FileFormatError, InputError

INTERVAL = {"low": 0.9, "high": 1.2, "coverage": 0.9, "samples": 12}


def holds(interval: ConformalInterval, error: float) -> bool:
    low, high = interval.bounds(1.0)
    return low * (1.0 - 1e-9) <= math.exp(error) <= high * (1.0 + 1e-9)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.floats(-2.0, 2.0), min_size=2, max_size=60), st.sampled_from([0.5, 0.7, 0.8, 0.9, 0.95]))
def test_of_exchangeable_errors_each_held_out_in_turn_the_promised_share_is_within(
    errors: list[float], coverage: float
) -> None:
    outside = 0
    for place, error in enumerate(errors):
        rest = [math.exp(e) for e in errors[:place] + errors[place + 1 :]]
        outside += not holds(ConformalInterval.fit([1.0] * len(rest), rest, coverage), error)
    # At least one a side: from few samples the ends are the largest errors seen.
    assert outside <= 2 * max(math.floor((1.0 - coverage) / 2.0 * len(errors) + 1e-9), 1)


def test_the_promised_share_is_met_and_not_far_exceeded() -> None:
    source = random.Random(0)
    within = []
    for _ in range(300):
        predicted = [source.uniform(0.1, 100.0) for _ in range(120)]
        measured = [p * math.exp(source.gauss(0.05, 0.2)) for p in predicted]
        interval = ConformalInterval.fit(predicted[:99], measured[:99], 0.9)
        ends = [interval.bounds(p) for p in predicted[99:]]
        within += [low <= m <= high for (low, high), m in zip(ends, measured[99:], strict=True)]
    assert 0.89 <= sum(within) / len(within) <= 0.93


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=40),
    st.floats(0.5, 0.99),
)
def test_an_interval_holds_its_prediction_and_grows_with_coverage(
    pairs: list[tuple[float, float]], coverage: float
) -> None:
    predicted, measured = zip(*pairs, strict=True)
    interval = ConformalInterval.fit(predicted, measured, coverage)
    assert 0.0 < interval.low <= 1.0 <= interval.high
    assert (interval.coverage, interval.samples) == (coverage, len(pairs))
    wider = ConformalInterval.fit(predicted, measured, (1.0 + coverage) / 2.0)
    assert wider.low <= interval.low and interval.high <= wider.high


def test_few_samples_give_the_largest_errors_seen() -> None:
    interval = ConformalInterval.fit([10.0, 10.0, 10.0], [8.0, 10.5, 15.0], 0.9)
    assert (interval.low, interval.high) == pytest.approx((0.8, 1.5))
    assert interval.bounds(4.0) == pytest.approx((3.2, 6.0))
    one = ConformalInterval.fit([10.0], [12.0])
    assert (one.low, one.high, one.samples) == (1.0, pytest.approx(1.2), 1)


def test_one_outlier_among_many_does_not_make_the_interval() -> None:
    measured = [1.0 + 0.001 * index for index in range(99)] + [50.0]
    assert ConformalInterval.fit([1.0] * 100, measured, 0.9).high < 1.1


def test_predictions_that_are_all_too_low_still_lie_within() -> None:
    interval = ConformalInterval.fit([1.0] * 30, [2.0 + 0.01 * index for index in range(30)])
    assert interval.low == 1.0 and interval.high > 2.0


@pytest.mark.parametrize(("predicted", "measured"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_as_many_predictions_as_measurements_are_needed(
    predicted: list[float], measured: list[float]
) -> None:
    with pytest.raises(InputError, match=f"{len(predicted)} predictions and {len(measured)} measurements"):
        ConformalInterval.fit(predicted, measured)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_values_that_are_not_above_0_are_refused_on_both_sides(value: float) -> None:
    for predicted, measured in (([1.0, value], [1.0, 1.0]), ([1.0, 1.0], [value, 1.0])):
        with pytest.raises(InputError, match="above 0"):
            ConformalInterval.fit(predicted, measured)


@pytest.mark.parametrize("coverage", [-1.0, 0.0, 1.0, 1.5, 90, float("nan")])
def test_a_coverage_that_is_no_share_is_refused(coverage: float) -> None:
    with pytest.raises(InputError, match="coverage"):
        ConformalInterval.fit([1.0, 1.0], [1.0, 1.1], coverage)


def test_an_interval_comes_back_from_json() -> None:
    interval = ConformalInterval.fit([1.0, 2.0, 3.0], [1.1, 1.7, 3.3])
    assert ConformalInterval.from_dict(json.loads(json.dumps(interval.to_dict()))) == interval


@pytest.mark.parametrize("lost", sorted(INTERVAL))
def test_a_record_that_lacks_a_part_is_refused(lost: str) -> None:
    with pytest.raises(FileFormatError, match=f"an interval cannot be read.*{lost}"):
        ConformalInterval.from_dict({name: value for name, value in INTERVAL.items() if name != lost})


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
def test_what_is_not_an_interval_is_refused(record: Any) -> None:
    with pytest.raises(FileFormatError, match="an interval cannot be read"):
        ConformalInterval.from_dict(record)
