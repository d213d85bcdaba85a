"""Evolutionary search: mutation and crossover of the best schedules."""

from __future__ import annotations

from functools import partial

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search.base import SearchSpace, Strategy


class EvolutionarySearch(Strategy):
    """Proposes random schedules, mutants of the best schedules, or children of two of them.

    Args:
        space: Search space.
        rng: Random generator.
        num_parents: Number of best schedules that are parents.
        random_fraction: Fraction of random proposals.
        crossover_fraction: Fraction of proposals with two parents.
    """

    def __init__(
        self,
        space: SearchSpace,
        rng: np.random.Generator,
        *,
        num_parents: int = 16,
        random_fraction: float = 0.2,
        crossover_fraction: float = 0.2,
    ) -> None:
        super().__init__(space, rng)
        self._num_parents, self._random_fraction, self._crossover_fraction = (
            num_parents,
            random_fraction,
            crossover_fraction,
        )
        self._best: list[Trial] = []

    def propose(self) -> Schedule:
        draw = self.rng.random()
        if not self._best or draw < self._random_fraction:
            return self.space.sample(self.rng)
        if draw < self._random_fraction + self._crossover_fraction and len(self._best) > 1:
            return self.space.crossover(self._select_parent(), self._select_parent(), self.rng)
        child = self.space.mutate(self._select_parent(), self.rng)
        return self.space.mutate(child, self.rng) if self.rng.random() < 0.3 else child

    def observe(self, trial: Trial) -> None:
        if trial.error is None:
            self._best = sorted([*self._best, trial], key=lambda item: item.ratio)[: self._num_parents]

    def _select_parent(self) -> Schedule:
        """Select the better of two random parents."""
        ranks = self.rng.integers(len(self._best), size=2)
        return self._best[int(ranks.min())].schedule


COLLECTION_STRATEGY = partial(EvolutionarySearch, random_fraction=0.5)
"""Strategy of label collections: half random schedules, half mutants and children of the best."""
