"""A lower bound of a quadratic assignment problem (Gilmore 1962, Lawler 1963).

What i costs at place q is at least the sum of the products of its flows in ascending order and the distances
from q in descending order, whoever stands where. The cheapest assignment of things to places by these costs
then costs no more than the best permutation does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseflow.codesign.layout.qap import EXACT, largest, stacked
from sparseflow.core.extras import require


def lower_bound(flow: Any, distance: Any) -> int | float:
    """What the cost is at least; an int for integer matrices.

    Args:
        flow: [n, n] or [K, n, n].
        distance: Likewise.

    Raises:
        InputError: The matrices cannot be used; see `qap.stacked`.
        MissingExtraError: scipy is not installed.
    """
    f, d = stacked(flow, distance)
    found = _bound(f, d)
    # A sum over pairs in both directions bounds more tightly where flows go one way and distances do not.
    if (d == d.transpose(0, 2, 1)).all() and not (f == f.transpose(0, 2, 1)).all():
        both = _bound(f + f.transpose(0, 2, 1), d)
        found = max(found, -(-both // 2) if isinstance(both, int) else both / 2)
    return found


def _bound(f: np.ndarray, d: np.ndarray) -> int | float:
    """The bound of a checked problem."""
    optimize = require("scipy.optimize", "codesign")
    n = f.shape[1]
    # Where it is exact: numpy multiplies matrices of integers a hundred times more slowly.
    exact = f.dtype == np.int64 and largest(f, d) < EXACT
    working = np.float64 if exact else f.dtype
    least = np.zeros((n, n), working)
    others = ~np.eye(n, dtype=bool)
    for one, other in zip(f, d, strict=True):
        ascending = np.sort(one[others].reshape(n, n - 1), axis=1).astype(working)
        descending = np.sort(other[others].reshape(n, n - 1), axis=1)[:, ::-1].astype(working)
        least += ascending @ descending.T + np.outer(np.diag(one), np.diag(other))
    rows, columns = optimize.linear_sum_assignment(least)
    found = least[rows, columns].sum().astype(f.dtype).item()
    if isinstance(found, int) and (most := int(np.abs(least).max())) > 2**53:
        # scipy assigns in float64, and huge integers lose their last digits there.
        found -= n * (most >> 50)
    return found
