"""Quadratic assignment problems as sums of terms that are invariant under transposition.

In each term both matrices are symmetric or both are antisymmetric, so that searches need to read rows only.
With F∘D for the sum over i, j of F[i, j] D[p[i], p[j]], any problem is such a sum:

    D symmetric           F∘D = (F + Fᵀ)/2 ∘ D
    F symmetric           F∘D = F ∘ (D + Dᵀ)/2
    neither               F∘D = (F + Fᵀ)/2 ∘ (D + Dᵀ)/2 + (F - Fᵀ)/2 ∘ (D - Dᵀ)/2

The mixed products cancel. Integers are not halved: the terms then represent `scale` times the problem.

For a term with A and B, B in the order of p, swapping r and s changes the cost by

    2 Σ_k (A[r,k] - A[s,k]) (B[s,k] - B[r,k])
      + (A[r,r] + A[s,s] - A[r,s] - A[s,r]) (B[r,r] + B[s,s] - B[r,s] - B[s,r])

and after the swap the change of any other swap (u, v) differs from its previous value by

    2 ((A[r,u] - A[s,u]) - (A[r,v] - A[s,v])) ((B[s,u] - B[r,u]) - (B[s,v] - B[r,v]))

which is Taillard's update (Parallel Computing 1991) for such terms, with B in the new order.

Items without flow, such as dummies of empty sites, come last: swapping two of them changes nothing, and a
search that accepted such swaps would make hardly any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.codesign.layout.qap.problem import EXACT, bound_magnitude, stack_matrices
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class QapTerms:
    """Terms of a problem.

    Attributes:
        a: Flows, [T, n, n], int64 or float64.
        b: Distances, [T, n, n], of the same dtype.
        num_symmetric: Number of symmetric terms; they come first, followed by antisymmetric ones.
        order: Item of each row of `a`, int64, [n].
        num_movers: Number of items with flow; they come first.
        scale: Factor between the terms and the problem.
        big_m: More than twice the largest sum that a search can form.
    """

    a: np.ndarray
    b: np.ndarray
    num_symmetric: int
    order: np.ndarray
    num_movers: int
    scale: int
    big_m: float

    @classmethod
    def from_matrices(cls, flow: Any, distance: Any) -> QapTerms:
        """Decompose a problem into terms.

        Args:
            flow: [n, n] or [K, n, n].
            distance: Of the same shape.

        Raises:
            InputError: See `stack_matrices`; or integers are so large that sums would overflow 64 bits.
        """
        f, d = stack_matrices(flow, distance)
        symmetries = [
            (bool((flow_matrix == flow_matrix.T).all()), bool((distance_matrix == distance_matrix.T).all()))
            for flow_matrix, distance_matrix in zip(f, d, strict=True)
        ]
        factors = [(1 if symmetry[0] else 2) * (1 if symmetry[1] else 2) for symmetry in symmetries]
        scale = max(factors)
        if f.dtype == np.int64 and 256.0 * scale * bound_magnitude(f, d) >= 2.0**63:
            raise InputError(
                f"costs of up to {bound_magnitude(f, d):.1e} are too large to add in 64 bits; divide flow or "
                "distance by a common factor"
            )
        a, b = [], []
        for flow_matrix, distance_matrix, symmetry, factor in zip(f, d, symmetries, factors, strict=True):
            a.append((flow_matrix if symmetry[0] else flow_matrix + flow_matrix.T) * (scale // factor))
            b.append(distance_matrix if symmetry[1] else distance_matrix + distance_matrix.T)
        for flow_matrix, distance_matrix, factor in zip(f, d, factors, strict=True):
            if factor == 4:
                a.append(flow_matrix - flow_matrix.T)
                b.append(distance_matrix - distance_matrix.T)
        a, b = np.stack(a), np.stack(b)
        if f.dtype == np.float64:
            # Division by a power of two is exact.
            a, scale = a / scale, 1
        big_m = 32.0 * bound_magnitude(a, b) + 1.0
        is_mover = (a != 0).any((0, 2))
        order = np.argsort(~is_mover, kind="stable")
        a = np.ascontiguousarray(a[:, order[:, None], order[None, :]])
        return cls(
            a=a,
            b=b,
            num_symmetric=len(f),
            order=order,
            num_movers=int(is_mover.sum()),
            scale=scale,
            big_m=big_m,
        )

    @property
    def n(self) -> int:
        return self.a.shape[1]

    @property
    def num_swaps(self) -> int:
        """Number of swaps that can change the cost."""
        return self.num_movers * (2 * self.n - self.num_movers - 1) // 2

    def to_working_dtype(self) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return the flows, the distances and `big_m` in the dtype of the search.

        The dtype is float64 unless integers are too large to be exact in it, because float64 is faster than
        int64 on processors without vectorized int64 multiplication.
        """
        dtype = np.int64 if self.a.dtype == np.int64 and 4.0 * self.big_m > EXACT else np.float64
        return self.a.astype(dtype), self.b.astype(dtype), dtype(self.big_m)

    def to_rows(self, permutation: np.ndarray) -> np.ndarray:
        """Reorder places [..., n] from items to rows."""
        return permutation[..., self.order]

    def from_rows(self, permutation: np.ndarray) -> np.ndarray:
        """Reorder places [..., n] from rows to items."""
        permuted = np.empty_like(permutation)
        permuted[..., self.order] = permutation
        return permuted

    def order_distances(self, b: np.ndarray, permutation: np.ndarray) -> np.ndarray:
        """Copy the distances `b` [T, n, n] in the order of a permutation of the rows."""
        return np.ascontiguousarray(b[:, permutation[:, None], permutation[None, :]])
