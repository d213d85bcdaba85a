"""Piecewise linear functions of one axis that never fall.

Notation: knots x_0 < x_1 < ... < x_m. Ramp 0 is 1 everywhere; ramp j rises from 0 at x_{j-1} to 1 at x_j and
stays there, but the last goes on rising. A sum of ramps with coefficients that are not negative is constant
below x_0, never falls, and is linear between knots and beyond the last.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np


def ramps(x: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """Every ramp at every point: [n] -> [n, knots]."""
    found = np.ones((len(x), len(knots)))
    for j in range(1, len(knots)):
        rise = (x - knots[j - 1]) / (knots[j] - knots[j - 1])
        found[:, j] = np.clip(rise, 0.0, np.inf if j == len(knots) - 1 else 1.0)
    return found


def place(x: np.ndarray, knots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Between which knots points lie: index of the lower [n], and the way to the next, 0 to 1 (more at the
    end)."""
    if len(knots) == 1:
        return np.zeros(len(x), dtype=np.intp), np.zeros(len(x))
    # Not by np.clip, which takes ten times as long for few points.
    low = np.minimum(np.maximum(knots.searchsorted(x, side="right") - 1, 0), len(knots) - 2)
    return low, np.maximum((x - knots[low]) / (knots[low + 1] - knots[low]), 0.0)


def shares(x: np.ndarray, knots: np.ndarray) -> np.ndarray:
    """How much of the value at each knot is in that at a point between two: [n] -> [n, knots], rows sum to 1.

    Points before the first count as that, and points beyond the last as the last.
    """
    found, rows = np.zeros((len(x), len(knots))), np.arange(len(x))
    low, way = place(np.minimum(x, knots[-1]), knots)
    found[rows, low] = 1.0 - way
    if len(knots) > 1:
        found[rows, low + 1] = way
    return found


def filled(knots: np.ndarray, gap: float) -> np.ndarray:
    """These knots and others evenly between them, so that none is farther than `gap` from the next."""
    parts = [
        np.linspace(low, high, math.ceil((high - low) / gap), endpoint=False) for low, high in pairwise(knots)
    ]
    return np.concatenate([*parts, knots[-1:]])


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """At most so many knots from the values that there are, both ends among them: the larger, the sparser.

    Args:
        values: [n], not negative.
        most: At least 2.
    """
    distinct = np.unique(np.asarray(values, dtype=np.float64))
    if len(distinct) <= most:
        return distinct
    logs = np.log1p(distinct)
    wanted = np.linspace(logs[0], logs[-1], most)
    return np.unique(distinct[np.abs(logs - wanted[:, None]).argmin(axis=1)])
