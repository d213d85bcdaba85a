"""Interface of search strategies, and random search."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace


class Strategy(ABC):
    """A search strategy.

    Callers use `propose` and `observe` in any order and number. Trials may be of schedules that were not
    proposed, such as baselines, and proposed schedules may never be measured. Trials may be failures, whose
    `ratio` is infinite.

    Args:
        space: Search space.
        rng: Random generator, the only source of randomness.
    """

    def __init__(self, space: ScheduleSpace, rng: np.random.Generator) -> None:
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
