"""A quadratic assignment problem as the searches take it: a sum of terms that a transposition leaves alone.

In every term both matrices are symmetric or both are antisymmetric, so that row and column of whatever moves
say the same and a search reads rows only. Any problem is such a sum:

    D symmetric           F∘D = (F + Fᵀ)/2 ∘ D
    F symmetric           F∘D = F ∘ (D + Dᵀ)/2
    neither               F∘D = (F + Fᵀ)/2 ∘ (D + Dᵀ)/2 + (F - Fᵀ)/2 ∘ (D - Dᵀ)/2

where F∘D stands for the sum over i, j of F[i, j] D[p[i], p[j]]; the mixed products cancel. Integers are not
halved: the terms then hold `scale` times the problem.

With A and B of a term, B in the order of p, swapping r and s changes the cost by

    2 Σ_k (A[r,k] - A[s,k]) (B[s,k] - B[r,k])
      + (A[r,r] + A[s,s] - A[r,s] - A[s,r]) (B[r,r] + B[s,s] - B[r,s] - B[s,r])

and, once r and s have been swapped, the change by swapping any other u and v differs from what it was by

    2 ((A[r,u] - A[s,u]) - (A[r,v] - A[s,v])) ((B[s,u] - B[r,u]) - (B[s,v] - B[r,v]))

which is Taillard's update (Parallel Computing 1991) for such terms, B in the new order.

Things that exchange nothing with anybody, such as the dummies of empty sites, come last: to swap two of them
changes nothing, and a search that took such swaps for free moves would make little else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.codesign.layout.qap.problem import EXACT, largest, stacked
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class Terms:
    """The terms of a problem.

    Attributes:
        a: Flows, [T, n, n], int64 or float64.
        b: Distances, [T, n, n], of the same dtype.
        symmetric: How many are symmetric; they come first, and those after them are antisymmetric.
        order: Which thing each row of `a` is, int64, [n].
        movers: How many exchange something; they come first.
        scale: The terms are worth so many times the problem.
        wall: More than twice what any sum that a search forms from them can come to.
    """

    a: np.ndarray
    b: np.ndarray
    symmetric: int
    order: np.ndarray
    movers: int
    scale: int
    wall: float

    @classmethod
    def of(cls, flow: Any, distance: Any) -> Terms:
        """The terms of a problem.

        Args:
            flow: [n, n] or [K, n, n].
            distance: Likewise.

        Raises:
            InputError: The matrices cannot be used (see `qap.stacked`), or they hold integers so large that
                what a search adds up does not fit 64 bits.
        """
        f, d = stacked(flow, distance)
        own = [
            (bool((one == one.T).all()), bool((other == other.T).all()))
            for one, other in zip(f, d, strict=True)
        ]
        factors = [(1 if alike[0] else 2) * (1 if alike[1] else 2) for alike in own]
        scale = max(factors)
        if f.dtype == np.int64 and 256.0 * scale * largest(f, d) >= 2.0**63:
            raise InputError(
                f"costs of up to {largest(f, d):.1e} leave a search no room to add them; divide the flow or "
                "the distance by a common factor"
            )
        a, b = [], []
        for one, other, alike, factor in zip(f, d, own, factors, strict=True):
            a.append((one if alike[0] else one + one.T) * (scale // factor))
            b.append(other if alike[1] else other + other.T)
        for one, other, factor in zip(f, d, factors, strict=True):
            if factor == 4:
                a.append(one - one.T)
                b.append(other - other.T)
        a, b = np.stack(a), np.stack(b)
        if f.dtype == np.float64:
            # By a power of two, which loses nothing.
            a, scale = a / scale, 1
        wall = 32.0 * largest(a, b) + 1.0
        moves = (a != 0).any((0, 2))
        order = np.argsort(~moves, kind="stable")
        a = np.ascontiguousarray(a[:, order[:, None], order[None, :]])
        return cls(
            a=a, b=b, symmetric=len(f), order=order, movers=int(moves.sum()), scale=scale, wall=wall
        )  # fmt: skip

    @property
    def n(self) -> int:
        return self.a.shape[1]

    @property
    def swaps(self) -> int:
        """Number of swaps that can change something."""
        return self.movers * (2 * self.n - self.movers - 1) // 2

    def working(self) -> tuple[np.ndarray, np.ndarray, Any]:
        """Flows, distances and wall in the dtype to search in.

        float64 wherever it is exact, which is for floats and for integers that are not huge: it is faster
        than int64 on processors that cannot multiply vectors of the latter.
        """
        dtype = np.int64 if self.a.dtype == np.int64 and 4.0 * self.wall > EXACT else np.float64
        return self.a.astype(dtype), self.b.astype(dtype), dtype(self.wall)

    def inside(self, permutation: np.ndarray) -> np.ndarray:
        """The places [..., n] of things as those of the rows."""
        return permutation[..., self.order]

    def outside(self, permutation: np.ndarray) -> np.ndarray:
        """The places [..., n] of the rows as those of things."""
        found = np.empty_like(permutation)
        found[..., self.order] = permutation
        return found

    def ordered(self, b: np.ndarray, permutation: np.ndarray) -> np.ndarray:
        """A copy of the distances `b` [T, n, n] in the order of a permutation of the rows."""
        return np.ascontiguousarray(b[:, permutation[:, None], permutation[None, :]])
