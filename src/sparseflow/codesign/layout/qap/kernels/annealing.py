"""Simulated annealing on one core (Numba); see `layout.qap.search`.

Distances are kept in the order of the permutation, so that evaluating a swap reads four contiguous rows. The
file is self-contained, because Numba's cache only tracks changes of the file itself.
"""

from __future__ import annotations

import math
from typing import Any

from numba import njit

_FAST = {"nnan", "nsz", "reassoc", "contract"}
"""Reassociation is safe: there are no NaNs, and integer sums in float64 are exact in any order."""

CURRENT, BEST = 0, 1
TEMPERATURE, BEST_TEMPERATURE, COOLING = 0, 1, 2
NUM_TRIALS, NUM_REJECTED, FIRST, SECOND = 0, 1, 2, 3


@njit(cache=True, nogil=True, error_model="numpy", fastmath=_FAST)
def swap_change(a: Any, b: Any, r: int, s: int) -> Any:
    """Change of the cost when r and s are swapped; `a` and `b` as in `anneal`."""
    change = a[0, 0, 0] * 0
    for t in range(a.shape[0]):
        a_r, a_s, b_r, b_s = a[t, r], a[t, s], b[t, r], b[t, s]
        total = change * 0
        for k in range(len(a_r)):
            total += (a_r[k] - a_s[k]) * (b_s[k] - b_r[k])
        change += 2 * total + (a_r[r] + a_s[s] - a_r[s] - a_s[r]) * (b_r[r] + b_s[s] - b_r[s] - b_s[r])
    return change


@njit(cache=True, nogil=True, error_model="numpy")
def _uniform(counter: int, seed: int) -> float:
    h = ((counter * 0x9E3779B9) & 0xFFFFFFFF) ^ seed
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return (h ^ (h >> 16)) / 4294967296.0


@njit(cache=True, nogil=True, error_model="numpy")
def anneal(
    a: Any,
    b: Any,
    p: Any,
    best_p: Any,
    cost_change: Any,
    schedule: Any,
    counts: Any,
    num_movers: int,
    trials: int,
    seed: int,
) -> None:
    """Try `trials` swaps, in place.

    Args:
        a: Flows of the terms, [T, n, n].
        b: Distances in the order of p, b[t, i, j] = B[t, p[i], p[j]], [T, n, n].
        p: Place of each row, int64, [n].
        best_p: Best permutation so far, int64, [n].
        cost_change: Change of the cost since the start at [CURRENT] and at [BEST], [2].
        schedule: Temperature [TEMPERATURE], that at the best [BEST_TEMPERATURE], and beta [COOLING], float64,
            [3].
        counts: Trials so far [NUM_TRIALS], consecutive rejections [NUM_REJECTED], and the next pair [FIRST],
            [SECOND], int64, [4].
        num_movers: Number of items with flow; they come first.
        trials: Number of swaps to try.
        seed: Seed of the acceptance, 32 bits.
    """
    n = p.shape[0]
    current, best = cost_change[CURRENT], cost_change[BEST]
    temperature, cooling = schedule[TEMPERATURE], schedule[COOLING]
    rejected, r, s = counts[NUM_REJECTED], counts[FIRST], counts[SECOND]
    for trial in range(counts[NUM_TRIALS], counts[NUM_TRIALS] + trials):
        change = swap_change(a, b, r, s)
        if change <= 0 or _uniform(trial, seed) < math.exp(-change / temperature):
            rejected = 0
            current += change
            p[r], p[s] = p[s], p[r]
            for t in range(a.shape[0]):
                bt = b[t]
                for k in range(n):
                    bt[r, k], bt[s, k] = bt[s, k], bt[r, k]
                for k in range(n):
                    bt[k, r], bt[k, s] = bt[k, s], bt[k, r]
            if current < best:
                best = current
                best_p[:] = p
                schedule[BEST_TEMPERATURE] = temperature
        else:
            rejected += 1
            if 2 * rejected >= num_movers * (2 * n - num_movers - 1) and cooling > 0.0:
                # Frozen: continue at the temperature of the best permutation.
                temperature, cooling = schedule[BEST_TEMPERATURE], 0.0
        temperature = temperature / (1.0 + cooling * temperature)
        s += 1
        if s == n:
            r += 1
            if r == min(num_movers, n - 1):
                r = 0
            s = r + 1
    cost_change[CURRENT], cost_change[BEST] = current, best
    schedule[TEMPERATURE], schedule[COOLING] = temperature, cooling
    counts[NUM_TRIALS] += trials
    counts[NUM_REJECTED], counts[FIRST], counts[SECOND] = rejected, r, s
