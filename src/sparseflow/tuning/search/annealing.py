"""Simulated annealing: a walk that takes worse steps ever more rarely (Kirkpatrick et al., Science 1983)."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import Space
from sparseflow.tuning.search.base import Strategy


class Annealing(Strategy):
    """Walks from neighbour to neighbour; a step to one that takes `d` times as long is taken with d^(-1/t).

    Args:
        space: What it may propose.
        rng: What it draws from.
        warmth: t at the beginning.
        cooling: What t is multiplied by at each measurement that is told.
        patience: Measurements without a new best after which the walk goes on from the best.
    """

    name: ClassVar[str] = "annealing"

    def __init__(
        self,
        space: Space,
        rng: np.random.Generator,
        *,
        warmth: float = 0.5,
        cooling: float = 0.99,
        patience: int = 40,
    ) -> None:
        super().__init__(space, rng)
        self._warmth, self._cooling, self._patience = warmth, cooling, patience
        self._here: Trial | None = None
        self._best: Trial | None = None
        self._since = 0

    def ask(self) -> Schedule:
        if self._here is None:
            return self.space.sample(self.rng)
        return self.space.mutate(self._here.schedule, self.rng)

    def tell(self, trial: Trial) -> None:
        self._warmth *= self._cooling
        if trial.error is not None:
            return
        self._since += 1
        if self._best is None or trial.ratio < self._best.ratio:
            self._best, self._since = trial, 0
        if self._here is None or self._taken(trial.ratio / self._here.ratio):
            self._here = trial
        if self._since >= self._patience:
            self._here, self._since = self._best, 0

    def _taken(self, slower: float) -> bool:
        if slower <= 1.0:
            return True
        return self.rng.random() < math.exp(-math.log(slower) / max(self._warmth, 1e-9))
