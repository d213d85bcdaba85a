"""Depth-first branch and bound, a number of nodes at a time: `Search` holds where it is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from sparseflow.codesign.mapping.arrays import Tables


class Search(NamedTuple):
    """A search between two calls. F segments are to be placed; the others are where they are from the start.

    Of depth d = 0 to F, with d of the F segments placed:

    Attributes:
        busy: ms, float64 [F + 1, S].
        left: Memory, bytes, int64 [F + 1, S].
        own: What each segment not yet placed would keep each slot busy for, given those placed, float64
            [F + 1, K, S].
        cost: What it would add to the weighted sum that bounds the objective; likewise.
        slot: Of each segment, -1 where it is not placed, int64 [K].
        chosen: The segment placed next, int64 [F + 1].
        kids: Slots to try for it, best bound first, int64 [F + 1, S].
        bounds: Their bounds, float64 [F + 1, S].
        number: How many there are, and which is next, int64 [F + 1, 2].
        best: The least objective so far, float64 [1].
        best_slot: Its mapping, int64 [K]; -1 where there is none.
        depth: int64 [1]; -1 at the end.
        weights: busy_weights [S], then memory_weights per byte [S], then weights of period and sum; float64.
    """

    busy: np.ndarray
    left: np.ndarray
    own: np.ndarray
    cost: np.ndarray
    slot: np.ndarray
    chosen: np.ndarray
    kids: np.ndarray
    bounds: np.ndarray
    number: np.ndarray
    best: np.ndarray
    best_slot: np.ndarray
    depth: np.ndarray
    weights: np.ndarray


@njit(cache=True, nogil=True, error_model="numpy")
def place(tables: Tables, search: Search, d: int, into: int, k: int, s: int) -> None:
    """Fill depth `into` with what is at depth d, and segment k on slot s besides; `search.slot[k]` stays."""
    segments, slots = tables.latency.shape
    total = search.weights[2 * slots + 1]
    busy, left, own, cost = search.busy[into], search.left[into], search.own[into], search.cost[into]
    # Loops: whole rows at once would take Numba seconds more to compile.
    for t in range(slots):
        busy[t], left[t] = search.busy[d, t], search.left[d, t]
    for v in range(segments):
        if search.slot[v] < 0:
            for t in range(slots):
                own[v, t], cost[v, t] = search.own[d, v, t], search.cost[d, v, t]
    busy[s] += own[k, s]
    left[s] -= tables.memory[k, s]
    weight = search.weights[s] + total
    for e in range(tables.in_start[k], tables.in_start[k + 1]):
        u, size = tables.in_end[e], tables.in_bytes[e]
        if search.slot[u] < 0:
            for t in range(slots):
                if t != s:
                    time = tables.fixed[t, s] + size * tables.per_byte[t, s]
                    cost[u, t] += weight * time
                    if time == np.inf:
                        own[u, t] = np.inf
    for e in range(tables.out_start[k], tables.out_start[k + 1]):
        v, size = tables.out_end[e], tables.out_bytes[e]
        b = search.slot[v]
        if b < 0:
            for t in range(slots):
                if t != s:
                    time = tables.fixed[s, t] + size * tables.per_byte[s, t]
                    own[v, t] += time
                    cost[v, t] += (search.weights[t] + total) * time
        elif b != s:
            busy[b] += tables.fixed[s, b] + size * tables.per_byte[s, b]


@njit(cache=True, nogil=True, error_model="numpy")
def bound(tables: Tables, search: Search, d: int, k: int) -> float:
    """Below what no mapping that goes on from depth d can be; segment k counts as placed, too."""
    segments, slots = tables.latency.shape
    busy, left, own, cost = search.busy[d], search.left[d], search.own[d], search.cost[d]
    period, total = search.weights[2 * slots], search.weights[2 * slots + 1]
    weighted, top, busy_sum, room, needed = 0.0, 0.0, 0.0, 0, 0
    for s in range(slots):
        weighted += (search.weights[s] + total) * busy[s] - search.weights[slots + s] * left[s]
        top = max(top, busy[s])
        busy_sum += busy[s]
        room += left[s]
    summed = busy_sum
    for v in range(segments):
        if search.slot[v] >= 0 or v == k:
            continue
        least_cost, least_own, least_top = np.inf, np.inf, np.inf
        least_memory = np.int64(2**62)
        for s in range(slots):
            # Where it alone would make the mapping no better than the best, it need not be considered.
            alone = period * (busy[s] + own[v, s]) + total * (busy_sum + own[v, s])
            if tables.memory[v, s] <= left[s] and alone < search.best[0]:
                least_cost = min(least_cost, cost[v, s])
                least_own = min(least_own, own[v, s])
                least_top = min(least_top, busy[s] + own[v, s])
                least_memory = min(least_memory, tables.memory[v, s])
        weighted += least_cost
        summed += least_own
        top = max(top, least_top)
        needed += least_memory
        # Each segment adds to it: what is too much already need not be known more exactly.
        if weighted >= search.best[0] or period * top + total * summed >= search.best[0]:
            return np.inf
    if needed > room:
        return np.inf
    return max(weighted, period * top + total * summed)


@njit(cache=True, nogil=True, error_model="numpy")
def choose(tables: Tables, search: Search, d: int) -> int:
    """The segment to place at depth d: one with a single slot left, or whose second-best slot costs most."""
    segments, slots = tables.latency.shape
    busy, left, own, cost = search.busy[d], search.left[d], search.own[d], search.cost[d]
    period, total = search.weights[2 * slots], search.weights[2 * slots + 1]
    chosen, most = -1, -1.0
    for v in range(segments):
        if search.slot[v] >= 0:
            continue
        first, second = np.inf, np.inf
        for s in range(slots):
            alone = period * (busy[s] + own[v, s]) + total * own[v, s]
            if tables.memory[v, s] <= left[s] and alone < search.best[0]:
                if cost[v, s] < first:
                    first, second = cost[v, s], first
                elif cost[v, s] < second:
                    second = cost[v, s]
        if second > most:
            chosen, most = v, second
    return chosen


@njit(cache=True, nogil=True, error_model="numpy")
def expand(tables: Tables, search: Search, d: int) -> None:
    """Choose a segment for depth d, and list the slots worth trying."""
    slots = tables.latency.shape[1]
    k = choose(tables, search, d)
    search.chosen[d] = k
    number = 0
    for s in range(slots):
        if tables.memory[k, s] > search.left[d, s] or search.own[d, k, s] == np.inf:
            continue
        # Of slots that are alike and empty, only the first is tried, if it may be.
        twin = tables.twin[s]
        if twin >= 0 and search.own[d, k, twin] < np.inf:
            used_s, used_twin = False, False
            for v in range(len(search.slot)):
                used_s = used_s or search.slot[v] == s
                used_twin = used_twin or search.slot[v] == twin
            if not used_s and not used_twin:
                continue
        place(tables, search, d, d + 1, k, s)
        value = bound(tables, search, d + 1, k)
        if value < search.best[0]:
            at = number
            while at > 0 and search.bounds[d, at - 1] > value:
                search.bounds[d, at] = search.bounds[d, at - 1]
                search.kids[d, at] = search.kids[d, at - 1]
                at -= 1
            search.bounds[d, at], search.kids[d, at] = value, s
            number += 1
    search.number[d, 0], search.number[d, 1] = number, 0


@njit(cache=True, nogil=True, error_model="numpy")
def settle(tables: Tables, search: Search, mapping: np.ndarray, free: np.ndarray) -> None:
    """Place at depth 0 what is not free, bool [K], where a mapping has it."""
    for k in range(len(mapping)):
        if not free[k]:
            place(tables, search, 0, 0, k, mapping[k])
            search.slot[k] = mapping[k]


@njit(cache=True, nogil=True, error_model="numpy")
def go_on(tables: Tables, search: Search, nodes: int, precision: float) -> int:
    """Expand up to `nodes` nodes; how many it were. At the end of the search `search.depth[0]` is -1.

    Args:
        tables: The problem.
        search: Where it is; updated.
        nodes: At most.
        precision: What is not better than the best by this share of it is not looked for.
    """
    segments, slots = tables.latency.shape
    period, total = search.weights[2 * slots], search.weights[2 * slots + 1]
    free, d, done = len(search.chosen) - 1, search.depth[0], 0
    while d >= 0 and done < nodes:
        if search.number[d, 0] < 0:
            expand(tables, search, d)
            done += 1
        k, at = int(search.chosen[d]), search.number[d, 1]
        search.slot[k] = -1
        if at == search.number[d, 0] or search.bounds[d, at] >= search.best[0] * (1.0 - precision):
            search.number[d, 0] = -1
            d -= 1
            continue
        search.number[d, 1] += 1
        s = int(search.kids[d, at])
        place(tables, search, d, d + 1, k, s)
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
    return done
