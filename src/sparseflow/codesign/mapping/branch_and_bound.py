"""Branch and bound over all mappings: the optimum, with proof, for a dozen segments or so.

Segments are placed one at a time, the one first whose second-best slot costs most, on the slot of the least
bound. Two bounds cut: the one of `bounds`, with multipliers from the linear program at the root, where costs
of segments not yet placed grow by transfers from and to those placed; and that each of them must run
somewhere after what is there already. Slots that are alike are tried once as long as they are empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseflow.codesign.mapping.arrays import Tables, tables
from sparseflow.codesign.mapping.bounds import lower_bound
from sparseflow.codesign.mapping.objective import Goal, evaluate
from sparseflow.codesign.mapping.problem import BYTES_PER_MB
from sparseflow.codesign.mapping.search import Answer, Request
from sparseflow.core.extras import require

WORK = 3e7
"""Nodes times K S^2 between two looks at the clock: some ten milliseconds."""

PRECISION = 1e-10
"""A mapping that is better by a smaller share may be missed."""


def exact(request: Request, *, most_nodes: float = float("inf")) -> Answer:
    """The best of all mappings, or the best by the end of the time.

    Args:
        request: What is asked.
        most_nodes: Nodes after which to stop as if time were up.

    Raises:
        MissingExtraError: Numba or SciPy is missing.
    """
    problem, goal, start = request.problem, request.goal, request.start
    known = float("inf") if start is None else goal.objective_ms(evaluate(problem, start))
    root = lower_bound(problem, goal, known_ms=known)
    floor = max(root.value_ms, request.lower_bound_ms)
    branching = Branching(tables(problem), goal)
    branching.begin(known, start, None, root.busy_weights, root.memory_weights)
    nodes, chunk = 0, max(int(WORK / (problem.segments * problem.slots**2)), 1)
    while not branching.done and request.seconds_left > 0.0 and nodes < most_nodes:
        nodes += branching.go_on(int(min(chunk, most_nodes - nodes)))
        request.tell("exact", branching.best_ms, floor)
    found, finished = branching.best, branching.done
    if found is None:
        return Answer(mapping=None, lower_bound_ms=floor, finished=finished, none_exists=finished)
    value = goal.objective_ms(evaluate(problem, found))
    return Answer(mapping=found, lower_bound_ms=value if finished else min(floor, value), finished=finished)


class Branching:
    """A search of the kernel: over all segments, or over some with the others where they are.

    Args:
        arrays: Of the problem.
        goal: What is made small.
    """

    def __init__(self, arrays: Tables, goal: Goal) -> None:
        require("numba", "codesign")
        from sparseflow.codesign.mapping.kernels import branch_and_bound as kernel

        self.kernel, self.tables, self.goal = kernel, arrays, goal
        self.search: Any = None

    def begin(
        self,
        known_ms: float,
        start: np.ndarray | None,
        free: np.ndarray | None,
        busy_weights: np.ndarray,
        memory_weights: np.ndarray,
        allowed: np.ndarray | None = None,
    ) -> None:
        """Start anew.

        Args:
            known_ms: Only what is better is looked for.
            start: The mapping that has it, int64 [K].
            free: Segments to be placed, bool [K], the others being where `start` has them; all by default.
            busy_weights: u_s of `bounds`, [S].
            memory_weights: v_s of `bounds`, ms for each MB, [S].
            allowed: Slots for those segments, bool [S]; all by default.
        """
        arrays, goal = self.tables, self.goal
        segments, slots = arrays.latency.shape
        depths = (segments if free is None else int(free.sum())) + 1
        own = arrays.latency if allowed is None else np.where(allowed, arrays.latency, np.inf)
        if free is not None:
            own = np.where(free[:, None], own, arrays.latency)
        per_byte = memory_weights / BYTES_PER_MB
        usable = np.isfinite(own)
        cost = (busy_weights + goal.serial_weight) * np.where(usable, own, 0.0) + per_byte * arrays.memory
        # Deeper rows are written before they are read.
        self.search = self.kernel.Search(
            busy=np.empty((depths, slots)),
            left=np.empty((depths, slots), dtype=np.int64),
            own=np.empty((depths, segments, slots)),
            cost=np.empty((depths, segments, slots)),
            slot=np.full(segments, -1, dtype=np.int64),
            chosen=np.zeros(depths, dtype=np.int64),
            kids=np.zeros((depths, slots), dtype=np.int64),
            bounds=np.zeros((depths, slots)),
            number=np.full((depths, 2), -1, dtype=np.int64),
            best=np.array([known_ms]),
            best_slot=np.full(segments, -1, dtype=np.int64) if start is None else start.copy(),
            depth=np.zeros(1, dtype=np.int64),
            weights=np.concatenate([busy_weights, per_byte, [goal.period_weight, goal.serial_weight]]),
        )
        self.search.busy[0], self.search.left[0] = 0.0, arrays.limit
        self.search.own[0], self.search.cost[0] = own, np.where(usable, cost, np.inf)
        if free is not None:
            self.kernel.settle(arrays, self.search, self.search.best_slot, free)

    def go_on(self, nodes: int) -> int:
        """Expand up to so many nodes; how many it were."""
        return self.kernel.go_on(self.tables, self.search, nodes, PRECISION)

    @property
    def done(self) -> bool:
        """Whether all has been searched."""
        return bool(self.search.depth[0] < 0)

    @property
    def best_ms(self) -> float:
        return float(self.search.best[0])

    @property
    def best(self) -> np.ndarray | None:
        """The best mapping, int64 [K]; None where there is none."""
        return self.search.best_slot.copy() if self.search.best_slot[0] >= 0 else None
