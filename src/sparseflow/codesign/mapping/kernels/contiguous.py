"""Dynamic program over (used slots, last slot, placed segments) for contiguous mappings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from sparseflow.codesign.mapping.arrays import ProblemArrays


@njit(cache=True, nogil=True, error_model="numpy")
def fill_table(
    tables: Any,
    cap: float,
    by_period: bool,
    value: np.ndarray,
    other: np.ndarray,
    before: np.ndarray,
) -> int:
    """Fill the table; returns the final state of the best mapping, or -1 if there is none.

    State (m * S + s) * (K + 1) + j: the set m of slots runs segments 0 to j - 1, the last run on slot s.

    Args:
        tables: Plain tuple of `ProblemArrays`.
        cap: Maximum busy time of a slot, ms.
        by_period: Minimize the largest busy time; otherwise the sum.
        value: Minimum of each state, float64 [2^S * S * (K + 1)]; output.
        other: The sum belonging to it, or the largest; output of the same shape.
        before: Previous state, int32 of the same shape; output where `value` is finite.
    """
    tables = ProblemArrays(*tables)
    segments, slots = tables.latency.shape
    width = segments + 1
    for state in range(len(value)):
        value[state] = np.inf
    # Number and bytes of edges from before segment j to segments j to end - 1.
    count, size = np.zeros((width, width)), np.zeros((width, width))
    for v in range(segments):
        for e in range(tables.in_start[v], tables.in_start[v + 1]):
            u = tables.in_end[e]
            for j in range(u + 1, v + 1):
                for end in range(v + 1, width):
                    count[j, end] += 1.0
                    size[j, end] += tables.in_bytes[e]
    best, best_state = np.inf, -1
    for mask in range(1 << slots):
        for s in range(slots):
            if mask == 0:
                if s > 0:
                    break
            elif not (mask >> s) & 1:
                continue
            for j in range(segments):
                if mask == 0:
                    if j > 0:
                        break
                    prefix_value, prefix_other, state = 0.0, 0.0, -1
                else:
                    state = (mask * slots + s) * width + j
                    prefix_value, prefix_other = value[state], other[state]
                    if not prefix_value < best:
                        continue
                for t in range(slots):
                    # Of interchangeable slots, the first is used first.
                    if (mask >> t) & 1 or (
                        tables.equal_slot[t] >= 0 and not (mask >> tables.equal_slot[t]) & 1
                    ):
                        continue
                    fixed, per_byte = 0.0, 0.0
                    if mask:
                        fixed, per_byte = tables.fixed[s, t], tables.per_byte[s, t]
                    run, run_memory, run_peak = 0.0, 0, 0
                    row = ((mask | (1 << t)) * slots + t) * width
                    for end in range(j + 1, width):
                        run += tables.latency[end - 1, t]
                        run_memory += tables.memory[end - 1, t]
                        run_peak = max(run_peak, tables.activation[end - 1, t])
                        busy = run
                        if count[j, end] > 0.0:
                            busy += count[j, end] * fixed + size[j, end] * per_byte
                        if run_memory + run_peak > tables.limit[t] or not busy <= cap or busy == np.inf:
                            break
                        candidate = max(prefix_value, busy) if by_period else prefix_value + busy
                        if not candidate < best:
                            break
                        if candidate < value[row + end]:
                            value[row + end] = candidate
                            other[row + end] = prefix_other + busy if by_period else max(prefix_other, busy)
                            before[row + end] = state
                            if end == segments:
                                best, best_state = candidate, row + end
    return best_state
