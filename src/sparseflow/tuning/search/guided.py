"""Searches whose proposals a cost model screens, so that few of them have to be measured.

Measuring is nearly all of what a search takes; a model ranks a thousand schedules in the time of one
measurement. So another strategy is asked for many proposals, the most promising are bred further without
measuring anything (after Ansor, Zheng et al., OSDI 2020), and few are passed on. The model and the strategy
are both told what came of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.model.cost_model import CostModel
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import Space
from sparseflow.tuning.search.annealing import Annealing
from sparseflow.tuning.search.base import Strategy
from sparseflow.tuning.search.evolutionary import Evolutionary
from sparseflow.tuning.search.qlearning import QLearning
from sparseflow.tuning.search.random import Random

GUIDED = "guided-"
"""What the name of a guided search begins with; the other strategy's follows."""

_PARENTS = 32
"""Schedules that a generation is bred from."""

_CHILDREN = 3
"""Of each of them."""

_KEPT = 64
"""Of the schedules that were not passed on, those that are ranked again next time."""


class Guided(Strategy):
    """Passes on what a model thinks fastest of another strategy's proposals.

    Args:
        space: What it may propose.
        rng: What it and the other strategy draw from.
        model: What ranks.
        proposals: Schedules that the other strategy is asked for at a time.
        generations: How often the best of them, as the model has it, are changed in a decision each.
        batch: Schedules that are passed on before they are ranked anew. No two of one batch are stored and
            looped over alike, so that they do not all fail by the same mistake.
        explore: Share of them that are any proposal of the other strategy, whatever the model thinks.
    """

    inner: ClassVar[type[Strategy]]

    def __init__(
        self,
        space: Space,
        rng: np.random.Generator,
        model: CostModel,
        *,
        proposals: int = 128,
        generations: int = 4,
        batch: int = 4,
        explore: float = 0.1,
    ) -> None:
        super().__init__(space, rng)
        self._model, self._inner = model, self.inner(space, rng)
        self._proposals, self._generations = proposals, generations
        self._batch, self._explore = batch, explore
        self._done: set[Schedule] = set()
        self._waiting: list[Schedule] = []
        self._left: list[Schedule] = []

    def ask(self) -> Schedule:
        if not self._waiting:
            self._waiting = self._screened()
        # Where nothing is new any more, the other strategy may repeat itself.
        return self._waiting.pop(0) if self._waiting else self._inner.ask()

    def tell(self, trial: Trial) -> None:
        self._done.add(trial.schedule)
        self._model.observe([trial])
        self._inner.tell(trial)

    def _screened(self) -> list[Schedule]:
        drawn = self._new(self._inner.ask() for _ in range(self._proposals))
        ranked = self._ranked(dict.fromkeys([*drawn, *self._new(self._left)]))
        for _ in range(self._generations):
            children = self._new(
                self.space.mutate(parent, self.rng) for parent in ranked[:_PARENTS] for _ in range(_CHILDREN)
            )
            ranked = self._ranked(dict.fromkeys([*ranked, *children]))
        chosen = _unlike(ranked, self._batch)
        for place in range(len(chosen)):
            if drawn and self.rng.random() < self._explore:
                any_one = drawn[int(self.rng.integers(len(drawn)))]
                if any_one not in chosen:
                    chosen[place] = any_one
        self._done.update(chosen)
        self._left = self._new(ranked)[:_KEPT]
        return chosen

    def _new(self, schedules: Iterable[Schedule]) -> list[Schedule]:
        return [each for each in dict.fromkeys(schedules) if each not in self._done]

    def _ranked(self, schedules: Iterable[Schedule]) -> list[Schedule]:
        """The best first."""
        pool = list(schedules)
        if not pool:
            return pool
        order = np.argsort(-self._model.scores(pool), kind="stable")
        return [pool[int(place)] for place in order]


def _unlike(ranked: Sequence[Schedule], count: int) -> list[Schedule]:
    """The best that differ in storage or loops; alike ones only if there are not so many."""
    unlike: dict[object, Schedule] = {}
    for each in ranked:
        unlike.setdefault((each.fsplit, each.formats, each.lsplit, each.lreorder), each)
    return list(dict.fromkeys([*[*unlike.values()][:count], *ranked[:count]]))[:count]


class GuidedRandom(Guided):
    """The best of independent draws."""

    name: ClassVar[str] = GUIDED + Random.name
    inner: ClassVar[type[Strategy]] = Random


class GuidedEvolutionary(Guided):
    """The best children of the best."""

    name: ClassVar[str] = GUIDED + Evolutionary.name
    inner: ClassVar[type[Strategy]] = Evolutionary


class GuidedAnnealing(Guided):
    """The best steps of a walk."""

    name: ClassVar[str] = GUIDED + Annealing.name
    inner: ClassVar[type[Strategy]] = Annealing


class GuidedQLearning(Guided):
    """The best changes of the decisions that changing paid off."""

    name: ClassVar[str] = GUIDED + QLearning.name
    inner: ClassVar[type[Strategy]] = QLearning
