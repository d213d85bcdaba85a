"""Children of the best schedules so far: crossed with each other, changed in a decision or two."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import Space
from sparseflow.tuning.search.base import Strategy


class Evolutionary(Strategy):
    """Keeps the best `parents`; each proposal is a new draw, a mutant of one of them, or a child of two.

    Args:
        space: What it may propose.
        rng: What it draws from.
        parents: Schedules that may have children.
        fresh: Share of proposals that are drawn anew.
        crossed: Share of proposals that have two parents.
    """

    name: ClassVar[str] = "evolutionary"

    def __init__(
        self,
        space: Space,
        rng: np.random.Generator,
        *,
        parents: int = 16,
        fresh: float = 0.2,
        crossed: float = 0.2,
    ) -> None:
        super().__init__(space, rng)
        self._most, self._fresh, self._crossed = parents, fresh, crossed
        self._best: list[Trial] = []

    def ask(self) -> Schedule:
        draw = self.rng.random()
        if not self._best or draw < self._fresh:
            return self.space.sample(self.rng)
        if draw < self._fresh + self._crossed and len(self._best) > 1:
            return self.space.crossover(self._parent(), self._parent(), self.rng)
        child = self.space.mutate(self._parent(), self.rng)
        return self.space.mutate(child, self.rng) if self.rng.random() < 0.3 else child

    def tell(self, trial: Trial) -> None:
        if trial.error is None:
            self._best = sorted([*self._best, trial], key=lambda one: one.ratio)[: self._most]

    def _parent(self) -> Schedule:
        """The better of two, so that the best has most children."""
        places = self.rng.integers(len(self._best), size=2)
        return self._best[int(places.min())].schedule
