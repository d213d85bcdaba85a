"""Robust tabu search (Taillard 1991) of many restarts at once, in plain torch; obviously right.

Notation: A, B are the terms of a problem [T, n, n] (see `layout/terms.py`); p is where each is, [R, n] for R
restarts; until[i, q] is the move up to which it is tabu for i to go to site q.

The first `movers` things exchange something with somebody; the others are the dummies of empty sites, and are
not swapped with each other. Move number m swaps the pair (u, v), u < v, u a mover, whose change is least
among those that

    1.  have waited for long: until[u, p[v]] or until[v, p[u]] is below m - patience; where there are any,
        they go before all others;
    2.  are not tabu: until[u, p[v]] or until[v, p[u]] is below m; or lead below the best cost so far.

Of swaps with the same change the first is made, by u and then v; where all are tabu, none is. Then it is tabu
for u to return to its site up to move m + low + (h(2m) · span >> 32), and for v up to m + low + (h(2m + 1) ·
span >> 32), where h is a hash of 32 bits (`mix`); dummies stay what they were, tabu always (`rule.py`). So
the moves are the same wherever they are computed, as long as the numbers are integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.codesign.layout.qap.kernels.tabu.rule import Rule

_WORD = 0xFFFFFFFF


def mix(counter: int, seed: Tensor) -> Tensor:
    """32 bits for each seed: the counter, spread and joined with it, through MurmurHash3's finaliser.

    Args:
        counter: What number is drawn.
        seed: int64 below 2^32, any shape.
    """
    h = ((counter * 0x9E3779B9) & _WORD) ^ seed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def changes(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """The change by every swap, from scratch.

    Args:
        a: [T, n, n].
        b: [T, n, n].
        p: int64, [R, n].

    Returns:
        [R, n, n], symmetric, 0 on the diagonal.
    """
    found = a.new_zeros(len(p), *a.shape[1:])
    for one, other in zip(a, b, strict=True):
        there = other[p[:, :, None], p[:, None, :]]
        # What r would exchange from where s is; k and all.
        moved = _product(one, there)
        own = moved.diagonal(dim1=1, dim2=2)
        found += 2 * (moved + moved.mT - own[:, :, None] - own[:, None, :])
        found += _corners(one) * _corners(there)
    return found


def _product(one: Tensor, there: Tensor) -> Tensor:
    """one @ thereᵀ for each restart, exactly for integers, which torch does not multiply on every device."""
    if one.is_floating_point():
        return one @ there.mT
    found = torch.zeros_like(there)
    for k in range(len(one)):
        found += one[:, k, None] * there[:, None, :, k]
    return found


def _corners(matrix: Tensor) -> Tensor:
    """M[u, u] + M[v, v] - M[u, v] - M[v, u] for every u and v."""
    own = matrix.diagonal(dim1=-2, dim2=-1)
    return own[..., :, None] + own[..., None, :] - matrix - matrix.mT


def advance(
    a: Tensor,
    b: Tensor,
    p: Tensor,
    best_p: Tensor,
    worth: Tensor,
    until: Tensor,
    seed: Tensor,
    *,
    movers: int,
    first: int,
    moves: int,
    rule: Rule,
    wall: int | float,
) -> None:
    """Make `moves` moves in every restart, in place.

    Args:
        a: Flows of the terms, [T, n, n], integers or float64.
        b: Distances of the terms, [T, n, n], of the same dtype.
        p: Where each is, int64, [R, n].
        best_p: The best permutation so far, int64, [R, n].
        worth: Change of the cost since the start, now and at the best, of a's dtype, [R, 2].
        until: Move up to which a site is tabu, int64, [R, n, n].
        seed: Of the tenures, int64 below 2^32, [R].
        movers: How many exchange something; they come first.
        first: Number of the first move.
        moves: How many to make.
        rule: How long what is tabu.
        wall: More than twice any change.
    """
    n = p.shape[1]
    rows = torch.arange(len(p), device=p.device)
    upper = torch.ones(n, n, dtype=torch.bool, device=p.device).triu(1)
    upper[movers:] = False
    for move in range(first, first + moves):
        delta = changes(a, b, p)
        back = until.gather(2, p[:, None, :].expand(-1, n, -1))
        gate = torch.minimum(back, back.mT)
        better = delta < (worth[:, 1] - worth[:, 0])[:, None, None]
        key = torch.where((gate < move) | better, delta, 3 * wall)
        key = torch.where(gate < move - rule.patience, delta - wall, key)
        key = torch.where(upper, key, 3 * wall).flatten(1)
        place = key.argmin(1)
        found = key[rows, place] < 3 * wall
        u, v = place // n, place % n
        at_u, at_v = p[rows, u], p[rows, v]
        for which, site, counter in ((u, at_u, 2 * move), (v, at_v, 2 * move + 1)):
            tenure = move + rule.low + ((mix(counter, seed) * rule.span) >> 32)
            writes = found & (which < movers)
            until[rows, which, site] = torch.where(writes, tenure, until[rows, which, site])
        p[rows, u], p[rows, v] = torch.where(found, at_v, at_u), torch.where(found, at_u, at_v)
        worth[:, 0] += torch.where(found, delta.flatten(1)[rows, place], 0)
        improved = worth[:, 0] < worth[:, 1]
        best_p.copy_(torch.where(improved[:, None], p, best_p))
        worth[:, 1] = torch.minimum(worth[:, 0], worth[:, 1])


class Restarts:
    """The state of many restarts, on their device.

    Args:
        a: Flows of the terms, [T, n, n], integers or float64.
        b: Distances of the terms, [T, n, n], of the same dtype.
        movers: How many exchange something; they come first.
        wall: More than twice any change.
        start: Where each is at first, int64, [R, n].
        until: Move up to which a site is tabu at first, int64, [n, n].
        seed: Of the tenures, int64 below 2^32, [R].
        rule: How long what is tabu.
    """

    def __init__(
        self, a: Tensor, b: Tensor, *, movers: int, wall: int | float, start: Tensor, until: Tensor,
        seed: Tensor, rule: Rule,
    ) -> None:  # fmt: skip
        self._a, self._b, self._movers, self._wall, self._seed, self._rule = a, b, movers, wall, seed, rule
        self._here, self._best = start.clone(), start.clone()
        self._worth = a.new_zeros(len(start), 2)
        self._until = until.repeat(len(start), 1, 1)
        self._done = 0

    def advance(self, moves: int) -> None:
        """Make `moves` moves in every restart."""
        advance(
            self._a, self._b, self._here, self._best, self._worth, self._until, self._seed,
            movers=self._movers, first=self._done + 1, moves=moves, rule=self._rule, wall=self._wall,
        )  # fmt: skip
        self._done += moves

    def here(self) -> Tensor:
        """Where each is in every restart, int64, [R, n]."""
        return self._here

    def best(self) -> Tensor:
        """The best permutation of every restart, int64, [R, n]."""
        return self._best
