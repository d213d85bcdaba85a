"""How good predictions are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

WITHIN = 0.10
"""A prediction this close to the measurement counts as right."""


def mape(predicted: ArrayLike, measured: ArrayLike) -> float:
    """Mean absolute error as a share of what was measured."""
    return float(_shares(predicted, measured).mean())


def within(predicted: ArrayLike, measured: ArrayLike, share: float = WITHIN) -> float:
    """Share of predictions that are at most `share` away from what was measured."""
    return float((_shares(predicted, measured) <= share).mean())


def covered(low: ArrayLike, high: ArrayLike, measured: ArrayLike) -> float:
    """Share of measurements within their intervals."""
    import numpy as np

    below, above = np.asarray(low, dtype=float), np.asarray(high, dtype=float)
    found = np.asarray(measured, dtype=float)
    if not below.shape == above.shape == found.shape or not found.size:
        raise InputError(
            f"{below.size} ends, {above.size} ends and {found.size} measurements: as many of each, at least "
            f"one, are needed"
        )
    return float(((below <= found) & (found <= above)).mean())


def _shares(predicted: ArrayLike, measured: ArrayLike):
    import numpy as np

    a, b = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    if a.shape != b.shape or not a.size or not (b > 0.0).all():
        raise InputError(
            f"{a.size} predictions and {b.size} measurements: as many of both, at least one, and every "
            f"measurement above 0 are needed"
        )
    return np.abs(a - b) / b
