"""Interface of search strategies, and random search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule


class SearchSpace(Protocol):
    """Schedules that a strategy proposes; see `ScheduleSpace`."""

    def sample(self, rng: np.random.Generator) -> Schedule:
        """Sample a schedule."""
        ...

    def mutate(self, schedule: Schedule, rng: np.random.Generator) -> Schedule:
        """Change a schedule."""
        ...

    def crossover(self, a: Schedule, b: Schedule, rng: np.random.Generator) -> Schedule:
        """Combine two schedules."""
        ...


class Strategy(ABC):
    """A search strategy.

    Callers use `propose` and `observe` in any order and number. Trials may be of schedules that were not
    proposed, such as baselines, and proposed schedules may never be measured. Trials may be failures, whose
    `ratio` is infinite.

    Args:
        space: Search space.
        rng: Random generator, the only source of randomness.
    """

    def __init__(self, space: SearchSpace, rng: np.random.Generator) -> None:
        self.space = space
        self.rng = rng

    @abstractmethod
    def propose(self) -> Schedule:
        """Propose a schedule of the space, possibly again."""

    @abstractmethod
    def observe(self, trial: Trial) -> None:
        """Learn from a trial; smaller `ratio` is better."""


class RandomSearch(Strategy):
    """Proposes independent samples of the space."""

    def propose(self) -> Schedule:
        return self.space.sample(self.rng)

    def observe(self, trial: Trial) -> None:
        pass
