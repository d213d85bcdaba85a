"""Q-learning with simulated annealing: learns which scheduling decision to change next.

This follows FlexTensor (Zheng et al., ASPLOS 2020) and AutoSparse's search:

- *Start*: one of the best schedules, sampled with weight (cost / lowest cost)^(-1/t), with a decreasing
  temperature t.
- *Action*: the decision that the next schedule changes: a split, the storage order, the loops, and so on. The
  value Q(action | state) is learned for each coarse state: which axes are split, whether the innermost loop
  is vectorized, and whether the outermost loop is parallel. Usually the best action is selected, sometimes a
  random one.
- *Update*: with reward r = log(cost before / cost after) and next state s'::

      Q(a | s) ← Q(a | s) + rate (r + discount max(0, max Q(· | s')) − Q(a | s))

  An action without a value in a state has its value over all states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace
from sparseflow.tuning.search.base import Strategy

State = tuple[bool, ...]

_NUM_CANDIDATES = 4
"""Mutants from which the best action is selected."""

_INITIAL_VALUE = 0.5
"""Optimistic value of an action that was never evaluated."""

_MAX_REWARD = 2.0
"""Largest reward, a speedup by e squared; failures get the negated value."""

_MAX_PENDING = 1024
"""Proposals whose trial may still arrive."""


class QLearningSearch(Strategy):
    """Mutates the best schedules by the decisions with the highest learned value.

    Args:
        space: Search space.
        rng: Random generator.
        num_starts: Number of best schedules to start from.
        temperature: Initial temperature.
        cooling: Factor on the temperature after each trial.
        exploration: Fraction of random actions.
        learning_rate: Weight of a new reward in a value.
        discount: Weight of later rewards.
    """

    def __init__(
        self,
        space: ScheduleSpace,
        rng: np.random.Generator,
        *,
        num_starts: int = 16,
        temperature: float = 0.2,
        cooling: float = 0.99,
        exploration: float = 0.35,
        learning_rate: float = 0.1,
        discount: float = 0.3,
    ) -> None:
        super().__init__(space, rng)
        self._num_starts, self._temperature, self._cooling = num_starts, temperature, cooling
        self._exploration, self._learning_rate, self._discount = exploration, learning_rate, discount
        self._axes = space.operator.axes
        self._best: list[Trial] = []
        self._values: dict[tuple[State | None, str], float] = {}
        self._pending: dict[Schedule, Trial] = {}
        self._observed: set[Schedule] = set()

    def propose(self) -> Schedule:
        if not self._best:
            return self.space.sample(self.rng)
        start = self._sample_start()
        candidates: dict[str, Schedule] = {}
        for _ in range(_NUM_CANDIDATES):
            child = self.space.mutate(start.schedule, self.rng)
            if child not in self._observed:
                candidates.setdefault(find_first_change(start.schedule, child, self._axes), child)
        if not candidates:
            return self.space.sample(self.rng)
        actions = list(candidates)
        if self.rng.random() < self._exploration:
            action = actions[int(self.rng.integers(len(actions)))]
        else:
            state = compute_state(start.schedule, self._axes)
            action = max(actions, key=lambda item: self._get_value(state, item))
        child = candidates[action]
        # Inserted as the latest proposal, because the oldest one is removed first.
        self._pending.pop(child, None)
        self._pending[child] = start
        if len(self._pending) > _MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        return child

    def observe(self, trial: Trial) -> None:
        self._temperature *= self._cooling
        self._observed.add(trial.schedule)
        start = self._pending.pop(trial.schedule, None)
        if start is not None:
            self._update_values(start, trial)
        if trial.error is None:
            self._best = sorted([*self._best, trial], key=lambda item: item.ratio)[: self._num_starts]

    def _sample_start(self) -> Trial:
        best_cost = math.log(self._best[0].ratio)
        temperature = max(self._temperature, 1e-9)
        weights = np.array(
            [math.exp((best_cost - math.log(trial.ratio)) / temperature) for trial in self._best]
        )
        return self._best[int(self.rng.choice(len(weights), p=weights / weights.sum()))]

    def _update_values(self, start: Trial, end: Trial) -> None:
        reward, next_value = -_MAX_REWARD, 0.0
        if end.error is None:
            gain = math.log(start.ratio) - math.log(end.ratio)
            reward = min(max(gain, -_MAX_REWARD), _MAX_REWARD)
            state = compute_state(end.schedule, self._axes)
            next_value = max(
                (value for (value_state, _), value in self._values.items() if value_state == state),
                default=0.0,
            )
        target = reward + self._discount * max(next_value, 0.0)
        action = find_first_change(start.schedule, end.schedule, self._axes)
        for state in (compute_state(start.schedule, self._axes), None):
            value = self._get_value(state, action)
            self._values[state, action] = value + self._learning_rate * (target - value)

    def _get_value(self, state: State | None, action: str) -> float:
        fallback = self._values.get((None, action), _INITIAL_VALUE)
        return self._values.get((state, action), fallback)


def compute_state(schedule: Schedule, axes: Sequence[str]) -> State:
    """Compute the coarse state of a schedule."""
    return (
        *(len(schedule.sub_axes(axis)) > 1 for axis in axes),
        schedule.vectorize is not None,
        schedule.parallel == schedule.lreorder[0],
    )


def find_first_change(before: Schedule, after: Schedule, axes: Sequence[str]) -> str:
    """Return the first decision in which two schedules differ, as `ScheduleSpace` orders them; "" if none."""
    for axis in axes:
        if before.sub_axes(axis) != after.sub_axes(axis):
            return f"split {axis}"
    for decision, differs in (
        ("order", before.formats[0].order != after.formats[0].order),
        ("modes", before.formats != after.formats),
        ("loops", before.lreorder != after.lreorder),
        ("parallel", before.parallel != after.parallel),
        ("vectorize", before.vectorize != after.vectorize),
        ("unroll", (before.unroll, before.unroll_factor) != (after.unroll, after.unroll_factor)),
        ("threads", before.threads != after.threads),
        ("chunk", before.chunk != after.chunk),
    ):
        if differs:
            return decision
    return ""
