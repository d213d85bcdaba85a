"""Resumable depth-first branch and bound; `BranchState` holds the position of the search.

See `mapping.arrays` for the types of the entry points.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from sparseflow.codesign.mapping.arrays import ProblemArrays


class BranchState(NamedTuple):
    """State of a search between two calls. F segments are placed; the others are fixed.

    For depth d = 0 to F, at which d segments are placed:

    Attributes:
        busy: Busy time, ms, float64 [F + 1, S].
        free_bytes: Memory without that of placed segments, bytes, int64 [F + 1, S].
        peak_bytes: Largest activation of a placed segment, at most `free_bytes`, int64 [F + 1, S].
        busy_increase: Busy time that each unplaced segment would add to each slot, float64 [F + 1, K, S].
        cost: Weighted cost that it would add to the bound, float64 [F + 1, K, S].
        slot: Slot of each segment, -1 if unplaced, int64 [K].
        next_segment: Segment to place next, int64 [F + 1].
        children: Slots to try for it, in order of their bounds, int64 [F + 1, S].
        bounds: Bounds of these slots, float64 [F + 1, S].
        cursor: Number of these slots, and index of the next one, int64 [F + 1, 2].
        best: Lowest objective, float64 [1].
        best_slot: Its mapping, int64 [K]; -1 if there is none.
        depth: Current depth, int64 [1]; -1 at the end.
        weights: busy_weights [S], memory_weights per byte [S], weights of period and sum; float64.
    """

    busy: np.ndarray
    free_bytes: np.ndarray
    peak_bytes: np.ndarray
    busy_increase: np.ndarray
    cost: np.ndarray
    slot: np.ndarray
    next_segment: np.ndarray
    children: np.ndarray
    bounds: np.ndarray
    cursor: np.ndarray
    best: np.ndarray
    best_slot: np.ndarray
    depth: np.ndarray
    weights: np.ndarray


@njit(nogil=True, error_model="numpy")
def place_segment(tables: ProblemArrays, search: BranchState, d: int, into: int, k: int, s: int) -> None:
    """Compute depth `into` from depth d by placing segment k on slot s; `search.slot[k]` is unchanged."""
    segments, slots = tables.latency.shape
    total = search.weights[2 * slots + 1]
    busy, free_bytes, peak_bytes = search.busy[into], search.free_bytes[into], search.peak_bytes[into]
    busy_increase, cost = search.busy_increase[into], search.cost[into]
    # Explicit loops, because row operations would add seconds to the compile time.
    for t in range(slots):
        busy[t], free_bytes[t] = search.busy[d, t], search.free_bytes[d, t]
        peak_bytes[t] = search.peak_bytes[d, t]
    for v in range(segments):
        if search.slot[v] < 0:
            for t in range(slots):
                busy_increase[v, t], cost[v, t] = search.busy_increase[d, v, t], search.cost[d, v, t]
    busy[s] += busy_increase[k, s]
    free_bytes[s] -= tables.memory[k, s]
    peak_bytes[s] = max(peak_bytes[s], tables.activation[k, s])
    weight = search.weights[s] + total
    for e in range(tables.in_start[k], tables.in_start[k + 1]):
        u, size = tables.in_end[e], tables.in_bytes[e]
        if search.slot[u] < 0:
            for t in range(slots):
                if t != s:
                    time = tables.fixed[t, s] + size * tables.per_byte[t, s]
                    cost[u, t] += weight * time
                    if time == np.inf:
                        busy_increase[u, t] = np.inf
    for e in range(tables.out_start[k], tables.out_start[k + 1]):
        v, size = tables.out_end[e], tables.out_bytes[e]
        b = search.slot[v]
        if b < 0:
            for t in range(slots):
                if t != s:
                    time = tables.fixed[s, t] + size * tables.per_byte[s, t]
                    busy_increase[v, t] += time
                    cost[v, t] += (search.weights[t] + total) * time
        elif b != s:
            busy[b] += tables.fixed[s, b] + size * tables.per_byte[s, b]


@njit(nogil=True, error_model="numpy")
def fits_memory(tables: ProblemArrays, search: BranchState, d: int, k: int, s: int) -> bool:
    """Whether slot s has enough memory for segment k at depth d."""
    peak = max(search.peak_bytes[d, s], tables.activation[k, s])
    return tables.memory[k, s] + peak <= search.free_bytes[d, s]


@njit(nogil=True, error_model="numpy")
def compute_bound(tables: ProblemArrays, search: BranchState, d: int, k: int) -> float:
    """Lower bound of all completions of depth d; segment k counts as placed."""
    segments, slots = tables.latency.shape
    busy = search.busy[d]
    busy_increase, cost = search.busy_increase[d], search.cost[d]
    period, total = search.weights[2 * slots], search.weights[2 * slots + 1]
    weighted, top, busy_sum, capacity, required = 0.0, 0.0, 0.0, 0, 0
    for s in range(slots):
        # The peak of a slot never decreases, so this memory is not available to other segments.
        available = search.free_bytes[d, s] - search.peak_bytes[d, s]
        weighted += (search.weights[s] + total) * busy[s] - search.weights[slots + s] * available
        top = max(top, busy[s])
        busy_sum += busy[s]
        capacity += available
    summed = busy_sum
    for v in range(segments):
        if search.slot[v] >= 0 or v == k:
            continue
        least_cost, least_own, least_top = np.inf, np.inf, np.inf
        least_memory = np.int64(2**62)
        for s in range(slots):
            # Skip slots where this segment alone exceeds the best objective.
            single = period * (busy[s] + busy_increase[v, s]) + total * (busy_sum + busy_increase[v, s])
            if fits_memory(tables, search, d, v, s) and single < search.best[0]:
                least_cost = min(least_cost, cost[v, s])
                least_own = min(least_own, busy_increase[v, s])
                least_top = min(least_top, busy[s] + busy_increase[v, s])
                least_memory = min(least_memory, tables.memory[v, s])
        weighted += least_cost
        summed += least_own
        top = max(top, least_top)
        required += least_memory
        # The sums only grow, so stop once they exceed the best objective.
        if weighted >= search.best[0] or period * top + total * summed >= search.best[0]:
            return np.inf
    if required > capacity:
        return np.inf
    return max(weighted, period * top + total * summed)


@njit(nogil=True, error_model="numpy")
def select_segment(tables: ProblemArrays, search: BranchState, d: int) -> int:
    """Select the segment whose second-best slot costs most, or which has only one slot."""
    segments, slots = tables.latency.shape
    busy = search.busy[d]
    busy_increase, cost = search.busy_increase[d], search.cost[d]
    period, total = search.weights[2 * slots], search.weights[2 * slots + 1]
    best, max_cost = -1, -1.0
    for v in range(segments):
        if search.slot[v] >= 0:
            continue
        first, second = np.inf, np.inf
        for s in range(slots):
            single = period * (busy[s] + busy_increase[v, s]) + total * busy_increase[v, s]
            if fits_memory(tables, search, d, v, s) and single < search.best[0]:
                if cost[v, s] < first:
                    first, second = cost[v, s], first
                elif cost[v, s] < second:
                    second = cost[v, s]
        if second > max_cost:
            best, max_cost = v, second
    return best


@njit(nogil=True, error_model="numpy")
def expand_node(tables: ProblemArrays, search: BranchState, d: int) -> None:
    """Select a segment for depth d and list its promising slots."""
    slots = tables.latency.shape[1]
    k = select_segment(tables, search, d)
    search.next_segment[d] = k
    number = 0
    for s in range(slots):
        if not fits_memory(tables, search, d, k, s) or search.busy_increase[d, k, s] == np.inf:
            continue
        # Of interchangeable empty slots, only the first allowed one is tried.
        equal = tables.equal_slot[s]
        if equal >= 0 and search.busy_increase[d, k, equal] < np.inf:
            used_s, used_equal = False, False
            for v in range(len(search.slot)):
                used_s = used_s or search.slot[v] == s
                used_equal = used_equal or search.slot[v] == equal
            if not used_s and not used_equal:
                continue
        place_segment(tables, search, d, d + 1, k, s)
        value = compute_bound(tables, search, d + 1, k)
        if value < search.best[0]:
            position = number
            while position > 0 and search.bounds[d, position - 1] > value:
                search.bounds[d, position] = search.bounds[d, position - 1]
                search.children[d, position] = search.children[d, position - 1]
                position -= 1
            search.bounds[d, position], search.children[d, position] = value, s
            number += 1
    search.cursor[d, 0], search.cursor[d, 1] = number, 0


@njit(cache=True, nogil=True, error_model="numpy")
def fix_segments(tables: Any, search: Any, mapping: np.ndarray, is_free: np.ndarray) -> None:
    """Place all segments at depth 0 that are not free, bool [K], as in `mapping`."""
    tables, search = ProblemArrays(*tables), BranchState(*search)
    for k in range(len(mapping)):
        if not is_free[k]:
            place_segment(tables, search, 0, 0, k, mapping[k])
            search.slot[k] = mapping[k]


@njit(cache=True, nogil=True, error_model="numpy")
def advance(tables: Any, search: Any, nodes: int, precision: float) -> int:
    """Expand up to `nodes` nodes and return their number. At the end `search.depth[0]` is -1.

    Args:
        tables: Plain tuple of `ProblemArrays`.
        search: Plain tuple of `BranchState`; updated.
        nodes: Maximum number of nodes.
        precision: Relative improvement below which mappings are ignored.
    """
    tables, search = ProblemArrays(*tables), BranchState(*search)
    segments, slots = tables.latency.shape
    period, total = search.weights[2 * slots], search.weights[2 * slots + 1]
    free, d, num_expanded = len(search.next_segment) - 1, search.depth[0], 0
    while d >= 0 and num_expanded < nodes:
        if search.cursor[d, 0] < 0:
            expand_node(tables, search, d)
            num_expanded += 1
        k, position = int(search.next_segment[d]), search.cursor[d, 1]
        search.slot[k] = -1
        if position == search.cursor[d, 0] or search.bounds[d, position] >= search.best[0] * (
            1.0 - precision
        ):
            search.cursor[d, 0] = -1
            d -= 1
            continue
        search.cursor[d, 1] += 1
        s = int(search.children[d, position])
        place_segment(tables, search, d, d + 1, k, s)
        search.slot[k] = s
        if d + 1 < free:
            d += 1
            continue
        top, summed = 0.0, 0.0
        for busy in search.busy[d + 1]:
            top = max(top, busy)
            summed += busy
        if period * top + total * summed < search.best[0]:
            search.best[0] = period * top + total * summed
            for v in range(segments):
                search.best_slot[v] = search.slot[v]
    search.depth[0] = d
    return num_expanded
