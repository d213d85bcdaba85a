"""Robust tabu search on one core (Numba); `reference.py` defines the moves.

The kernel keeps, for every pair of items, the change of the cost by their swap and the move until which the
swap is tabu. The search for the best swap reads nothing else. Distances are kept in the order of the
permutation, so that inner loops are contiguous. The file imports no kernel of another file, because Numba's
cache only tracks changes of the file itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

_FAST = {"nnan", "nsz", "reassoc", "contract"}
"""Reassociation is safe: there are no NaNs, and integer sums in float64 are exact in any order."""


@njit(cache=True, nogil=True, error_model="numpy")
def _mix(counter: int, seed: int) -> int:
    """Hash a counter and a seed to 32 bits; see `reference.hash_counter`."""
    h = ((counter * 0x9E3779B9) & 0xFFFFFFFF) ^ seed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return h ^ (h >> 16)


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def compute_row_changes(a: Any, b: Any, r: int, out: Any) -> None:
    """Set `out[v]` to the change of the cost by the swap of r and v; `terms.py` has the formula."""
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
def initialize(a: Any, b: Any, p: Any, until: Any, delta: Any, swap_until: Any) -> None:
    """Compute `delta` and `swap_until` of `advance`."""
    for u in range(p.shape[0]):
        compute_row_changes(a, b, u, delta[u])
        for v in range(p.shape[0]):
            swap_until[u, v] = min(until[u, p[v]], until[v, p[u]])


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def advance(
    a: Any,
    b: Any,
    p: Any,
    best_p: Any,
    cost_change: Any,
    until: Any,
    delta: Any,
    swap_until: Any,
    num_movers: int,
    first: int,
    moves: int,
    low: int,
    span: int,
    patience: int,
    big_m: Any,
    seed: int,
) -> None:
    """Make `moves` moves, in place.

    Each move has four steps: select the best permitted swap (r, s), swap the places and set their tabu times,
    update the changes of all swaps by Taillard's formula, and recompute the changes and tabu times of the
    swaps with r or s.

    Args:
        a: Flows of the terms, [T, n, n].
        b: Distances in the order of p, b[t, i, j] = B[t, p[i], p[j]], [T, n, n].
        p: Place of each row, int64, [n].
        best_p: Best permutation so far, int64, [n].
        cost_change: Change of the cost since the start, now and at the best, [2].
        until: Move until which a site is tabu for an item that left it, int64, [n, n].
        delta: Change of each swap, [n, n]; see `initialize`.
        swap_until: Move until which each swap is tabu, int64, [n, n]; see `initialize`.
        num_movers: Number of items with flow; they come first.
        first: Number of the first move.
        moves: Number of moves.
        low: Minimum tenure.
        span: Number of different tenures, starting at `low`.
        patience: Moves after which a swap that was not made takes precedence.
        big_m: More than twice any change, in the dtype of the matrices.
        seed: Seed of the tenures, 32 bits.
    """
    n = p.shape[0]
    row = np.empty(n, a.dtype)
    x, y = np.empty(n, a.dtype), np.empty(n, a.dtype)
    current, best = cost_change[0], cost_change[1]
    forbidden = 3 * big_m
    for move in range(first, first + moves):
        # Select the swap (r, s) with the lowest key: the change of the cost, less `big_m` if the swap is
        # overdue, or `forbidden` if it is tabu and does not lead below the best cost.
        record_change = best - current
        lowest_key, r, s = forbidden, -1, -1
        for u in range(min(num_movers, n - 1)):
            # Slices and two plain loops, because Numba vectorizes only this form.
            changes, tabu_until, keys = delta[u, u + 1 :], swap_until[u, u + 1 :], row[u + 1 :]
            for v in range(len(changes)):
                permitted = (tabu_until[v] < move) | (changes[v] < record_change)
                key = changes[v] if permitted else forbidden
                keys[v] = changes[v] - big_m if tabu_until[v] < move - patience else key
            row_key = forbidden
            for v in range(len(changes)):
                row_key = keys[v] if keys[v] < row_key else row_key
            if row_key < lowest_key:
                lowest_key, r = row_key, u
                for v in range(len(changes)):
                    if keys[v] == row_key:
                        s = u + 1 + v
                        break
        if r < 0:
            continue
        # Swap the places of r and s, and set the tabu times of the sites that they leave.
        current += delta[r, s]
        until[r, p[r]] = move + low + ((_mix(2 * move, seed) * span) >> 32)
        if s < num_movers:
            until[s, p[s]] = move + low + ((_mix(2 * move + 1, seed) * span) >> 32)
        p[r], p[s] = p[s], p[r]
        if current < best:
            best = current
            best_p[:] = p
        # Reorder the distances, and update the changes of the swaps without r and s.
        for t in range(a.shape[0]):
            a_t, b_t = a[t], b[t]
            for k in range(n):
                b_t[r, k], b_t[s, k] = b_t[s, k], b_t[r, k]
            for k in range(n):
                b_t[k, r], b_t[k, s] = b_t[k, s], b_t[k, r]
            a_r, a_s, b_r, b_s = a_t[r], a_t[s], b_t[r], b_t[s]
            for k in range(n):
                x[k] = 2 * (a_r[k] - a_s[k])
                y[k] = b_s[k] - b_r[k]
            for u in range(n):
                changes, x_u, y_u = delta[u], x[u], y[u]
                for v in range(n):
                    changes[v] += (x_u - x[v]) * (y_u - y[v])
        # Recompute the changes and tabu times of the swaps with r or s.
        for moved in (r, s):
            compute_row_changes(a, b, moved, row)
            for v in range(n):
                delta[moved, v] = delta[v, moved] = row[v]
                swap_until[moved, v] = swap_until[v, moved] = min(until[moved, p[v]], until[v, p[moved]])
    cost_change[0], cost_change[1] = current, best
