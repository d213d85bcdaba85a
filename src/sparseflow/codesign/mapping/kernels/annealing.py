"""Simulated annealing over feasible mappings, resumable, and greedy construction.

See `mapping.arrays` for the types of the entry points.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from sparseflow.codesign.mapping.arrays import ProblemArrays

MAX_MOVED = 4
"""Maximum number of segments moved per step, except when two slots are swapped."""

BALANCE_WEIGHT = 0.3
"""Weight of the power mean (p = 4) of busy times relative to the maximum."""


class AnnealingState(NamedTuple):
    """A mapping and derived quantities.

    Attributes:
        slot: Slot of each segment, int64 [K].
        busy: Busy time, ms, float64 [S], without transfers between unconnected slots.
        free_bytes: Memory without that of the segments, bytes, int64 [S]; their activations must fit into it.
        num_broken: Number of edges between unconnected slots, int64 [1].
        random: Generator state, uint64 [1].
        best: Lowest objective, float64 [1].
        best_slot: Its mapping, int64 [K].
        moved_segments: Segments moved by the last step, int64 [K].
        previous_slot: Their previous slots, int64 [K].
        previous_busy: `busy` before the last step.
        previous_free_bytes: `free_bytes` before the last step.
    """

    slot: np.ndarray
    busy: np.ndarray
    free_bytes: np.ndarray
    num_broken: np.ndarray
    random: np.ndarray
    best: np.ndarray
    best_slot: np.ndarray
    moved_segments: np.ndarray
    previous_slot: np.ndarray
    previous_busy: np.ndarray
    previous_free_bytes: np.ndarray


@njit(nogil=True, error_model="numpy")
def random_uniform(random: np.ndarray) -> float:
    """Uniform number in [0, 1) (splitmix64)."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@njit(nogil=True, error_model="numpy")
def random_below(random: np.ndarray, number: int) -> int:
    """Uniform integer from 0 to `number` - 1."""
    return int(random_uniform(random) * number)


@njit(nogil=True, error_model="numpy")
def _recompute(tables: ProblemArrays, state: AnnealingState) -> None:
    """Recompute everything derived from `slot`."""
    # Explicit loops, because row operations would add seconds to the compile time.
    for s in range(len(state.busy)):
        state.busy[s], state.free_bytes[s] = 0.0, tables.limit[s]
    state.num_broken[0] = 0
    for k in range(len(state.slot)):
        s = state.slot[k]
        state.busy[s] += tables.latency[k, s]
        state.free_bytes[s] -= tables.memory[k, s]
        for e in range(tables.in_start[k], tables.in_start[k + 1]):
            a = state.slot[tables.in_end[e]]
            if a != s:
                if tables.fixed[a, s] == np.inf:
                    state.num_broken[0] += 1
                else:
                    state.busy[s] += tables.fixed[a, s] + tables.in_bytes[e] * tables.per_byte[a, s]


@njit(cache=True, nogil=True, error_model="numpy")
def recompute(tables: Any, state: Any) -> None:
    """Recompute everything derived from `slot`."""
    _recompute(ProblemArrays(*tables), AnnealingState(*state))


