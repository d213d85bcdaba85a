"""Simulated annealing over mappings that fit, a number of steps at a time, and how first ones are made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from sparseflow.codesign.mapping.arrays import Tables

LONGEST = 4
"""Segments that move in a step, but for two slots that change places."""

EVEN = 0.3
"""Weight of the fourth root of the mean fourth power of busy times, beside that of the largest."""


class State(NamedTuple):
    """A mapping and what follows from it.

    Attributes:
        slot: Of each segment, int64 [K].
        busy: ms, float64 [S], without transfers between slots that are not connected.
        left: Memory, bytes, int64 [S].
        broken: How many edges lead between slots that are not connected, int64 [1].
        random: State of the generator, uint64 [1].
        best: Least objective so far, float64 [1].
        best_slot: Its mapping, int64 [K].
        moved: Segments that the last step moved, int64 [K].
        came: Where each of them was, int64 [K].
        busy_before: As `busy` before the last step.
        left_before: As `left` before the last step.
    """

    slot: np.ndarray
    busy: np.ndarray
    left: np.ndarray
    broken: np.ndarray
    random: np.ndarray
    best: np.ndarray
    best_slot: np.ndarray
    moved: np.ndarray
    came: np.ndarray
    busy_before: np.ndarray
    left_before: np.ndarray


@njit(cache=True, nogil=True, error_model="numpy")
def drawn(random: np.ndarray) -> float:
    """From 0 to below 1 (splitmix64)."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return float((z ^ (z >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


@njit(cache=True, nogil=True, error_model="numpy")
def below(random: np.ndarray, number: int) -> int:
    """A whole number from 0 to below `number`."""
    return int(drawn(random) * number)


@njit(cache=True, nogil=True, error_model="numpy")
def refresh(tables: Tables, state: State) -> None:
    """All that follows from `slot`, from nothing."""
    # Loops here and below: whole rows at once would take Numba seconds more to compile.
    for s in range(len(state.busy)):
        state.busy[s], state.left[s] = 0.0, tables.limit[s]
    state.broken[0] = 0
    for k in range(len(state.slot)):
        s = state.slot[k]
        state.busy[s] += tables.latency[k, s]
        state.left[s] -= tables.memory[k, s]
        for e in range(tables.in_start[k], tables.in_start[k + 1]):
            a = state.slot[tables.in_end[e]]
            if a != s:
                if tables.fixed[a, s] == np.inf:
                    state.broken[0] += 1
                else:
                    state.busy[s] += tables.fixed[a, s] + tables.in_bytes[e] * tables.per_byte[a, s]


@njit(cache=True, nogil=True, error_model="numpy")
def shift(tables: Tables, state: State, k: int, t: int) -> None:
    """Move a segment, whatever fits."""
    # Edges are written out: a function for one would make annealing a third slower.
    s = state.slot[k]
    busy, fixed, per_byte = state.busy, tables.fixed, tables.per_byte
    state.left[s] += tables.memory[k, s]
    state.left[t] -= tables.memory[k, t]
    busy[s] -= tables.latency[k, s]
    busy[t] += tables.latency[k, t]
    for e in range(tables.in_start[k], tables.in_start[k + 1]):
        a, size = state.slot[tables.in_end[e]], tables.in_bytes[e]
        if a != s:
            if fixed[a, s] == np.inf:
                state.broken[0] -= 1
            else:
                busy[s] -= fixed[a, s] + size * per_byte[a, s]
        if a != t:
            if fixed[a, t] == np.inf:
                state.broken[0] += 1
            else:
                busy[t] += fixed[a, t] + size * per_byte[a, t]
    for e in range(tables.out_start[k], tables.out_start[k + 1]):
        b, size = state.slot[tables.out_end[e]], tables.out_bytes[e]
        if b != s:
            if fixed[s, b] == np.inf:
                state.broken[0] -= 1
            else:
                busy[b] -= fixed[s, b] + size * per_byte[s, b]
        if b != t:
            if fixed[t, b] == np.inf:
                state.broken[0] += 1
            else:
                busy[b] += fixed[t, b] + size * per_byte[t, b]
    state.slot[k] = t


