"""Reference implementation of robust tabu search (Taillard 1991) for many restarts, in plain torch.

Notation: A, B are the terms of a problem [T, n, n] (see `layout/qap/terms.py`); p [R, n] are the places in R
restarts; until[i, q] is the move until which it is tabu for i to return to site q.

The first `num_movers` items have flow; the others are dummies of empty sites and are not swapped with each
other. Move m swaps the pair (u, v), u < v, u a mover, with the lowest change among the swaps that

    1.  are overdue: until[u, p[v]] or until[v, p[u]] is below m - patience; if there are any, they take
        precedence;
    2.  are not tabu: until[u, p[v]] or until[v, p[u]] is below m; or lead below the best cost so far.

Ties are broken by u and then v; if all swaps are tabu, none is made. Then it is tabu for u to return to its
site until move m + low + (h(2m) · span >> 32), and for v until m + low + (h(2m + 1) · span >> 32), where h is
a 32-bit hash (`hash_counter`); dummies are always tabu (`rule.py`). For integers all implementations make the
same moves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.codesign.layout.qap.kernels.tabu.rule import TabuRule

_WORD = 0xFFFFFFFF


def hash_counter(counter: int, seed: Tensor) -> Tensor:
    """Hash a counter with each seed to 32 bits (MurmurHash3 finalizer).

    Args:
        counter: Index of the random number.
        seed: int64 below 2^32, any shape.
    """
    h = ((counter * 0x9E3779B9) & _WORD) ^ seed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def compute_changes(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """Compute the change of every swap.

    Args:
        a: [T, n, n].
        b: [T, n, n].
        p: int64, [R, n].

    Returns:
        [R, n, n], symmetric, 0 on the diagonal.
    """
    change = a.new_zeros(len(p), *a.shape[1:])
    for flow, distance in zip(a, b, strict=True):
        ordered = distance[p[:, :, None], p[:, None, :]]
        # moved[r, s]: cost of the flows of r at the place of s.
        moved = _product(flow, ordered)
        diagonal = moved.diagonal(dim1=1, dim2=2)
        change += 2 * (moved + moved.mT - diagonal[:, :, None] - diagonal[:, None, :])
        change += _corners(flow) * _corners(ordered)
    return change


def _product(flow: Tensor, ordered: Tensor) -> Tensor:
    """flow @ orderedᵀ for each restart; exact for integers, which torch cannot multiply on all devices."""
    if flow.is_floating_point():
        return flow @ ordered.mT
    product = torch.zeros_like(ordered)
    for k in range(len(flow)):
        product += flow[:, k, None] * ordered[:, None, :, k]
    return product


def _corners(matrix: Tensor) -> Tensor:
    """M[u, u] + M[v, v] - M[u, v] - M[v, u] for every u and v."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    return diagonal[..., :, None] + diagonal[..., None, :] - matrix - matrix.mT


def advance(
    a: Tensor,
    b: Tensor,
    p: Tensor,
    best_p: Tensor,
    cost_change: Tensor,
    until: Tensor,
    seed: Tensor,
    *,
    num_movers: int,
    first: int,
    moves: int,
    rule: TabuRule,
    big_m: int | float,
) -> None:
    """Make `moves` moves in every restart, in place.

    Args:
        a: Flows of the terms, [T, n, n], integers or float64.
        b: Distances of the terms, [T, n, n], of the same dtype.
        p: Places, int64, [R, n].
        best_p: Best permutation so far, int64, [R, n].
        cost_change: Change of the cost since the start, now and at the best, of a's dtype, [R, 2].
        until: Move until which a site is tabu, int64, [R, n, n].
        seed: Seed of the tenures, int64 below 2^32, [R].
        num_movers: Number of items with flow; they come first.
        first: Number of the first move.
        moves: Number of moves.
        rule: Tenures.
        big_m: More than twice any change.
    """
    n = p.shape[1]
    rows = torch.arange(len(p), device=p.device)
    upper = torch.ones(n, n, dtype=torch.bool, device=p.device).triu(1)
    upper[num_movers:] = False
    for move in range(first, first + moves):
        delta = compute_changes(a, b, p)
        back = until.gather(2, p[:, None, :].expand(-1, n, -1))
        swap_until = torch.minimum(back, back.mT)
        better = delta < (cost_change[:, 1] - cost_change[:, 0])[:, None, None]
        key = torch.where((swap_until < move) | better, delta, 3 * big_m)
        key = torch.where(swap_until < move - rule.patience, delta - big_m, key)
        key = torch.where(upper, key, 3 * big_m).flatten(1)
        index = key.argmin(1)
        has_move = key[rows, index] < 3 * big_m
        u, v = index // n, index % n
        at_u, at_v = p[rows, u], p[rows, v]
        for row, site, counter in ((u, at_u, 2 * move), (v, at_v, 2 * move + 1)):
            tenure = move + rule.low + ((hash_counter(counter, seed) * rule.span) >> 32)
            is_written = has_move & (row < num_movers)
            until[rows, row, site] = torch.where(is_written, tenure, until[rows, row, site])
        p[rows, u], p[rows, v] = torch.where(has_move, at_v, at_u), torch.where(has_move, at_u, at_v)
        cost_change[:, 0] += torch.where(has_move, delta.flatten(1)[rows, index], 0)
        improved = cost_change[:, 0] < cost_change[:, 1]
        best_p.copy_(torch.where(improved[:, None], p, best_p))
        cost_change[:, 1] = torch.minimum(cost_change[:, 0], cost_change[:, 1])


class ReferenceRestarts:
    """State of many restarts on their device.

    Args:
        a: Flows of the terms, [T, n, n], integers or float64.
        b: Distances of the terms, [T, n, n], of the same dtype.
        num_movers: Number of items with flow; they come first.
        big_m: More than twice any change.
        start: Initial places, int64, [R, n].
        until: Move until which a site is tabu initially, int64, [n, n].
        seed: Seed of the tenures, int64 below 2^32, [R].
        rule: Tenures.
    """

    def __init__(
        self, a: Tensor, b: Tensor, *, num_movers: int, big_m: int | float, start: Tensor, until: Tensor,
        seed: Tensor, rule: TabuRule,
    ) -> None:  # fmt: skip
        self._a, self._b, self._seed = a, b, seed
        self._num_movers, self._big_m, self._rule = num_movers, big_m, rule
        self._current, self._best = start.clone(), start.clone()
        self._cost_change = a.new_zeros(len(start), 2)
        self._until = until.repeat(len(start), 1, 1)
        self._num_moves = 0

    def advance(self, moves: int) -> None:
        """Make `moves` moves in every restart."""
        advance(
            self._a,
            self._b,
            self._current,
            self._best,
            self._cost_change,
            self._until,
            self._seed,
            num_movers=self._num_movers,
            first=self._num_moves + 1,
            moves=moves,
            rule=self._rule,
            big_m=self._big_m,
        )
        self._num_moves += moves

    def current(self) -> Tensor:
        """Current places in every restart, int64, [R, n]."""
        return self._current

    def best(self) -> Tensor:
        """Best permutation of every restart, int64, [R, n]."""
        return self._best
