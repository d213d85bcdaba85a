"""Metrics of predictions, quantiles, bootstrap intervals and Pareto fronts."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from sparseflow.errors import InputError

TOLERANCE = 0.10
"""Default relative error up to which a prediction counts as correct."""

_NUM_RESAMPLES = 10_000
_MAX_DRAWS_IN_MEMORY = 2**22


def mape(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Mean absolute percentage error, as a fraction: mean of |predicted - measured| / measured.

    Raises:
        InputError: The shapes differ, the arrays are empty, a prediction is not finite, or a measurement is
            not above 0.
    """
    return float(_relative_errors(predicted, measured).mean())


def median_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Median of |predicted - measured| / measured. Raises InputError like `mape`."""
    return float(np.median(_relative_errors(predicted, measured)))


def fraction_within(predicted: ArrayLike, measured: ArrayLike, tolerance: float = TOLERANCE) -> float:
    """Fraction of predictions with a relative error of at most `tolerance`. Raises InputError like `mape`."""
    return float((_relative_errors(predicted, measured) <= tolerance).mean())


def interval_coverage(low: ArrayLike, high: ArrayLike, measured: ArrayLike) -> float:
    """Fraction of measurements inside their interval [low, high].

    Raises:
        InputError: The shapes differ or the arrays are empty.
    """
    lower, upper, values = (np.asarray(array, dtype=float) for array in (low, high, measured))
    if not lower.shape == upper.shape == values.shape or not values.size:
        raise InputError(
            f"expected equally many interval ends and measurements, at least one; got {lower.size} lower "
            f"ends, {upper.size} upper ends and {values.size} measurements"
        )
    return float(((lower <= values) & (values <= upper)).mean())


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation coefficient; ties get the mean of their ranks.

    Args:
        a: Shape [n].
        b: Shape [n].

    Returns:
        A number from -1 to 1; 0 if all values of `a` or all values of `b` are equal.

    Raises:
        InputError: The shapes differ, the arrays are empty, or a value is not finite.
    """
    x, y = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if x.ndim != 1 or x.shape != y.shape or not x.size or not (np.isfinite(x) & np.isfinite(y)).all():
        raise InputError(
            f"expected two finite, equally long, non-empty lists; got {x.size} and {y.size} values"
        )
    x, y = (_rank(values) for values in (x, y))
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x**2).sum() * (y**2).sum()))
    return float((x * y).sum()) / norm if norm > 0.0 else 0.0


def quantile(values: Sequence[float], q: float) -> float:
    """The `q`-quantile of `values`, linearly interpolated, in the unit of `values`.

    Raises:
        InputError: There are no values, or `q` is not between 0 and 1.
    """
    if not len(values) or not 0.0 <= q <= 1.0:
        raise InputError(
            f"a quantile needs at least one value (got {len(values)}) and `q` (={q}) between 0 and 1"
        )
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    index = math.floor(position)
    lower, upper = ordered[index], ordered[min(index + 1, len(ordered) - 1)]
    return float(lower + (position - index) * (upper - lower))


def bootstrap_mean(
    values: ArrayLike,
    groups: Sequence[Hashable] | None = None,
    *,
    seed: int = 0,
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean, resampling whole groups (Efron 1979).

    Values of one group, such as tasks of one matrix, are correlated and are therefore drawn together.

    Args:
        values: Shape [n].
        groups: Group of each value; by default each value is its own group.
        seed: Seed of the resampling.

    Returns:
        Lower and upper end; both are the mean if there is only one group.

    Raises:
        InputError: There are no values, a value is not finite, or the lengths differ.
    """
    array = np.asarray(values, dtype=float).ravel()
    labels = range(len(array)) if groups is None else groups
    if not len(array) or len(labels) != len(array) or not np.isfinite(array).all():
        raise InputError(
            f"expected finite values, at least one, and one group per value; got {len(array)} values and "
            f"{len(labels)} groups"
        )
    index_of = {label: index for index, label in enumerate(dict.fromkeys(labels))}
    group_index = np.array([index_of[label] for label in labels])
    sums, counts = np.bincount(group_index, weights=array), np.bincount(group_index)
    generator = np.random.default_rng(seed)
    means = np.empty(_NUM_RESAMPLES)
    step = max(_MAX_DRAWS_IN_MEMORY // len(sums), 1)
    for start in range(0, _NUM_RESAMPLES, step):
        rows = generator.integers(len(sums), size=(min(step, _NUM_RESAMPLES - start), len(sums)))
        means[start : start + step] = sums[rows].sum(1) / counts[rows].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def pareto_front(
    points: ArrayLike, *, maximize: Sequence[bool] | None = None, tolerance: float = 0.0
) -> list[int]:
    """Indices of the points that no other point dominates, sorted by the first objective, best first.

    A point dominates another if it is at least as good in every objective. Of equal points only the first is
    on the front.

    Args:
        points: Objectives of each point, shape [n, k].
        maximize: For each objective, whether larger is better; by default all are minimized.
        tolerance: Relative margin: a point must be better than each other point of the front by more than
            this in at least one objective. Removes duplicates that differ by rounding.

    Returns:
        Row indices into `points`.

    Raises:
        InputError: `points` is not two-dimensional, contains NaN, or `maximize` has another length than k.
    """
    costs = np.array(points, dtype=float)
    if costs.size == 0:
        return []
    if costs.ndim != 2 or np.isnan(costs).any():
        raise InputError(f"`points` must have shape [n, k] and no NaN; got shape {list(costs.shape)}")
    if maximize is not None:
        if len(maximize) != costs.shape[1]:
            raise InputError(
                f"`maximize` has {len(maximize)} entries, and `points` has {costs.shape[1]} objectives"
            )
        costs[:, np.asarray(maximize, dtype=bool)] *= -1.0
    margin = tolerance * np.abs(costs)
    front: list[int] = []
    # In lexicographic order every dominating point comes before the points that it dominates.
    for index in np.lexsort(costs.T[::-1]).tolist():
        if not front or not (costs[front] - margin[front] <= costs[index]).all(axis=1).any():
            front.append(index)
    return front


def _rank(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    return (last_rank - (counts - 1) / 2.0)[inverse]


def _relative_errors(predicted: ArrayLike, measured: ArrayLike) -> np.ndarray:
    a, b = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    if a.shape != b.shape or not a.size or not np.isfinite(a).all() or not (b > 0.0).all():
        raise InputError(
            "expected equally many finite predictions and measurements above 0, at least one; got "
            f"{a.size} predictions and {b.size} measurements"
        )
    return np.abs(a - b) / b
