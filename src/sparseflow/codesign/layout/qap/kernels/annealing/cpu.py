"""Simulated annealing on one core, in Numba; `sparseflow.codesign.layout.qap.search` says what it does.

The distances stand in the order of the permutation, so that a swap is judged by running through four rows of
memory in order. What is used here stands in this file: Numba's cache notices no other's changes.
"""

from __future__ import annotations

import math
from typing import Any

from numba import njit

_FAST = {"nnan", "nsz", "reassoc", "contract"}
"""Sums in any order. Nothing is NaN; sums of integers in float64 are exact in every order."""

HERE, BEST = 0, 1
WARMTH, BEST_WARMTH, COOLING = 0, 1, 2
TRIED, REJECTED, FIRST, SECOND = 0, 1, 2, 3


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def change_of(a: Any, b: Any, r: int, s: int) -> Any:
    """The change by swapping r and s; `a` and `b` as in `walk`."""
    found = a[0, 0, 0] * 0
    for t in range(a.shape[0]):
        a_r, a_s, b_r, b_s = a[t, r], a[t, s], b[t, r], b[t, s]
        total = found * 0
        for k in range(len(a_r)):
            total += (a_r[k] - a_s[k]) * (b_s[k] - b_r[k])
        found += 2 * total + (a_r[r] + a_s[s] - a_r[s] - a_s[r]) * (b_r[r] + b_s[s] - b_r[s] - b_s[r])
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def _uniform(counter: int, seed: int) -> float:
    h = ((counter * 0x9E3779B9) & 0xFFFFFFFF) ^ seed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return (h ^ (h >> 16)) / 4294967296.0


@njit(cache=True, nogil=True, error_model="numpy")
def walk(
    a: Any,
    b: Any,
    p: Any,
    best_p: Any,
    worth: Any,
    heat: Any,
    counts: Any,
    movers: int,
    trials: int,
    seed: int,
) -> None:
    """Try `trials` swaps, in place.

    Args:
        a: Flows of the terms, [T, n, n].
        b: Distances of the terms in the order of p, b[t, i, j] = B[t, p[i], p[j]], [T, n, n].
        p: Where each is, int64, [n].
        best_p: The best permutation so far, int64, [n].
        worth: Change of the cost since the start at [HERE] and at [BEST], [2].
        heat: Temperature [WARMTH], that at the best [BEST_WARMTH], and beta [COOLING], float64, [3].
        counts: Trials so far [TRIED], those in a row that were rejected [REJECTED], and the pair that is next
            [FIRST], [SECOND], int64, [4].
        movers: How many exchange something; they come first.
        trials: How many swaps to try.
        seed: Of acceptance, 32 bits.
    """
    n = p.shape[0]
    here, best = worth[HERE], worth[BEST]
    warmth, cooling = heat[WARMTH], heat[COOLING]
    rejected, r, s = counts[REJECTED], counts[FIRST], counts[SECOND]
    for trial in range(counts[TRIED], counts[TRIED] + trials):
        change = change_of(a, b, r, s)
        if change <= 0 or _uniform(trial, seed) < math.exp(-change / warmth):
            rejected = 0
            here += change
            p[r], p[s] = p[s], p[r]
            for t in range(a.shape[0]):
                bt = b[t]
                for k in range(n):
                    bt[r, k], bt[s, k] = bt[s, k], bt[r, k]
                for k in range(n):
                    bt[k, r], bt[k, s] = bt[k, s], bt[k, r]
            if here < best:
                best = here
                best_p[:] = p
                heat[BEST_WARMTH] = warmth
        else:
            rejected += 1
            if 2 * rejected >= movers * (2 * n - movers - 1) and cooling > 0.0:
                # Frozen: what is left of the time is spent where the best was found.
                warmth, cooling = heat[BEST_WARMTH], 0.0
        warmth = warmth / (1.0 + cooling * warmth)
        s += 1
        if s == n:
            r += 1
            if r == min(movers, n - 1):
                r = 0
            s = r + 1
    worth[HERE], worth[BEST] = here, best
    heat[WARMTH], heat[COOLING] = warmth, cooling
    counts[TRIED] += trials
    counts[REJECTED], counts[FIRST], counts[SECOND] = rejected, r, s