@njit(cache=True, nogil=True, error_model="numpy")
def propose(tables: Tables, state: State, places: np.ndarray) -> int:
    """Draw a step: fill `moved` and `places` (the slots they go to); how many segments it moves, maybe 0."""
    segments, slots = tables.latency.shape
    slot, moved, random = state.slot, state.moved, state.random
    kind = drawn(random)
    k = below(random, segments)
    s = slot[k]
    if kind < 0.3:
        t = below(random, slots)
        if t == s:
            return 0
        moved[0], places[0], n = k, t, 1
        lacking = tables.memory[k, t] - state.left[t]
        v = below(random, segments)
        for _ in range(segments):
            # Who is in the way goes to where the segment came from, or anywhere.
            if lacking <= 0 or n == LONGEST:
                break
            if slot[v] == t:
                moved[n], places[n] = v, s if drawn(random) < 0.5 else below(random, slots)
                lacking -= tables.memory[v, t]
                n += 1 if places[n] != t else 0
            v = v + 1 if v + 1 < segments else 0
        return n
    if kind < 0.55:
        other = below(random, segments)
        if slot[other] == s:
            return 0
        moved[0], places[0], moved[1], places[1] = k, slot[other], other, s
        return 2
    if kind < 0.8:
        # To where a segment is that it is tied to, and those next to it with it.
        first, last = tables.in_start[k], tables.in_start[k + 1]
        start, end = tables.out_start[k], tables.out_start[k + 1]
        ties = last - first + end - start
        if ties == 0:
            return 0
        at = below(random, ties)
        inward = at < last - first
        other = tables.in_end[first + at] if inward else tables.out_end[start + at - (last - first)]
        t, step = slot[other], 1 if inward else -1
        if t == s:
            return 0
        longest, n = 1 + int(drawn(random) * LONGEST), 0
        while n < longest and 0 <= k < segments and slot[k] == s:
            moved[n], places[n] = k, t
            k, n = k + step, n + 1
        return n
    if kind < 0.98:
        t, longest, n = below(random, slots), 2 + int(drawn(random) * LONGEST), 0
        if t == s:
            return 0
        while n < longest and k < segments and slot[k] == s:
            moved[n], places[n] = k, t
            k, n = k + 1, n + 1
        return n
    t, n = below(random, slots), 0
    if t == s:
        return 0
    for v in range(segments):
        if slot[v] == s or slot[v] == t:
            moved[n], places[n] = v, s + t - slot[v]
            n += 1
    return n


@njit(cache=True, nogil=True, error_model="numpy")
def apply(tables: Tables, state: State, places: np.ndarray, number: int) -> bool:
    """Move the segments that were drawn; whether they may all be where they are now."""
    refused = 0
    for i in range(number):
        refused += tables.latency[state.moved[i], places[i]] == np.inf
    if refused > 0 or (number == 1 and state.left[places[0]] < tables.memory[state.moved[0], places[0]]):
        return False
    for s in range(len(state.busy)):
        state.busy_before[s], state.left_before[s] = state.busy[s], state.left[s]
    for i in range(number):
        state.came[i] = state.slot[state.moved[i]]
        shift(tables, state, state.moved[i], places[i])
    for i in range(number):
        refused += state.left[places[i]] < 0
    if refused > 0:
        take_back(state, number)
    return refused == 0


@njit(cache=True, nogil=True, error_model="numpy")
def take_back(state: State, number: int) -> None:
    """Undo the last step; `broken` is the caller's."""
    for s in range(len(state.busy)):
        state.busy[s], state.left[s] = state.busy_before[s], state.left_before[s]
    for i in range(number):
        state.slot[state.moved[i]] = state.came[i]


@njit(cache=True, nogil=True, error_model="numpy")
def values(state: State, period: float, total: float) -> tuple[float, float]:
    """The objective, and what the search goes by: it sees, too, how even the slots below the fullest are."""
    top, summed, powers = 0.0, 0.0, 0.0
    for busy in state.busy:
        top = max(top, busy)
        summed += busy
        powers += (busy * busy) * (busy * busy)
    objective = period * top + total * summed
    return objective, objective + EVEN * period * np.sqrt(np.sqrt(powers / len(state.busy)))