@njit(nogil=True, error_model="numpy")
def move_segment(tables: ProblemArrays, state: AnnealingState, k: int, t: int) -> None:
    """Move segment k to slot t without checking memory."""
    # Inlined by hand: a function per edge would slow annealing down by a third.
    s = state.slot[k]
    busy, fixed, per_byte = state.busy, tables.fixed, tables.per_byte
    state.free_bytes[s] += tables.memory[k, s]
    state.free_bytes[t] -= tables.memory[k, t]
    busy[s] -= tables.latency[k, s]
    busy[t] += tables.latency[k, t]
    for e in range(tables.in_start[k], tables.in_start[k + 1]):
        a, size = state.slot[tables.in_end[e]], tables.in_bytes[e]
        if a != s:
            if fixed[a, s] == np.inf:
                state.num_broken[0] -= 1
            else:
                busy[s] -= fixed[a, s] + size * per_byte[a, s]
        if a != t:
            if fixed[a, t] == np.inf:
                state.num_broken[0] += 1
            else:
                busy[t] += fixed[a, t] + size * per_byte[a, t]
    for e in range(tables.out_start[k], tables.out_start[k + 1]):
        b, size = state.slot[tables.out_end[e]], tables.out_bytes[e]
        if b != s:
            if fixed[s, b] == np.inf:
                state.num_broken[0] -= 1
            else:
                busy[b] -= fixed[s, b] + size * per_byte[s, b]
        if b != t:
            if fixed[t, b] == np.inf:
                state.num_broken[0] += 1
            else:
                busy[b] += fixed[t, b] + size * per_byte[t, b]
    state.slot[k] = t


@njit(nogil=True, error_model="numpy")
def excess_bytes(tables: ProblemArrays, state: AnnealingState, s: int) -> int:
    """Bytes by which the segments on slot s exceed its memory, or 0."""
    free = state.free_bytes[s]
    if free >= tables.max_activation[s]:
        return 0
    peak = 0
    for k in range(len(state.slot)):
        if state.slot[k] == s:
            peak = max(peak, tables.activation[k, s])
    return max(0, peak - free)


@njit(nogil=True, error_model="numpy")
def propose_moves(tables: ProblemArrays, state: AnnealingState, targets: np.ndarray) -> int:
    """Propose a step: fill `moved_segments` and `targets`, and return the number of moved segments,
    possibly 0.
    """
    segments, slots = tables.latency.shape
    slot, moved, random = state.slot, state.moved_segments, state.random
    draw = random_uniform(random)
    k = random_below(random, segments)
    s = slot[k]
    if draw < 0.3:
        t = random_below(random, slots)
        if t == s:
            return 0
        moved[0], targets[0], n = k, t, 1
        lacking = tables.memory[k, t] + tables.activation[k, t] - state.free_bytes[t]
        v = random_below(random, segments)
        for _ in range(segments):
            # Evict segments to the source slot or to a random one.
            if lacking <= 0 or n == MAX_MOVED:
                break
            if slot[v] == t:
                moved[n], targets[n] = v, s if random_uniform(random) < 0.5 else random_below(random, slots)
                lacking -= tables.memory[v, t]
                n += 1 if targets[n] != t else 0
            v = v + 1 if v + 1 < segments else 0
        return n
    if draw < 0.55:
        other = random_below(random, segments)
        if slot[other] == s:
            return 0
        moved[0], targets[0], moved[1], targets[1] = k, slot[other], other, s
        return 2
    if draw < 0.8:
        # Move a run of segments to the slot of a connected segment.
        first, last = tables.in_start[k], tables.in_start[k + 1]
        start, end = tables.out_start[k], tables.out_start[k + 1]
        num_ties = last - first + end - start
        if num_ties == 0:
            return 0
        index = random_below(random, num_ties)
        inward = index < last - first
        other = tables.in_end[first + index] if inward else tables.out_end[start + index - (last - first)]
        t, step = slot[other], 1 if inward else -1
        if t == s:
            return 0
        longest, n = 1 + int(random_uniform(random) * MAX_MOVED), 0
        while n < longest and 0 <= k < segments and slot[k] == s:
            moved[n], targets[n] = k, t
            k, n = k + step, n + 1
        return n
    if draw < 0.98:
        t, longest, n = random_below(random, slots), 2 + int(random_uniform(random) * MAX_MOVED), 0
        if t == s:
            return 0
        while n < longest and k < segments and slot[k] == s:
            moved[n], targets[n] = k, t
            k, n = k + 1, n + 1
        return n
    t, n = random_below(random, slots), 0
    if t == s:
        return 0
    for v in range(segments):
        if slot[v] == s or slot[v] == t:
            moved[n], targets[n] = v, s + t - slot[v]
            n += 1
    return n


