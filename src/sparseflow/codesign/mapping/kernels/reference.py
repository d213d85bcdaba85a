"""All mappings, one by one: what the exact strategy is held against."""

from __future__ import annotations

import numpy as np
from numba import njit

from sparseflow.codesign.mapping.tables import Tables


@njit(cache=True, nogil=True, error_model="numpy")
def evaluate(tables: Tables, slot: np.ndarray, busy: np.ndarray, left: np.ndarray) -> bool:
    """Fill `busy` [S] in ms and `left` [S] in bytes; whether the mapping can run."""
    busy[:] = 0.0
    left[:] = tables.limit
    fine = True
    for k in range(len(slot)):
        s = slot[k]
        busy[s] += tables.latency[k, s]
        left[s] -= tables.memory[k, s]
        for e in range(tables.in_start[k], tables.in_start[k + 1]):
            a = slot[tables.in_end[e]]
            if a != s:
                busy[s] += tables.fixed[a, s] + tables.in_bytes[e] * tables.per_byte[a, s]
    for s in range(len(busy)):
        fine = fine and left[s] >= 0 and np.isfinite(busy[s])
    return fine


@njit(cache=True, nogil=True, error_model="numpy")
def exhaust(
    tables: Tables,
    period_weights: np.ndarray,
    serial_weights: np.ndarray,
    best: np.ndarray,
    best_slot: np.ndarray,
) -> None:
    """The best mapping for each of G goals, in one pass over all S^K.

    Args:
        tables: The problem.
        period_weights: float64 [G].
        serial_weights: float64 [G].
        best: Filled with the least objective, ms, float64 [G]; inf where no mapping can run.
        best_slot: Filled with its mapping, int64 [G, K].
    """
    segments, slots = tables.latency.shape
    busy, left = np.empty(slots), np.empty(slots, np.int64)
    slot = np.zeros(segments, np.int64)
    best[:] = np.inf
    while True:
        if evaluate(tables, slot, busy, left):
            for g in range(len(best)):
                value = period_weights[g] * busy.max() + serial_weights[g] * busy.sum()
                if value < best[g]:
                    best[g] = value
                    best_slot[g] = slot
        k = segments - 1
        while k >= 0 and slot[k] == slots - 1:
            slot[k] = 0
            k -= 1
        if k < 0:
            return
        slot[k] += 1
