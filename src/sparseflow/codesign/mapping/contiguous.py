r"""Contiguous mappings: each slot that is used hosts one run of consecutive segments, in any order of slots.

A state is (slots used, last slot, segments placed); a step puts the next run on a slot that is free:
2^S * S^2 * K^2 / 8 steps or so. Runs are charged as if all that comes in from earlier runs came from the
slot of the run just before. That is right, and the answer the best contiguous mapping, where each edge goes
from a segment to the next, or where the network costs the same between every two slots; with other edges on
other networks the answer is a good contiguous mapping, valued as it really is.

In the mode "balanced" the objective z + w * sum is not additive. The least period z0 is; and so is the least
sum among mappings whose period is at most z. Sums grow as z falls, so those of falling z are gone through
until `z0 + w * sum(z)` is no better than what was found: a few rounds, as w is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparseflow.codesign.mapping.arrays import tables
from sparseflow.codesign.mapping.objective import evaluate
from sparseflow.codesign.mapping.problem import Problem
from sparseflow.codesign.mapping.search import Answer, Request
from sparseflow.core.extras import require
from sparseflow.errors import InputError

MOST_SLOTS = 12
MOST_STATES = 2**25
"""Of the table: 400 MB."""


def steps(problem: Problem) -> float:
    """About how many steps it takes; inf where there are too many slots or states."""
    segments, slots = problem.segments, problem.slots
    if slots > MOST_SLOTS or 2**slots * slots * (segments + 1) > MOST_STATES:
        return float("inf")
    return 2.0**slots * slots**2 * segments**2 / 8.0


def dp(request: Request) -> Answer:
    """The best contiguous mapping; see above for when it is the best, and when only good.

    Raises:
        InputError: Too many slots or segments.
        MissingExtraError: Numba is missing.
    """
    problem, goal = request.problem, request.goal
    if steps(problem) == float("inf"):
        raise InputError(
            f"the strategy 'dp' takes at most {MOST_SLOTS} slots with chips and {MOST_STATES} states; "
            f"{problem.slots} slots and {problem.segments} segments were given: use 'local'"
        )
    table = _Table(problem)
    first = table.solve(np.inf, by_period=goal.period_weight > 0.0)
    if first is None or goal.period_weight == 0.0:
        return Answer(mapping=None if first is None else _runnable(problem, first.mapping))
    ratio, best = goal.serial_weight / goal.period_weight, first
    least = table.solve(np.inf, by_period=False)
    assert least is not None
    # Whatever has a longer period loses more by it than it can gain by its sum.
    cap = first.period + ratio * max(first.total - least.total, 0.0)
    while (found := table.solve(cap, by_period=False)) is not None:
        if found.period + ratio * found.total < best.period + ratio * best.total:
            best = found
        late = request.seconds_left <= 0.0
        if late or first.period + ratio * found.total >= best.period + ratio * best.total:
            break
        cap = np.nextafter(found.period, 0.0)
    return Answer(mapping=_runnable(problem, best.mapping))


def _runnable(problem: Problem, mapping: np.ndarray) -> np.ndarray | None:
    """None where an edge that skips a run leads over slots that are not connected."""
    return mapping if evaluate(problem, mapping).feasible else None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Chain:
    mapping: np.ndarray
    period: float
    total: float


class _Table:
    """Memory of the kernel, kept from one round to the next."""

    def __init__(self, problem: Problem) -> None:
        states = 2**problem.slots * problem.slots * (problem.segments + 1)
        self.tables, self.segments, self.slots = tables(problem), problem.segments, problem.slots
        self.value, self.other = np.empty(states), np.empty(states)
        self.before = np.empty(states, dtype=np.int32)

    def solve(self, cap: float, *, by_period: bool) -> _Chain | None:
        require("numba", "codesign")
        from sparseflow.codesign.mapping.kernels import contiguous as kernel

        last = kernel.chain(self.tables, cap, by_period, self.value, self.other, self.before)
        if last < 0:
            return None
        values = float(self.value[last]), float(self.other[last])
        mapping, width = np.empty(self.segments, dtype=np.int64), self.segments + 1
        state, end = last, self.segments
        while end > 0:
            begin_state = int(self.before[state])
            begin = begin_state % width if begin_state >= 0 else 0
            mapping[begin:end] = state // width % self.slots
            state, end = begin_state, begin
        period, total = values if by_period else values[::-1]
        return _Chain(mapping=mapping, period=period, total=total)
