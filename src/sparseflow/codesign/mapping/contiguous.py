"""Optimal contiguous mappings by dynamic programming: each used slot runs one run of consecutive segments.

A state is (set of used slots, last slot, number of placed segments); a transition places the next run on an
unused slot, about 2^S * S^2 * K^2 / 8 steps in total. All incoming edges of a run are charged as if they came
from the slot of the previous run. The result is the optimal contiguous mapping if edges only connect
consecutive segments or the network is uniform; otherwise it is a good contiguous mapping, evaluated exactly.

In mode "balanced" the objective z + w * sum is not additive. The minimum period z0 is, and so is the minimum
sum for periods of at most z. Sums grow as z decreases, so decreasing z are enumerated until `z0 + w * sum(z)`
cannot improve the best objective; this takes few rounds because w is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparseflow.codesign.mapping.arrays import build_arrays
from sparseflow.codesign.mapping.objective import evaluate_mapping
from sparseflow.codesign.mapping.problem import MappingProblem
from sparseflow.codesign.mapping.search import MappingRequest, StrategyResult
from sparseflow.core.extras import require
from sparseflow.errors import InputError

MAX_SLOTS = 12
MAX_STATES = 2**25
"""Maximum size of the table (400 MB)."""


def estimate_steps(problem: MappingProblem) -> float:
    """Estimate the number of steps; inf if there are too many slots or states."""
    segments, slots = problem.num_segments, problem.num_slots
    if slots > MAX_SLOTS or 2**slots * slots * (segments + 1) > MAX_STATES:
        return float("inf")
    return 2.0**slots * slots**2 * segments**2 / 8.0


def solve_contiguous(request: MappingRequest) -> StrategyResult:
    """Find the best contiguous mapping; see the module for when it is optimal.

    Raises:
        InputError: There are too many slots or segments.
        MissingExtraError: Numba is missing.
    """
    problem, goal = request.problem, request.goal
    if estimate_steps(problem) == float("inf"):
        raise InputError(
            f"strategy 'dp' supports at most {MAX_SLOTS} slots with chips and {MAX_STATES} states; got "
            f"{problem.num_slots} slots and {problem.num_segments} segments; use 'local'"
        )
    table = _DynamicProgram(problem)
    first = table.solve(np.inf, by_period=goal.period_weight > 0.0)
    if first is None or goal.period_weight == 0.0:
        return StrategyResult(mapping=None if first is None else _keep_feasible(problem, first.mapping))
    ratio, best = goal.serial_weight / goal.period_weight, first
    min_total = table.solve(np.inf, by_period=False)
    assert min_total is not None
    # A longer period costs more than its sum can gain.
    cap = first.period + ratio * max(first.total - min_total.total, 0.0)
    while (candidate := table.solve(cap, by_period=False)) is not None:
        if candidate.period + ratio * candidate.total < best.period + ratio * best.total:
            best = candidate
        timed_out = request.remaining_s <= 0.0
        if timed_out or first.period + ratio * candidate.total >= best.period + ratio * best.total:
            break
        cap = np.nextafter(candidate.period, 0.0)
    return StrategyResult(mapping=_keep_feasible(problem, best.mapping))


def _keep_feasible(problem: MappingProblem, mapping: np.ndarray) -> np.ndarray | None:
    """Return None if an edge that skips a run connects unconnected slots."""
    return mapping if evaluate_mapping(problem, mapping).feasible else None


@dataclass(frozen=True, kw_only=True, eq=False)
class _ContiguousMapping:
    mapping: np.ndarray
    period: float
    total: float


class _DynamicProgram:
    """Buffers of the kernel, reused between rounds."""

    def __init__(self, problem: MappingProblem) -> None:
        states = 2**problem.num_slots * problem.num_slots * (problem.num_segments + 1)
        self.arrays = tuple(build_arrays(problem))
        self.segments, self.slots = problem.num_segments, problem.num_slots
        self.value, self.other = np.empty(states), np.empty(states)
        self.before = np.empty(states, dtype=np.int32)

    def solve(self, cap: float, *, by_period: bool) -> _ContiguousMapping | None:
        require("numba", "codesign")
        from sparseflow.codesign.mapping.kernels import contiguous as kernel

        last = kernel.fill_table(self.arrays, cap, by_period, self.value, self.other, self.before)
        if last < 0:
            return None
        values = float(self.value[last]), float(self.other[last])
        mapping, width = np.empty(self.segments, dtype=np.int64), self.segments + 1
        state, end = last, self.segments
        while end > 0:
            start_state = int(self.before[state])
            start = start_state % width if start_state >= 0 else 0
            mapping[start:end] = state // width % self.slots
            state, end = start_state, start
        period, total = values if by_period else values[::-1]
        return _ContiguousMapping(mapping=mapping, period=period, total=total)
