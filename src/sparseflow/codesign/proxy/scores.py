"""How good predictions are: by their ratio to what was measured, and by their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparseflow.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def median_error(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Median of |predicted - measured| / measured.

    Raises:
        InputError: Lengths differ, there are none, or a measurement is not above 0.
    """
    a, b = _both(predicted, measured)
    return float(np.median(np.abs(a - b) / b))


def spearman(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks. 0 where all are equal.

    Raises:
        InputError: As for `median_error`.
    """
    a, b = (_ranks(values) for values in _both(predicted, measured))
    a, b = a - a.mean(), b - b.mean()
    spread = float(np.sqrt((a**2).sum() * (b**2).sum()))
    return float((a * b).sum()) / spread if spread > 0.0 else 0.0


def _ranks(values: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2.0)[place]


def _both(predicted: ArrayLike, measured: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    if a.ndim != 1 or a.shape != b.shape or not a.size or not (b > 0.0).all() or not np.isfinite(a).all():
        raise InputError(
            f"{a.size} predictions and {b.size} measurements: as many of both, at least one, "
            "finite, and every measurement above 0 are needed"
        )
    return a, b