@njit(nogil=True, error_model="numpy")
def apply_moves(tables: ProblemArrays, state: AnnealingState, targets: np.ndarray, number: int) -> bool:
    """Apply the proposed moves; returns whether they are allowed, otherwise reverts them."""
    refused = 0
    for i in range(number):
        refused += tables.latency[state.moved_segments[i], targets[i]] == np.inf
    if refused > 0:
        return False
    if number == 1:
        k, t = state.moved_segments[0], targets[0]
        if state.free_bytes[t] < tables.memory[k, t] + tables.activation[k, t]:
            return False
    for s in range(len(state.busy)):
        state.previous_busy[s], state.previous_free_bytes[s] = state.busy[s], state.free_bytes[s]
    for i in range(number):
        state.previous_slot[i] = state.slot[state.moved_segments[i]]
        move_segment(tables, state, state.moved_segments[i], targets[i])
    for i in range(number):
        refused += excess_bytes(tables, state, targets[i]) > 0
    if refused > 0:
        undo_moves(state, number)
    return refused == 0


@njit(nogil=True, error_model="numpy")
def undo_moves(state: AnnealingState, number: int) -> None:
    """Revert the last step, except for `num_broken`."""
    for s in range(len(state.busy)):
        state.busy[s], state.free_bytes[s] = state.previous_busy[s], state.previous_free_bytes[s]
    for i in range(number):
        state.slot[state.moved_segments[i]] = state.previous_slot[i]


@njit(nogil=True, error_model="numpy")
def compute_scores(state: AnnealingState, period: float, total: float) -> tuple[float, float]:
    """Objective, and the search score that also rewards balance below the busiest slot."""
    top, summed, powers = 0.0, 0.0, 0.0
    for busy in state.busy:
        top = max(top, busy)
        summed += busy
        powers += (busy * busy) * (busy * busy)
    objective = period * top + total * summed
    return objective, objective + BALANCE_WEIGHT * period * np.sqrt(np.sqrt(powers / len(state.busy)))


@njit(cache=True, nogil=True, error_model="numpy")
def anneal(
    tables: Any,
    state: Any,
    period: float,
    total: float,
    hot: float,
    cold: float,
    first_step: int,
    last_step: int,
    steps: int,
) -> None:
    """Run steps `first_step` to `last_step` of `steps`; the temperature decreases from `hot` to `cold`,
    ms.
    """
    tables, state = ProblemArrays(*tables), AnnealingState(*state)
    targets = np.empty(len(state.slot), np.int64)
    # Low enough to accept broken edges at first, but not at the end.
    penalty = 5.0 * hot
    _recompute(tables, state)
    score, temperature = compute_scores(state, period, total)[1], hot
    for step in range(first_step, last_step):
        if step == first_step or step % 64 == 0:
            temperature = hot * (cold / hot) ** (step / steps)
        number, broken = propose_moves(tables, state, targets), state.num_broken[0]
        if number == 0 or not apply_moves(tables, state, targets, number):
            state.num_broken[0] = broken
            continue
        objective, new_score = compute_scores(state, period, total)
        worse = new_score - score + penalty * (state.num_broken[0] - broken)
        if worse > 0.0 and random_uniform(state.random) >= np.exp(-worse / temperature):
            undo_moves(state, number)
            state.num_broken[0] = broken
            continue
        score = new_score
        if state.num_broken[0] == 0 and objective < state.best[0]:
            # Incremental updates accumulate rounding errors.
            _recompute(tables, state)
            objective, score = compute_scores(state, period, total)
            if objective < state.best[0]:
                state.best[0] = objective
                for k in range(len(state.slot)):
                    state.best_slot[k] = state.slot[k]


