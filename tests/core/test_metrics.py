"""Metrics against hand-computed values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core import metrics
from sparseflow.errors import InputError

RELATIVE_ERRORS = [metrics.mape, metrics.median_error, metrics.fraction_within]


def test_mape_is_relative_to_the_measurement() -> None:
    assert metrics.mape([1.0, 3.0, 4.0], [2.0, 2.0, 4.0]) == pytest.approx((0.5 + 0.5 + 0.0) / 3)
    assert metrics.mape([3.0], [1.0]) == pytest.approx(2.0)
    assert metrics.mape([1.0], [3.0]) == pytest.approx(2 / 3)


def test_median_error_is_relative_to_the_measurement() -> None:
    assert metrics.median_error([1.1, 2.0, 6.0], [1.0, 2.0, 4.0]) == pytest.approx(0.1)


def test_fraction_within_includes_the_tolerance() -> None:
    predicted = [90.0, 110.0, 89.0, 111.0, 100.0]
    assert metrics.fraction_within(predicted, [100.0] * 5) == pytest.approx(0.6)
    assert metrics.fraction_within(predicted, [100.0] * 5, tolerance=0.11) == pytest.approx(1.0)
    assert metrics.fraction_within(predicted, [100.0] * 5, tolerance=0.0) == pytest.approx(0.2)


@pytest.mark.parametrize("metric", RELATIVE_ERRORS)
def test_relative_errors_do_not_depend_on_the_unit(metric: Callable[..., float]) -> None:
    generator = np.random.default_rng(0)
    measured = generator.uniform(0.1, 10.0, 50)
    predicted = measured * generator.uniform(0.8, 1.2, 50)
    assert metric(list(predicted * 1024.0), measured * 1024.0) == metric(predicted, list(measured))


@pytest.mark.parametrize("metric", RELATIVE_ERRORS)
@pytest.mark.parametrize(
    ("predicted", "measured"),
    [
        ([], []), ([1.0], []), ([1.0, 2.0], [1.0]), ([1.0], [0.0]), ([1.0], [-1.0]), ([1.0], [float("nan")]),
        ([float("nan")], [1.0]),
    ],
)  # fmt: skip
def test_relative_errors_with_invalid_input_raise(
    metric: Callable[..., float], predicted: list[float], measured: list[float]
) -> None:
    with pytest.raises(InputError, match=f"{len(predicted)} predictions and {len(measured)} measurements"):
        metric(predicted, measured)


def test_interval_coverage_includes_the_ends() -> None:
    assert metrics.interval_coverage([1, 1, 1, 1], [2, 2, 2, 2], [1, 2, 0.9, 2.1]) == pytest.approx(0.5)


@pytest.mark.parametrize("ends", [([], [], []), ([1.0], [2.0], [1.0, 1.5]), ([1.0, 1.0], [2.0], [1.5, 1.5])])
def test_interval_coverage_with_different_lengths_raises(ends: tuple[Any, Any, Any]) -> None:
    with pytest.raises(InputError, match=f"{len(ends[2])} measurements"):
        metrics.interval_coverage(*ends)


def test_spearman_averages_the_ranks_of_ties() -> None:
    assert metrics.spearman([1.0, 2.0, 30.0], [5.0, 6.0, 7.0]) == pytest.approx(1.0)
    assert metrics.spearman([3.0, 2.0, 1.0], [-5.0, 0.0, 7.0]) == pytest.approx(-1.0)
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: the correlation is sqrt(3) / 2.
    assert metrics.spearman([1.0, 1.0, 2.0], [1.0, 2.0, 3.0]) == pytest.approx(np.sqrt(3.0) / 2.0)
    assert metrics.spearman([1.0, 1.0], [1.0, 2.0]) == 0.0


def test_spearman_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    a, b = generator.integers(1, 20, 60).astype(float), generator.integers(1, 20, 60).astype(float)
    assert metrics.spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)


@pytest.mark.parametrize(
    ("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([float("nan")], [1.0]), ([[1.0]], [[1.0]])]
)
def test_spearman_with_invalid_input_raises(a: list[Any], b: list[Any]) -> None:
    with pytest.raises(InputError, match=f"{len(a)} and {len(b)} values"):
        metrics.spearman(a, b)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0.0, 1.0))
def test_quantile_agrees_with_numpy(values: list[float], q: float) -> None:
    assert metrics.quantile(values, q) == pytest.approx(np.quantile(values, q), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize(("values", "q"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1), ([1.0], float("nan"))])
def test_quantile_with_invalid_input_raises(values: list[float], q: float) -> None:
    with pytest.raises(InputError, match=rf"\(={q}\)"):
        metrics.quantile(values, q)


def test_bootstrap_mean_contains_the_mean_and_widens_with_fewer_groups() -> None:
    values = np.random.default_rng(0).normal(0.5, 0.1, 64)
    low, high = metrics.bootstrap_mean(values)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 8, rel=0.1)
    assert metrics.bootstrap_mean(values, [index // 8 for index in range(64)]) != (low, high)
    assert metrics.bootstrap_mean(values, seed=1) != (low, high) == metrics.bootstrap_mean(values)


def test_bootstrap_mean_draws_the_values_of_a_group_together() -> None:
    assert metrics.bootstrap_mean([0.0, 0.0, 1.0, 1.0], list("aabb")) == (0.0, 1.0)
    assert metrics.bootstrap_mean([0.2, 0.4], ["a", "a"]) == pytest.approx((0.3, 0.3))


def test_bootstrap_mean_does_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).normal(size=9)
    monkeypatch.setattr(metrics, "_NUM_RESAMPLES", 200)
    expected = metrics.bootstrap_mean(values)
    monkeypatch.setattr(metrics, "_MAX_DRAWS_IN_MEMORY", 63)
    assert metrics.bootstrap_mean(values) == expected


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: metrics.bootstrap_mean([]), "0 values"),
        (lambda: metrics.bootstrap_mean([1.0], ["a", "b"]), "2 groups"),
    ],
)
def test_bootstrap_mean_with_invalid_input_raises(call: Callable[[], object], value: str) -> None:
    with pytest.raises(InputError, match=value):
        call()


def test_pareto_front_is_sorted_and_keeps_the_first_of_equal_points() -> None:
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.0, 2.0), (2.5, 2.0), (1.0, 4.0), (4.0, 1.0)]
    assert metrics.pareto_front(points) == [1, 2, 0]


def test_pareto_front_maximizes_what_it_is_told() -> None:
    latency_ms, accuracy = [1.0, 2.0, 2.0, 3.0], [0.5, 0.7, 0.6, 0.7]
    points = list(zip(latency_ms, accuracy, strict=True))
    assert metrics.pareto_front(points, maximize=(False, True)) == [0, 1]
    assert metrics.pareto_front(points, maximize=(True, True)) == [3]


def test_pareto_front_with_tolerance_drops_rounding_differences() -> None:
    points = [(1.0, 2.0), (1.0 + 1e-12, 2.0 - 1e-12), (1.1, 1.9)]
    assert metrics.pareto_front(points) == [0, 1, 2]
    assert metrics.pareto_front(points, tolerance=1e-9) == [0, 2]


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=15))
def test_pareto_front_matches_the_definition(points: list[tuple[int, int, int]]) -> None:
    def dominates(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    expected = {b for b in points if not any(dominates(a, b) for a in points)}
    front = [points[index] for index in metrics.pareto_front(points)]
    assert set(front) == expected and len(front) == len(expected) and front == sorted(front)


@pytest.mark.parametrize("options", [{"points": [1.0, 2.0]}, {"points": [[np.nan, 1.0]]}])
def test_pareto_front_with_invalid_points_raises(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        metrics.pareto_front(**options)
    with pytest.raises(InputError, match="3 entries"):
        metrics.pareto_front([[1.0, 2.0]], maximize=(True, True, True))


def test_pareto_front_of_no_points_is_empty() -> None:
    assert metrics.pareto_front([]) == []
