"""Searches whose proposals are screened by a cost model, to reduce measurements.

A model ranks a thousand schedules in the time of one measurement. Another strategy gives many proposals, the
best are mutated further without measurements (as in Ansor, Zheng et al., OSDI 2020), and the best few are
measured. The model and the strategy both observe the trials.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.model.cost_model import CostModel
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search.base import Strategy

_NUM_PARENTS = 32
"""Schedules that are mutated in each generation."""

_CHILDREN_PER_PARENT = 3

_NUM_RESERVE = 64
"""Best schedules that were not measured and are ranked again in the next screening."""


class GuidedSearch(Strategy):
    """Proposes the schedules of another strategy that a cost model ranks highest.

    Args:
        strategy: The other strategy; its space and random generator are used.
        model: Cost model.
        num_proposals: Proposals of the other strategy in each screening.
        num_generations: Rounds of mutations of the best schedules.
        batch_size: Schedules between screenings. The schedules of a batch differ in storage or loops, so that
            they do not all fail for the same reason.
        exploration: Fraction of the batch that is replaced by random proposals of the other strategy.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: CostModel,
        *,
        num_proposals: int = 128,
        num_generations: int = 4,
        batch_size: int = 4,
        exploration: float = 0.1,
    ) -> None:
        super().__init__(strategy.space, strategy.rng)
        self._strategy, self._model = strategy, model
        self._num_proposals, self._num_generations = num_proposals, num_generations
        self._batch_size, self._exploration = batch_size, exploration
        self._visited: set[Schedule] = set()
        self._queue: list[Schedule] = []
        self._is_exhausted = False
        self._reserve: list[Schedule] = []

    def propose(self) -> Schedule:
        if not self._queue and not self._is_exhausted:
            self._queue = self._screen()
            self._is_exhausted = not self._queue
        # Without new schedules the other strategy may repeat itself.
        return self._queue.pop(0) if self._queue else self._strategy.propose()

    def observe(self, trial: Trial) -> None:
        self._visited.add(trial.schedule)
        self._is_exhausted = False
        self._model.observe([trial])
        self._strategy.observe(trial)

    def _screen(self) -> list[Schedule]:
        proposals = self._filter_new(self._strategy.propose() for _ in range(self._num_proposals))
        ranked = self._rank(dict.fromkeys([*proposals, *self._filter_new(self._reserve)]))
        for _ in range(self._num_generations):
            children = self._filter_new(
                self.space.mutate(parent, self.rng)
                for parent in ranked[:_NUM_PARENTS]
                for _ in range(_CHILDREN_PER_PARENT)
            )
            ranked = self._rank(dict.fromkeys([*ranked, *children]))
        selected = _select_diverse(ranked, self._batch_size)
        for index in range(len(selected)):
            if proposals and self.rng.random() < self._exploration:
                candidate = proposals[int(self.rng.integers(len(proposals)))]
                if candidate not in selected:
                    selected[index] = candidate
        self._visited.update(selected)
        self._reserve = self._filter_new(ranked)[:_NUM_RESERVE]
        return selected

    def _filter_new(self, schedules: Iterable[Schedule]) -> list[Schedule]:
        return [schedule for schedule in dict.fromkeys(schedules) if schedule not in self._visited]

    def _rank(self, schedules: Iterable[Schedule]) -> list[Schedule]:
        """Sort schedules by score, best first."""
        pool = list(schedules)
        if not pool:
            return pool
        order = np.argsort(-self._model.score(pool), kind="stable")
        return [pool[int(index)] for index in order]


def _select_diverse(ranked: Sequence[Schedule], count: int) -> list[Schedule]:
    """Select the best schedules that differ in storage or loops, similar ones only if needed."""
    structures: dict[object, Schedule] = {}
    for schedule in ranked:
        structures.setdefault(
            (schedule.fsplit, schedule.formats, schedule.lsplit, schedule.lreorder), schedule
        )
    return list(dict.fromkeys([*[*structures.values()][:count], *ranked[:count]]))[:count]
