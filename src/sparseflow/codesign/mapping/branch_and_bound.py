"""Branch and bound over all mappings: the proven optimum for about a dozen segments.

Segments are placed one at a time, first the one whose second-best slot is most expensive, on slots in order
of their bound. Two bounds prune: the Lagrangian bound of `bounds` with the root multipliers, where the costs
of unplaced segments include transfers from and to placed ones; and the minimum busy time of each unplaced
segment on the current load. Of interchangeable empty slots only one is tried.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparseflow.codesign.mapping.arrays import ProblemArrays, build_arrays
from sparseflow.codesign.mapping.bounds import compute_lower_bound
from sparseflow.codesign.mapping.objective import MappingGoal, evaluate_mapping
from sparseflow.codesign.mapping.problem import BYTES_PER_MB
from sparseflow.codesign.mapping.search import MappingRequest, StrategyResult
from sparseflow.core.extras import require

CHUNK_WORK = 3e7
"""Nodes times K S^2 between two time checks, about 10 ms."""

PRECISION = 1e-10
"""Relative improvement below which a better mapping may be missed."""


def branch_and_bound(request: MappingRequest, *, max_nodes: float = float("inf")) -> StrategyResult:
    """Find the optimal mapping, or the best one within the time limit.

    Args:
        request: Problem and limits.
        max_nodes: Maximum number of expanded nodes.

    Raises:
        MissingExtraError: Numba or SciPy is missing.
    """
    problem, goal, start = request.problem, request.goal, request.start
    incumbent_ms = float("inf") if start is None else goal.objective_ms(evaluate_mapping(problem, start))
    root = compute_lower_bound(problem, goal, incumbent_ms=incumbent_ms)
    floor = max(root.value_ms, request.lower_bound_ms)
    branching = BranchAndBound(build_arrays(problem), goal)
    branching.reset(incumbent_ms, start, None, root.busy_weights, root.memory_weights)
    nodes, chunk = 0, max(int(CHUNK_WORK / (problem.num_segments * problem.num_slots**2)), 1)
    while not branching.finished and request.remaining_s > 0.0 and nodes < max_nodes:
        nodes += branching.expand(int(min(chunk, max_nodes - nodes)))
    mapping, finished = branching.best, branching.finished
    if mapping is None:
        return StrategyResult(mapping=None, lower_bound_ms=floor, finished=finished, infeasible=finished)
    value = goal.objective_ms(evaluate_mapping(problem, mapping))
    return StrategyResult(
        mapping=mapping, lower_bound_ms=value if finished else min(floor, value), finished=finished
    )


class BranchAndBound:
    """A resumable search over all segments, or over some segments with the others fixed.

    Args:
        arrays: Arrays of the problem.
        goal: The objective.
    """

    def __init__(self, arrays: ProblemArrays, goal: MappingGoal) -> None:
        require("numba", "codesign")
        from sparseflow.codesign.mapping.kernels import branch_and_bound as kernel

        self.kernel, self.arrays, self.goal = kernel, arrays, goal
        self.search: Any = None

    def reset(
        self,
        incumbent_ms: float,
        start: np.ndarray | None,
        free: np.ndarray | None,
        busy_weights: np.ndarray,
        memory_weights: np.ndarray,
        allowed: np.ndarray | None = None,
    ) -> None:
        """Start a new search.

        Args:
            incumbent_ms: Search only for mappings with a lower objective, ms.
            start: Mapping with that objective, int64 [K].
            free: Segments to place, bool [K]; the others are fixed as in `start`. All by default.
            busy_weights: u_s of `bounds`, [S].
            memory_weights: v_s of `bounds`, ms per MB, [S].
            allowed: Slots for the free segments, bool [S]; all by default.
        """
        arrays, goal = self.arrays, self.goal
        segments, slots = arrays.latency.shape
        depths = (segments if free is None else int(free.sum())) + 1
        busy_increase = arrays.latency if allowed is None else np.where(allowed, arrays.latency, np.inf)
        if free is not None:
            busy_increase = np.where(free[:, None], busy_increase, arrays.latency)
        per_byte = memory_weights / BYTES_PER_MB
        usable = np.isfinite(busy_increase)
        cost = (busy_weights + goal.serial_weight) * np.where(
            usable, busy_increase, 0.0
        ) + per_byte * arrays.memory
        # Only row 0 is initialized; deeper rows are written before they are read.
        self.search = self.kernel.BranchState(
            busy=np.empty((depths, slots)),
            free_bytes=np.empty((depths, slots), dtype=np.int64),
            peak_bytes=np.empty((depths, slots), dtype=np.int64),
            busy_increase=np.empty((depths, segments, slots)),
            cost=np.empty((depths, segments, slots)),
            slot=np.full(segments, -1, dtype=np.int64),
            next_segment=np.zeros(depths, dtype=np.int64),
            children=np.zeros((depths, slots), dtype=np.int64),
            bounds=np.zeros((depths, slots)),
            cursor=np.full((depths, 2), -1, dtype=np.int64),
            best=np.array([incumbent_ms]),
            best_slot=np.full(segments, -1, dtype=np.int64) if start is None else start.copy(),
            depth=np.zeros(1, dtype=np.int64),
            weights=np.concatenate([busy_weights, per_byte, [goal.period_weight, goal.serial_weight]]),
        )
        self.search.busy[0], self.search.free_bytes[0], self.search.peak_bytes[0] = 0.0, arrays.limit, 0
        self.search.busy_increase[0], self.search.cost[0] = busy_increase, np.where(usable, cost, np.inf)
        if free is not None:
            self.kernel.fix_segments(tuple(arrays), tuple(self.search), self.search.best_slot, free)

    def expand(self, nodes: int) -> int:
        """Expand up to `nodes` nodes and return their number."""
        return self.kernel.advance(tuple(self.arrays), tuple(self.search), nodes, PRECISION)

    @property
    def finished(self) -> bool:
        """Whether the search is complete."""
        return bool(self.search.depth[0] < 0)

    @property
    def best_ms(self) -> float:
        return float(self.search.best[0])

    @property
    def best(self) -> np.ndarray | None:
        """The best mapping, int64 [K]; None if there is none."""
        return self.search.best_slot.copy() if self.search.best_slot[0] >= 0 else None