@njit(nogil=True, error_model="numpy")
def repair(tables: ProblemArrays, state: AnnealingState, steps: int) -> bool:
    """Random walk towards a mapping within memory limits; returns whether it succeeded."""
    segments, slots = tables.latency.shape
    random, slot = state.random, state.slot
    for _ in range(steps):
        overfull, num_over = slots, 0
        for s in range(slots):
            if excess_bytes(tables, state, s) > 0:
                num_over += 1
                if random_below(random, num_over) == 0:
                    overfull = s
        if overfull == slots:
            return True
        k = random_below(random, segments)
        while slot[k] != overfull:
            k = k + 1 if k + 1 < segments else 0
        t, other = random_below(random, slots), segments
        if random_uniform(random) < 0.6:
            other = random_below(random, segments)
            t = slot[other]
        if t == overfull or tables.latency[k, t] == np.inf:
            continue
        if other < segments and tables.latency[other, overfull] == np.inf:
            continue
        before = excess_bytes(tables, state, overfull) + excess_bytes(tables, state, t)
        move_segment(tables, state, k, t)
        if other < segments:
            move_segment(tables, state, other, overfull)
        after = excess_bytes(tables, state, overfull) + excess_bytes(tables, state, t)
        if after > before and random_uniform(random) > 0.02:
            if other < segments:
                move_segment(tables, state, other, t)
            move_segment(tables, state, k, overfull)
    short = 0
    for s in range(slots):
        short += excess_bytes(tables, state, s) > 0
    return short == 0


@njit(cache=True, nogil=True, error_model="numpy")
def construct(
    tables: Any,
    state: Any,
    order: np.ndarray,
    period: float,
    total: float,
    penalty: float,
    steps: int,
) -> bool:
    """Place segments greedily by added cost and repair the result; returns whether all fit."""
    tables, state = ProblemArrays(*tables), AnnealingState(*state)
    segments, slots = tables.latency.shape
    for k in range(segments):
        state.slot[k] = -1
    for s in range(slots):
        state.busy[s], state.free_bytes[s] = 0.0, tables.limit[s]
    added, peak = np.empty(slots), np.zeros(slots, np.int64)
    fits = True
    for k in order:
        top, best, best_value, roomiest = 0.0, -1, np.inf, -1
        for s in range(slots):
            top = max(top, state.busy[s])
        for s in range(slots):
            if tables.latency[k, s] == np.inf:
                continue
            if roomiest < 0 or state.free_bytes[s] > state.free_bytes[roomiest]:
                roomiest = s
            if state.free_bytes[s] < tables.memory[k, s] + max(peak[s], tables.activation[k, s]):
                continue
            own_ms, other_ms, broken = tables.latency[k, s], 0.0, 0
            for e in range(tables.in_start[k], tables.in_start[k + 1]):
                a = state.slot[tables.in_end[e]]
                if a >= 0 and a != s:
                    if tables.fixed[a, s] == np.inf:
                        broken += 1
                    else:
                        own_ms += tables.fixed[a, s] + tables.in_bytes[e] * tables.per_byte[a, s]
            for e in range(tables.out_start[k], tables.out_start[k + 1]):
                b = state.slot[tables.out_end[e]]
                if b >= 0 and b != s:
                    if tables.fixed[s, b] == np.inf:
                        broken += 1
                    else:
                        other_ms += tables.fixed[s, b] + tables.out_bytes[e] * tables.per_byte[s, b]
            added[s] = own_ms
            # The tie-breaker below orders slots that do not change the period.
            value = period * max(top, state.busy[s] + own_ms) + total * (own_ms + other_ms) + penalty * broken
            value += 1e-6 * period * (state.busy[s] + own_ms)
            if value < best_value:
                best, best_value = s, value
        if best < 0:
            # No slot has enough memory: use the one with the most free memory.
            fits, best = False, roomiest
            added[best] = tables.latency[k, best]
        state.slot[k] = best
        state.busy[best] += added[best]
        state.free_bytes[best] -= tables.memory[k, best]
        peak[best] = max(peak[best], tables.activation[k, best])
    _recompute(tables, state)
    return fits or repair(tables, state, steps)
