"""Local search for what is too large to solve: annealing from good and from greedy mappings, then refining.

A step of simulated annealing moves a segment (and what is in its way), swaps two, moves a run of segments to
another slot or to where a neighbour is, or makes two slots change places. It costs as much as the edges of
what it moves, and a look at every slot. Memory is respected throughout: steps that do not fit are not taken.
Edges between slots that are not connected are charged, and a mapping with one is never the answer. There are
a few rounds, each from another start and with a `refine` at its end; the number of steps grows with the
problem. The same seed gives the same answer unless the time runs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.codesign.mapping.arrays import tables
from sparseflow.codesign.mapping.branch_and_bound import Branching
from sparseflow.codesign.mapping.objective import evaluate
from sparseflow.codesign.mapping.problem import Problem
from sparseflow.codesign.mapping.search import Answer, Request
from sparseflow.core.extras import require

SLOTS, SEGMENTS = 4, 16
"""Of a neighbourhood."""

NODES = 2_000
"""In each: a millisecond or two."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to search.

    Attributes:
        rounds: How many.
        steps: Of annealing, in each.
        tries: Neighbourhoods of `refine`, in each.
        nodes: Of the search of a neighbourhood, at most.
    """

    rounds: int
    steps: int
    tries: int
    nodes: int = NODES

    @classmethod
    def of(cls, problem: Problem) -> Effort:
        """What a problem gets: some tenths of a second for 200 (segment, slot) pairs, and then seconds."""
        pairs = problem.segments * problem.slots
        steps = min(max(pairs**3 // 80, 5_000), 500_000)
        return cls(rounds=4, steps=steps, tries=min(max(2_000_000 // pairs, 20), 80))


NONE = Effort(rounds=0, steps=0, tries=0)
"""Only look at the starts, given and greedy."""

HOT, COLD = (0.1, 0.4), 0.02
"""First temperature, in mean times of a segment, by weight of period and of sum; and the last over it."""

CHUNK = 50_000
"""Steps between two looks at the clock: some ten milliseconds."""

CLOSE = 1e-9
"""Share of a bound within which the best is the optimum."""

REPAIR = 20_000
"""Steps towards a mapping that fits, from each greedy one that does not."""


def local(request: Request, *, starts: Sequence[np.ndarray] = (), effort: Effort | None = None) -> Answer:
    """A good mapping.

    Args:
        request: What is asked.
        starts: Mappings that can run, beside that of the request.
        effort: `Effort.of` the problem by default.

    Raises:
        MissingExtraError: Numba is missing.
    """
    problem, goal = request.problem, request.goal
    effort = Effort.of(problem) if effort is None else effort
    walker = _Walker(request)
    tried = [start for start in (request.start, *starts) if start is not None] + walker.greedy()
    if not tried:
        return Answer(mapping=None)
    tried.sort(key=lambda start: goal.objective_ms(evaluate(problem, start)))
    best, finished = tried[0], True
    best_ms = goal.objective_ms(evaluate(problem, best))
    for number in range(effort.rounds):
        if best_ms <= request.lower_bound_ms * (1.0 + CLOSE):
            break
        found = walker.anneal(tried[number % len(tried)], effort.steps, number)
        if found is not None:
            found = refine(request, found, tries=effort.tries, nodes=effort.nodes, seed=number)
            value = goal.objective_ms(evaluate(problem, found))
            if value < best_ms:
                best, best_ms = found, value
        request.tell("local", best_ms, request.lower_bound_ms)
        finished = request.seconds_left > 0.0
        if not finished:
            break
    return Answer(mapping=best if best_ms < np.inf else None, finished=finished)


class _Walker:
    """A state of the kernels, to make mappings and to walk among them."""

    def __init__(self, request: Request) -> None:
        require("numba", "codesign")
        from sparseflow.codesign.mapping.kernels import annealing as kernel

        self.kernel, self.request = kernel, request
        self.problem, self.goal, self.tables = request.problem, request.goal, tables(request.problem)
        segments, slots = self.problem.segments, self.problem.slots
        self.state = kernel.State(
            slot=np.zeros(segments, dtype=np.int64),
            busy=np.zeros(slots),
            left=np.zeros(slots, dtype=np.int64),
            broken=np.zeros(1, dtype=np.int64),
            random=np.zeros(1, dtype=np.uint64),
            best=np.full(1, np.inf),
            best_slot=np.full(segments, -1, dtype=np.int64),
            moved=np.zeros(segments, dtype=np.int64),
            came=np.zeros(segments, dtype=np.int64),
            busy_before=np.zeros(slots),
            left_before=np.zeros(slots, dtype=np.int64),
        )

    def seed(self, part: int, number: int) -> None:
        """Random numbers of a part of the search, whatever came before it."""
        sequence = np.random.SeedSequence([self.request.seed, part, number])
        self.state.random[:] = sequence.generate_state(1, np.uint64)

    def greedy(self) -> list[np.ndarray]:
        """Mappings whose memory fits, by several orders; some edges may have no connection."""
        allowed, state = self.problem.allowed, self.state
        memory = np.where(allowed, self.tables.memory, 0).max(axis=1)
        latency = np.where(allowed, self.problem.latency_ms, np.inf).min(axis=1)
        orders = (
            np.arange(self.problem.segments),
            np.argsort(-memory, kind="stable"),
            np.argsort(-latency, kind="stable"),
        )
        weights = self.goal.period_weight, self.goal.serial_weight
        penalty = float(sum(weights) * latency.sum()) + 1.0
        found = []
        for number, order in enumerate(orders):
            self.seed(0, number)
            if self.kernel.construct(self.tables, state, order, *weights, penalty, REPAIR):
                found.append(state.slot.copy())
        return found

    def anneal(self, start: np.ndarray, steps: int, number: int) -> np.ndarray | None:
        """One round, or what time leaves of it: the best mapping on its way that can run."""
        state, request = self.state, self.request
        weights = self.goal.period_weight, self.goal.serial_weight
        self.seed(1, number)
        state.slot[:] = state.best_slot[:] = start
        state.best[0] = self.goal.objective_ms(evaluate(self.problem, start))
        self.kernel.refresh(self.tables, state)
        mean = float(state.busy.sum()) / self.problem.segments
        hot = (HOT[0] * weights[0] + HOT[1] * weights[1]) * (mean or 1.0)
        for begin in range(0, steps, CHUNK):
            end = min(begin + CHUNK, steps)
            self.kernel.anneal(self.tables, state, *weights, hot, COLD * hot, begin, end, steps)
            if request.seconds_left <= 0.0:
                break
        return state.best_slot.copy() if state.best[0] < np.inf else None


def refine(request: Request, start: np.ndarray, *, tries: int, seed: int, nodes: int = NODES) -> np.ndarray:
    """A mapping that is no worse.

    Args:
        request: What is asked.
        start: A mapping that can run, int64 [K].
        tries: Neighbourhoods to look at, time permitting.
        seed: Beside that of the request.
        nodes: To expand in each, at most.

    Raises:
        MissingExtraError: Numba is missing.
    """
    problem, goal = request.problem, request.goal
    if problem.slots == 1:
        return start
    arrays = tables(problem)
    branching, best = Branching(arrays, goal), start
    now = evaluate(problem, best)
    rng = np.random.default_rng([request.seed, 2, seed])
    speed = _speeds(arrays.latency)
    none = np.zeros(problem.slots)
    # Neighbourhoods of the mapping as it is: to look at one again would find nothing again.
    seen: set[bytes] = set()
    for _ in range(tries):
        if request.seconds_left <= 0.0:
            break
        order = rng.permutation(problem.slots)
        if goal.period_weight > 0.0:
            fullest = int(np.argmax(now.busy_ms))
            order = np.concatenate([[fullest], order[order != fullest]])
        allowed = np.zeros(problem.slots, dtype=bool)
        allowed[order[:SLOTS]] = True
        there = rng.permutation(np.flatnonzero(allowed[best]))[:SEGMENTS]
        free = np.zeros(problem.segments, dtype=bool)
        free[there] = True
        name = allowed.tobytes() + free.tobytes()
        if len(there) == 0 or name in seen:
            continue
        seen.add(name)
        weights, best_ms = np.where(allowed, speed, 0.0), goal.objective_ms(now)
        branching.begin(best_ms, best, free, goal.period_weight * weights / weights.sum(), none, allowed)
        branching.go_on(nodes)
        if branching.best_ms < best_ms and branching.best is not None:
            best, seen = branching.best, set()
            now = evaluate(problem, best)
    return best


def _speeds(latency: np.ndarray) -> np.ndarray:
    """How fast each slot is, float64 [S], from times [K, S]; inf where a segment cannot run.

    The faster a slot, the more its time weighs, so that segments cost about the same everywhere.
    """
    usable = np.isfinite(latency)
    mean = np.where(usable, latency, 0.0).sum(axis=0) / np.maximum(usable.sum(axis=0), 1)
    # A slot that takes no time at all is taken as fast, not as all that counts.
    return 1.0 / np.maximum(mean, 1e-3 * mean.max() or 1.0)
