"""The interface of a search: it is asked for a schedule, and told what came of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import Space


class Strategy(ABC):
    """A way to search.

    Whoever runs it calls `ask` and `tell` in any order and number: schedules that it never asked for, such as
    baselines, are told too, and one that it asked for may never be told. It must not mind being told of
    failures, whose `ratio` is infinite.

    Args:
        space: What it may propose.
        rng: What it draws from; nothing else may make it act differently.
    """

    name: ClassVar[str]

    def __init__(self, space: Space, rng: np.random.Generator) -> None:
        self.space = space
        self.rng = rng

    @abstractmethod
    def ask(self) -> Schedule:
        """A schedule of the space; the same may come again."""

    @abstractmethod
    def tell(self, trial: Trial) -> None:
        """What was measured; smaller `ratio` is better."""
