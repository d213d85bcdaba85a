"""Ramp schedule of the hardware-loss weight, set to 0 when accuracy drops.

The weight is 0 during warmup, increases linearly, and then stays constant. The reference accuracy is that of
the last warmup epoch. When accuracy falls more than `epsilon` below it, the weight is 0 and discrete
decisions are frozen until accuracy has been within tolerance for `good_epochs` consecutive epochs; then the
schedule continues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from sparseflow.codesign.design.config import HwLossSchedule
from sparseflow.core.checks import check_between
from sparseflow.errors import InputError


class AccuracyGuard:
    """Tracks accuracy and controls the hardware-loss weight.

    Args:
        schedule: Schedule of the weight.

    Attributes:
        reference: Reference accuracy; None during warmup.
        frozen: Whether accuracy is too low, so that the weight is 0 and decisions are frozen.
        num_good_epochs: Consecutive epochs within tolerance since then.
        epoch: Number of completed epochs.
    """

    def __init__(self, schedule: HwLossSchedule) -> None:
        self.schedule = schedule
        self.reference: float | None = None
        self.frozen = False
        self.num_good_epochs = self.epoch = 0

    @property
    def weight(self) -> float:
        """Hardware-loss weight of the next epoch."""
        if self.reference is None or self.frozen:
            return 0.0
        ramp_step = self.epoch - self.schedule.warmup_epochs + 1
        return self.schedule.max_weight * min(1.0, ramp_step / max(1, self.schedule.ramp_epochs))

    @property
    def allows_decisions(self) -> bool:
        """Whether chips, mapping, layout and splits may change."""
        return self.reference is not None and not self.frozen

    def update(self, accuracy: float) -> None:
        """Record the accuracy of an epoch, from 0 to 1.

        Raises:
            InputError: The accuracy is out of range.
        """
        check_between(0.0, 1.0, accuracy=accuracy)
        self.epoch += 1
        if self.reference is None:
            if self.epoch >= self.schedule.warmup_epochs:
                self.reference = accuracy
            return
        if accuracy < self.reference - self.schedule.epsilon:
            self.frozen, self.num_good_epochs = True, 0
        elif self.frozen:
            self.num_good_epochs += 1
            if self.num_good_epochs >= self.schedule.good_epochs:
                self.frozen = False

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`."""
        return {
            "schedule": asdict(self.schedule), "reference": self.reference, "frozen": self.frozen,
            "good": self.num_good_epochs, "epoch": self.epoch,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            InputError: The state belongs to another schedule.
        """
        if state.get("schedule") != asdict(self.schedule):
            raise InputError(
                f"the state belongs to the schedule {state.get('schedule')}; expected {asdict(self.schedule)}"
            )
        self.reference, self.frozen = state["reference"], bool(state["frozen"])
        self.num_good_epochs, self.epoch = int(state["good"]), int(state["epoch"])
