"""How hard the hardware may pull: a schedule for its weight, and a guard of accuracy that lets go of it.

The weight of the hardware loss is 0 for some epochs, in which accuracy settles, rises over some more and then
stays. The reference accuracy is fixed once, when the first rise begins. Whenever accuracy falls by more than
`epsilon` below it, the weight is 0 and discrete decisions are frozen, until accuracy has been good for
`good_epochs` epochs in a row; then the weight goes on where the schedule is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparseflow.codesign.design.config import Schedule
from sparseflow.errors import InputError


class AccuracyGuard:
    """Follows accuracy epoch by epoch.

    Args:
        schedule: When the hardware loss counts.

    Attributes:
        reference: Accuracy that is defended; None before it is fixed.
        frozen: Whether accuracy is too low: the weight is 0 and nothing discrete may change.
        good: Good epochs in a row since it was.
        epoch: Epochs seen.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.reference: float | None = None
        self.frozen = False
        self.good = self.epoch = 0

    @property
    def weight(self) -> float:
        """Of the hardware loss, in the epoch to come."""
        if self.reference is None or self.frozen:
            return 0.0
        done = self.epoch - self.schedule.settle + 1
        return self.schedule.most * min(1.0, done / max(1, self.schedule.ramp))

    @property
    def may_decide(self) -> bool:
        """Whether chips, mapping, layout and splits may change now."""
        return self.reference is not None and not self.frozen

    def update(self, accuracy: float) -> None:
        """Take in an epoch's accuracy, from 0 to 1.

        Raises:
            InputError: It is not a number from 0 to 1.
        """
        if not 0.0 <= accuracy <= 1.0:
            raise InputError(f"accuracy (={accuracy}) must be from 0 to 1")
        self.epoch += 1
        if self.reference is None:
            if self.epoch >= self.schedule.settle:
                self.reference = accuracy
            return
        if accuracy < self.reference - self.schedule.epsilon:
            self.frozen, self.good = True, 0
        elif self.frozen:
            self.good += 1
            if self.good >= self.schedule.good_epochs:
                self.frozen = False

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {
            "schedule": asdict(self.schedule), "reference": self.reference, "frozen": self.frozen,
            "good": self.good, "epoch": self.epoch,
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            InputError: It is of a guard with another schedule, or none.
        """
        if state.get("schedule") != asdict(self.schedule):
            raise InputError(
                f"the state is of a guard with the schedule {state.get('schedule')}; this one has "
                f"{asdict(self.schedule)}"
            )
        self.reference, self.frozen = state["reference"], bool(state["frozen"])
        self.good, self.epoch = int(state["good"]), int(state["epoch"])