@njit(cache=True, nogil=True, error_model="numpy")
def anneal(
    tables: Tables,
    state: State,
    period: float,
    total: float,
    hot: float,
    cold: float,
    begin: int,
    end: int,
    steps: int,
) -> None:
    """Steps `begin` to `end` of `steps`, over which the temperature falls from `hot` to `cold`, ms."""
    places = np.empty(len(state.slot), np.int64)
    # Can be crossed at first, and not in the end.
    penalty = 5.0 * hot
    refresh(tables, state)
    value, temperature = values(state, period, total)[1], hot
    for step in range(begin, end):
        if step == begin or step % 64 == 0:
            temperature = hot * (cold / hot) ** (step / steps)
        number, broken = propose(tables, state, places), state.broken[0]
        if number == 0 or not apply(tables, state, places, number):
            state.broken[0] = broken
            continue
        objective, found = values(state, period, total)
        worse = found - value + penalty * (state.broken[0] - broken)
        if worse > 0.0 and drawn(state.random) >= np.exp(-worse / temperature):
            take_back(state, number)
            state.broken[0] = broken
            continue
        value = found
        if state.broken[0] == 0 and objective < state.best[0]:
            # What was added and taken off leaves rounding errors behind.
            refresh(tables, state)
            objective, value = values(state, period, total)
            if objective < state.best[0]:
                state.best[0] = objective
                for k in range(len(state.slot)):
                    state.best_slot[k] = state.slot[k]


@njit(cache=True, nogil=True, error_model="numpy")
def repair(tables: Tables, state: State, steps: int) -> bool:
    """Walk at random towards a mapping that fits; whether it got there. What is over limits seldom grows."""
    segments, slots = tables.latency.shape
    random, slot, left = state.random, state.slot, state.left
    for _ in range(steps):
        full, seen = slots, 0
        for s in range(slots):
            if left[s] < 0:
                seen += 1
                if below(random, seen) == 0:
                    full = s
        if full == slots:
            return True
        k = below(random, segments)
        while slot[k] != full:
            k = k + 1 if k + 1 < segments else 0
        t, other = below(random, slots), segments
        if drawn(random) < 0.6:
            other = below(random, segments)
            t = slot[other]
        if t == full or tables.latency[k, t] == np.inf:
            continue
        if other < segments and tables.latency[other, full] == np.inf:
            continue
        before = max(0, -left[full]) + max(0, -left[t])
        shift(tables, state, k, t)
        if other < segments:
            shift(tables, state, other, full)
        after = max(0, -left[full]) + max(0, -left[t])
        if after > before and drawn(random) > 0.02:
            if other < segments:
                shift(tables, state, other, t)
            shift(tables, state, k, full)
    short = 0
    for s in range(slots):
        short += left[s] < 0
    return short == 0


@njit(cache=True, nogil=True, error_model="numpy")
def construct(
    tables: Tables, state: State, order: np.ndarray, period: float, total: float, penalty: float, steps: int
) -> bool:
    """Place segments one by one where they add least, and repair that; whether all fit in the end."""
    segments, slots = tables.latency.shape
    for k in range(segments):
        state.slot[k] = -1
    for s in range(slots):
        state.busy[s], state.left[s] = 0.0, tables.limit[s]
    added = np.empty(slots)
    fits = True
    for k in order:
        top, chosen, least, roomiest = 0.0, -1, np.inf, -1
        for s in range(slots):
            top = max(top, state.busy[s])
        for s in range(slots):
            if tables.latency[k, s] == np.inf:
                continue
            if roomiest < 0 or state.left[s] > state.left[roomiest]:
                roomiest = s
            if state.left[s] < tables.memory[k, s]:
                continue
            into, others, broken = tables.latency[k, s], 0.0, 0
            for e in range(tables.in_start[k], tables.in_start[k + 1]):
                a = state.slot[tables.in_end[e]]
                if a >= 0 and a != s:
                    if tables.fixed[a, s] == np.inf:
                        broken += 1
                    else:
                        into += tables.fixed[a, s] + tables.in_bytes[e] * tables.per_byte[a, s]
            for e in range(tables.out_start[k], tables.out_start[k + 1]):
                b = state.slot[tables.out_end[e]]
                if b >= 0 and b != s:
                    if tables.fixed[s, b] == np.inf:
                        broken += 1
                    else:
                        others += tables.fixed[s, b] + tables.out_bytes[e] * tables.per_byte[s, b]
            added[s] = into
            # The period alone says nothing as long as no slot is fuller than the fullest.
            value = period * max(top, state.busy[s] + into) + total * (into + others) + penalty * broken
            value += 1e-6 * period * (state.busy[s] + into)
            if value < least:
                chosen, least = s, value
        if chosen < 0:
            # It fits nowhere: where most is left it does least harm.
            fits, chosen = False, roomiest
            added[chosen] = tables.latency[k, chosen]
        state.slot[k] = chosen
        state.busy[chosen] += added[chosen]
        state.left[chosen] -= tables.memory[k, chosen]
    refresh(tables, state)
    return fits or repair(tables, state, steps)
