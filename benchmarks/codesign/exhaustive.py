"""Exhaustive search over all mappings; the reference for the solver."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from sparseflow.codesign.mapping.arrays import ProblemArrays, build_arrays
from sparseflow.codesign.mapping.objective import MappingGoal
from sparseflow.codesign.mapping.problem import MappingProblem
from sparseflow.errors import InputError

MOST = 2**28
"""Largest number of mappings, about ten seconds."""


def exhaust(problem: MappingProblem, goals: Sequence[MappingGoal]) -> list[tuple[float, list[int] | None]]:
    """Find the lowest objective for each goal, ms, and its mapping; inf and None without a feasible mapping.

    Raises:
        InputError: There are more than `MOST` mappings.
    """
    if problem.num_slots**problem.num_segments > MOST:
        raise InputError(
            f"{problem.num_slots} slots and {problem.num_segments} segments have more than {MOST} mappings; "
            "use the strategy 'exact'"
        )
    best = np.empty(len(goals))
    slot = np.full((len(goals), problem.num_segments), -1, dtype=np.int64)
    period = np.array([goal.period_weight for goal in goals])
    serial = np.array([goal.serial_weight for goal in goals])
    search_all(build_arrays(problem), period, serial, best, slot)
    return [
        (float(value), row.tolist() if np.isfinite(value) else None)
        for value, row in zip(best, slot, strict=True)
    ]


@njit(cache=True, nogil=True, error_model="numpy")
def evaluate(
    tables: ProblemArrays, slot: np.ndarray, busy: np.ndarray, remaining: np.ndarray, peak: np.ndarray
) -> bool:
    """Fill `busy` [S] in ms, `remaining` and `peak` [S] in bytes; return whether the mapping is feasible."""
    busy[:] = 0.0
    remaining[:] = tables.limit
    peak[:] = 0
    feasible = True
    for k in range(len(slot)):
        s = slot[k]
        busy[s] += tables.latency[k, s]
        remaining[s] -= tables.memory[k, s]
        peak[s] = max(peak[s], tables.activation[k, s])
        for e in range(tables.in_start[k], tables.in_start[k + 1]):
            a = slot[tables.in_end[e]]
            if a != s:
                busy[s] += tables.fixed[a, s] + tables.in_bytes[e] * tables.per_byte[a, s]
    for s in range(len(busy)):
        feasible = feasible and remaining[s] >= peak[s] and np.isfinite(busy[s])
    return feasible


@njit(cache=True, nogil=True, error_model="numpy")
def search_all(
    tables: ProblemArrays,
    period_weights: np.ndarray,
    serial_weights: np.ndarray,
    best: np.ndarray,
    best_slot: np.ndarray,
) -> None:
    """Find the best mapping for each of G goals in one pass over all S^K mappings.

    Args:
        tables: The problem.
        period_weights: float64 [G].
        serial_weights: float64 [G].
        best: Filled with the least objective, ms, float64 [G]; inf where no mapping can run.
        best_slot: Filled with its mapping, int64 [G, K].
    """
    segments, slots = tables.latency.shape
    busy, remaining, peak = np.empty(slots), np.empty(slots, np.int64), np.empty(slots, np.int64)
    slot = np.zeros(segments, np.int64)
    best[:] = np.inf
    while True:
        if evaluate(tables, slot, busy, remaining, peak):
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
