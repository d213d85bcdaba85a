"""Robust tabu search on one core, in Numba; `reference.py` says what it does.

Beside the changes of all swaps the search keeps, for every pair, until when swapping it is tabu: a move
alters only the rows and columns of the two that moved, so that both are kept up to date and the search for
the best move reads nothing else. The distances stand in the order of the permutation, so that every inner
loop runs through memory in order. What is used here stands in this file: Numba's cache notices no other's
changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_FAST = {"nnan", "nsz", "reassoc", "contract"}
"""Sums in any order. Nothing is NaN; sums of integers in float64 are exact in every order."""


@njit(cache=True, nogil=True, error_model="numpy")
def _mix(counter: int, seed: int) -> int:
    h = ((counter * 0x9E3779B9) & 0xFFFFFFFF) ^ seed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def changes_of(a: Any, b: Any, r: int, out: Any) -> None:
    """out[v] = the change by swapping r and v, from scratch."""
    n = a.shape[1]
    out[:] = 0
    for t in range(a.shape[0]):
        a_r, b_r = a[t, r], b[t, r]
        for v in range(n):
            a_v, b_v = a[t, v], b[t, v]
            total = a_v[0] * 0
            for k in range(n):
                total += (a_r[k] - a_v[k]) * (b_v[k] - b_r[k])
            out[v] += 2 * total + (a_r[r] + a_v[v] - a_r[v] - a_v[r]) * (b_r[r] + b_v[v] - b_r[v] - b_v[r])


@njit(cache=True, nogil=True, error_model="numpy")
def fill(a: Any, b: Any, p: Any, until: Any, delta: Any, gate: Any) -> None:
    """Compute `delta` and `gate` of `advance` from scratch."""
    for u in range(p.shape[0]):
        changes_of(a, b, u, delta[u])
        for v in range(p.shape[0]):
            gate[u, v] = min(until[u, p[v]], until[v, p[u]])


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def advance(
    a: Any, b: Any, p: Any, best_p: Any, worth: Any, until: Any, delta: Any, gate: Any, movers: int,
    first: int, moves: int, low: int, span: int, patience: int, wall: Any, seed: int,
) -> None:  # fmt: skip
    """Make `moves` moves, in place.

    Args:
        a: Flows of the terms, [T, n, n].
        b: Distances of the terms in the order of p, b[t, i, j] = B[t, p[i], p[j]], [T, n, n].
        p: Where each is, int64, [n].
        best_p: The best permutation so far, int64, [n].
        worth: Change of the cost since the start, now and at the best, [2].
        until: Move up to which a site is tabu for one that left it, int64, [n, n].
        delta: Change by swapping each pair, [n, n]; see `fill`.
        gate: Move up to which swapping each pair is tabu, int64, [n, n]; see `fill`.
        movers: How many exchange something; they come first.
        first: Number of the first move.
        moves: How many to make.
        low: Least number of moves for which a site is tabu.
        span: So many tenures there are, from `low` on.
        patience: Moves after which a swap that was not made goes before all others.
        wall: More than twice any change, of the matrices' dtype.
        seed: Of the tenures, 32 bits.
    """
    n = p.shape[0]
    row = np.empty(n, a.dtype)
    x, y = np.empty(n, a.dtype), np.empty(n, a.dtype)
    here, best = worth[0], worth[1]
    far = 3 * wall
    for move in range(first, first + moves):
        better = best - here
        lowest, r, s = far, -1, -1
        for u in range(min(movers, n - 1)):
            # Slices, and two plain loops: only so are they compiled to vector instructions.
            d, g, keys = delta[u, u + 1 :], gate[u, u + 1 :], row[u + 1 :]
            for v in range(len(d)):
                key = d[v] if (g[v] < move) | (d[v] < better) else far
                keys[v] = d[v] - wall if g[v] < move - patience else key
            least = far
            for v in range(len(d)):
                least = keys[v] if keys[v] < least else least
            if least < lowest:
                lowest, r = least, u
                for v in range(len(d)):
                    if keys[v] == least:
                        s = u + 1 + v
                        break
        if r < 0:
            continue
        here += delta[r, s]
        until[r, p[r]] = move + low + ((_mix(2 * move, seed) * span) >> 32)
        if s < movers:
            until[s, p[s]] = move + low + ((_mix(2 * move + 1, seed) * span) >> 32)
        p[r], p[s] = p[s], p[r]
        if here < best:
            best = here
            best_p[:] = p
        for t in range(a.shape[0]):
            at, bt = a[t], b[t]
            for k in range(n):
                bt[r, k], bt[s, k] = bt[s, k], bt[r, k]
            for k in range(n):
                bt[k, r], bt[k, s] = bt[k, s], bt[k, r]
            a_r, a_s, b_r, b_s = at[r], at[s], bt[r], bt[s]
            for k in range(n):
                x[k] = 2 * (a_r[k] - a_s[k])
                y[k] = b_s[k] - b_r[k]
            for u in range(n):
                d, x_u, y_u = delta[u], x[u], y[u]
                for v in range(n):
                    d[v] += (x_u - x[v]) * (y_u - y[v])
        for moved in (r, s):
            changes_of(a, b, moved, row)
            for v in range(n):
                delta[moved, v] = delta[v, moved] = row[v]
                gate[moved, v] = gate[v, moved] = min(until[moved, p[v]], until[v, p[moved]])
    worth[0], worth[1] = here, best
