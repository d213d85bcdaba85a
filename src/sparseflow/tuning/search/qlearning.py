"""Q-learning with simulated annealing: learns which decision to change next, and from which schedule on.

After FlexTensor (Zheng et al., ASPLOS 2020), which AutoSparse's search follows as well:

- *Where from*: one of the best schedules so far, drawn with the weight that annealing would take a step to it
  with: (its cost / the least cost)^(-1/t), with t cooling down.
- *Which way*: an action is a decision that the next schedule makes differently: a split, the storage order,
  the loops, …. What an action is worth, Q(action | state), is learned for each coarse state: which axes are
  split, whether the innermost loop is vectors, and whether the outermost one is shared. Mostly the best is
  taken, and now and then any.
- *What is learned*: the reward r is log(cost before / cost after), and with s' for where that led::

      Q(a | s) ← Q(a | s) + rate (r + discount max(0, max Q(· | s')) − Q(a | s))

  In a state without a value of its own, an action is worth what it was worth in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import Space
from sparseflow.tuning.search.base import Strategy

State = tuple[bool, ...]

_OFFERS = 4
"""Neighbours that are drawn for the best action to be chosen among theirs."""

_HOPE = 0.5
"""What an action is worth before it was tried: more than most turn out to be, so that all are."""

_MOST_REWARD = 2.0
"""A change to a schedule `e` squared times as fast or slow; failures count as that slow."""

_REMEMBERED = 1024
"""Proposals that an answer may still come to."""


class QLearning(Strategy):
    """Changes the decisions that changing paid off, in the best schedules so far.

    Args:
        space: What it may propose.
        rng: What it draws from.
        starts: How many of the best schedules it may go on from.
        warmth: t at the beginning.
        cooling: What t is multiplied by at each measurement that is told.
        explore: Share of proposals that take any action.
        rate: How much of a value the newest reward replaces.
        discount: What rewards that follow count for.
    """

    name: ClassVar[str] = "qlearning"

    def __init__(
        self,
        space: Space,
        rng: np.random.Generator,
        *,
        starts: int = 16,
        warmth: float = 0.2,
        cooling: float = 0.99,
        explore: float = 0.35,
        rate: float = 0.1,
        discount: float = 0.3,
    ) -> None:
        super().__init__(space, rng)
        self._most, self._warmth, self._cooling = starts, warmth, cooling
        self._explore, self._rate, self._discount = explore, rate, discount
        self._axes = space.operator.axes
        self._best: list[Trial] = []
        self._values: dict[tuple[State | None, str], float] = {}
        self._asked: dict[Schedule, Trial] = {}
        self._told: set[Schedule] = set()

    def ask(self) -> Schedule:
        if not self._best:
            return self.space.sample(self.rng)
        start = self._start()
        offers: dict[str, Schedule] = {}
        for _ in range(_OFFERS):
            child = self.space.mutate(start.schedule, self.rng)
            if child not in self._told:
                offers.setdefault(changed(start.schedule, child, self._axes), child)
        if not offers:
            return self.space.sample(self.rng)
        actions = list(offers)
        if self.rng.random() < self._explore:
            action = actions[int(self.rng.integers(len(actions)))]
        else:
            state = coarse(start.schedule, self._axes)
            action = max(actions, key=lambda one: self._value(state, one))
        child = offers[action]
        self._asked.pop(child, None)
        self._asked[child] = start
        if len(self._asked) > _REMEMBERED:
            del self._asked[next(iter(self._asked))]
        return child

    def tell(self, trial: Trial) -> None:
        self._warmth *= self._cooling
        self._told.add(trial.schedule)
        start = self._asked.pop(trial.schedule, None)
        if start is not None:
            self._learn(start, trial)
        if trial.error is None:
            self._best = sorted([*self._best, trial], key=lambda one: one.ratio)[: self._most]

    def _start(self) -> Trial:
        least = math.log(self._best[0].ratio)
        warmth = max(self._warmth, 1e-9)
        weights = np.array([math.exp((least - math.log(one.ratio)) / warmth) for one in self._best])
        return self._best[int(self.rng.choice(len(weights), p=weights / weights.sum()))]

    def _learn(self, start: Trial, end: Trial) -> None:
        reward, then = -_MOST_REWARD, 0.0
        if end.error is None:
            gain = math.log(start.ratio) - math.log(end.ratio)
            reward = min(max(gain, -_MOST_REWARD), _MOST_REWARD)
            state = coarse(end.schedule, self._axes)
            then = max((value for (of, _), value in self._values.items() if of == state), default=0.0)
        target = reward + self._discount * max(then, 0.0)
        action = changed(start.schedule, end.schedule, self._axes)
        for state in (coarse(start.schedule, self._axes), None):
            value = self._value(state, action)
            self._values[state, action] = value + self._rate * (target - value)

    def _value(self, state: State | None, action: str) -> float:
        fallback = self._values.get((None, action), _HOPE)
        return self._values.get((state, action), fallback)


def coarse(schedule: Schedule, axes: Sequence[str]) -> State:
    """The state of a schedule: what it has in common with others that changes act on alike."""
    return (
        *(len(schedule.sub_axes(axis)) > 1 for axis in axes),
        schedule.vectorize is not None,
        schedule.parallel == schedule.lreorder[0],
    )


def changed(before: Schedule, after: Schedule, axes: Sequence[str]) -> str:
    """The first decision in which two schedules differ, as `Space` takes them; the others follow from it.

    Empty where they are the same.
    """
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
