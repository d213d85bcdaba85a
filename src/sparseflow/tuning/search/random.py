"""Random search."""

from __future__ import annotations

from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search.base import Strategy


class RandomSearch(Strategy):
    """Proposes independent samples of the space."""

    def propose(self) -> Schedule:
        return self.space.sample(self.rng)

    def observe(self, trial: Trial) -> None:
        pass
