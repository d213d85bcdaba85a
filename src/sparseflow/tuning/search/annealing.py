"""Simulated annealing (Kirkpatrick et al., Science 1983)."""

from __future__ import annotations

import math

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace
from sparseflow.tuning.search.base import Strategy


class SimulatedAnnealing(Strategy):
    """Random walk over mutations that accepts a slowdown by factor d with probability d^(-1/temperature).

    Args:
        space: Search space.
        rng: Random generator.
        temperature: Initial temperature.
        cooling: Factor on the temperature after each trial.
        patience: Trials without a new best after which the walk returns to the best.
    """

    def __init__(
        self,
        space: ScheduleSpace,
        rng: np.random.Generator,
        *,
        temperature: float = 0.5,
        cooling: float = 0.99,
        patience: int = 40,
    ) -> None:
        super().__init__(space, rng)
        self._temperature, self._cooling, self._patience = temperature, cooling, patience
        self._current: Trial | None = None
        self._best: Trial | None = None
        self._num_since_best = 0

    def propose(self) -> Schedule:
        if self._current is None:
            return self.space.sample(self.rng)
        return self.space.mutate(self._current.schedule, self.rng)

    def observe(self, trial: Trial) -> None:
        self._temperature *= self._cooling
        if trial.error is not None:
            return
        self._num_since_best += 1
        if self._best is None or trial.ratio < self._best.ratio:
            self._best, self._num_since_best = trial, 0
        if self._current is None or self._accepts(trial.ratio / self._current.ratio):
            self._current = trial
        if self._num_since_best >= self._patience:
            self._current, self._num_since_best = self._best, 0

    def _accepts(self, slowdown: float) -> bool:
        if slowdown <= 1.0:
            return True
        return self.rng.random() < math.exp(-math.log(slowdown) / max(self._temperature, 1e-9))
