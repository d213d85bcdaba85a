"""Local search for what is too large to solve: simulated annealing from good and from greedy mappings.

A step moves a segment (and what is in its way), swaps two, moves a run of segments to another slot or to
where a neighbour is, or makes two slots change places. It costs as much as the edges of what it moves, and a
look at every slot. Memory is respected throughout: steps that do not fit are not taken. Edges between slots
that are not connected are charged heavily, and a mapping with one is never the answer. There are a few
rounds, each from another start; the number of steps grows with the problem. The same seed gives the same
answer unless the time runs out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparseflow.codesign.mapping.objective import evaluate
from sparseflow.codesign.mapping.problem import Problem
from sparseflow.codesign.mapping.strategy import Answer, Request
from sparseflow.codesign.mapping.tables import tables
from sparseflow.core.extras import require

ROUNDS = 4
FEWEST, MOST = 20_000, 3_000_000
"""Steps in all."""

HOT, COLD = (0.1, 0.4), 0.02
"""First temperature, in mean times of a segment, by weight of period and of sum; and the last over it."""

CHUNK = 50_000
"""Steps between two looks at the clock: some ten milliseconds."""

CLOSE = 1e-9
"""Share of a bound within which the best is the optimum."""

REPAIR = 20_000
"""Steps towards a mapping that fits, from each greedy one that does not."""


def default_steps(problem: Problem) -> int:
    """How many steps a problem gets: part of a second for a few hundred (segment, slot) pairs."""
    return min(max((problem.segments * problem.slots) ** 3 // 7, FEWEST), MOST)


def local(request: Request, *, starts: Sequence[np.ndarray] = (), steps: int | None = None) -> Answer:
    """A good mapping.

    Args:
        request: What is asked.
        starts: Mappings that can run, beside that of the request.
        steps: In all; `default_steps` by default.

    Raises:
        MissingExtraError: Numba or SciPy is missing.
    """
    problem, goal = request.problem, request.goal
    steps = default_steps(problem) if steps is None else steps
    walker = _Walker(request)
    tried = [start for start in (request.start, *starts) if start is not None]
    for start in tried:
        walker.offer(start)
    tried += walker.greedy()
    if not tried:
        return Answer(mapping=None)
    tried.sort(key=lambda start: goal.objective_ms(evaluate(problem, start)))
    each = -(-steps // ROUNDS)
    finished = True
    for number in range(ROUNDS):
        if walker.best_ms <= request.lower_bound_ms * (1.0 + CLOSE):
            break
        finished = walker.anneal(tried[number % len(tried)], each, number)
        if not finished:
            break
    return Answer(mapping=walker.best, finished=finished)


class _Walker:
    """A state of the kernels, and what is best so far."""

    def __init__(self, request: Request) -> None:
        require("numba", "codesign")
        from sparseflow.codesign.mapping.kernels import local as kernel

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

    @property
    def best_ms(self) -> float:
        return float(self.state.best[0])

    @property
    def best(self) -> np.ndarray | None:
        return self.state.best_slot.copy() if self.best_ms < np.inf else None

    def offer(self, mapping: np.ndarray) -> None:
        """Take a mapping as the best, if it is."""
        value = self.goal.objective_ms(evaluate(self.problem, mapping))
        if value < self.best_ms:
            self.state.best[0], self.state.best_slot[:] = value, mapping

    def seed(self, number: int) -> None:
        """Random numbers of a part of the search, whatever came before it."""
        self.state.random[:] = np.random.SeedSequence([self.request.seed, number]).generate_state(
            1, np.uint64
        )

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
            self.seed(ROUNDS + number)
            if self.kernel.construct(self.tables, state, order, *weights, penalty, REPAIR):
                found.append(state.slot.copy())
                self.offer(found[-1])
        return found

    def anneal(self, start: np.ndarray, steps: int, number: int) -> bool:
        """One round; False when time is up."""
        state, request = self.state, self.request
        weights = self.goal.period_weight, self.goal.serial_weight
        self.seed(number)
        state.slot[:] = start
        self.kernel.refresh(self.tables, state)
        mean = float(state.busy.sum()) / self.problem.segments
        if mean == 0.0 and state.broken[0] == 0:
            return True
        hot = (HOT[0] * weights[0] + HOT[1] * weights[1]) * (mean or 1.0)
        for begin in range(0, steps, CHUNK):
            end = min(begin + CHUNK, steps)
            self.kernel.anneal(self.tables, state, *weights, hot, COLD * hot, begin, end, steps)
            request.tell("local", self.best_ms, request.lower_bound_ms)
            if request.seconds_left <= 0.0:
                return False
        return True
