"""Shortest way through (slots used, last slot, segments placed): the loop behind contiguous mappings."""

from __future__ import annotations

import numpy as np
from numba import njit

from sparseflow.codesign.mapping.arrays import Tables


@njit(cache=True, nogil=True, error_model="numpy")
def chain(
    tables: Tables, cap: float, by_period: bool, value: np.ndarray, other: np.ndarray, before: np.ndarray
) -> int:
    """Fill the table; the state that a best mapping ends in, or -1 where there is none.

    A state is (m * S + s) * (K + 1) + j: the set m of slots holds segments 0 to j - 1, the last run on s.

    Args:
        tables: The problem.
        cap: No slot may be busy for longer, ms.
        by_period: Whether to make the largest busy time small; their sum otherwise.
        value: Least value of each state, float64 [2^S * S * (K + 1)]; filled.
        other: The sum that goes with it, or the largest; likewise.
        before: The state before, int32 likewise; filled where `value` is finite.
    """
    segments, slots = tables.latency.shape
    width = segments + 1
    for state in range(len(value)):
        value[state] = np.inf
    # What crosses the line in front of segment j on its way to segments j to end - 1.
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
                    so_far, beside, state = 0.0, 0.0, -1
                else:
                    state = (mask * slots + s) * width + j
                    so_far, beside = value[state], other[state]
                    if not so_far < best:
                        continue
                for t in range(slots):
                    # Of slots that are alike, the first is used first.
                    if (mask >> t) & 1 or (tables.twin[t] >= 0 and not (mask >> tables.twin[t]) & 1):
                        continue
                    fixed, per_byte = 0.0, 0.0
                    if mask:
                        fixed, per_byte = tables.fixed[s, t], tables.per_byte[s, t]
                    run, held = 0.0, 0
                    row = ((mask | (1 << t)) * slots + t) * width
                    for end in range(j + 1, width):
                        run += tables.latency[end - 1, t]
                        held += tables.memory[end - 1, t]
                        busy = run
                        if count[j, end] > 0.0:
                            busy += count[j, end] * fixed + size[j, end] * per_byte
                        if held > tables.limit[t] or not busy <= cap or busy == np.inf:
                            break
                        found = max(so_far, busy) if by_period else so_far + busy
                        if not found < best:
                            break
                        if found < value[row + end]:
                            value[row + end] = found
                            other[row + end] = beside + busy if by_period else max(beside, busy)
                            before[row + end] = state
                            if end == segments:
                                best, best_state = found, row + end
    return best_state
