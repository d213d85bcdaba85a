"""Schedules drawn by the space's own weights, one as independent of the others as the next."""

from __future__ import annotations

from typing import ClassVar

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search.base import Strategy


class Random(Strategy):
    """What every other way must beat."""

    name: ClassVar[str] = "random"

    def ask(self) -> Schedule:
        return self.space.sample(self.rng)

    def tell(self, trial: Trial) -> None:
        pass
