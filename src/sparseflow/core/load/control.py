"""From the share a stressor got to the share of its time in which it should work.

Notation: r the level asked for, y the share achieved in the last cycle, u the duty, all in [0, 1]. ::

    e = r - y        I <- I + k_i e        u = clip(r + k_p e + I, 0, 1)

The plant answers within one cycle with a gain near 1, so u starts at r and the integral only learns what
cycles lose. It is not fed while u is at an end and e pushes further out: it would take as long to come back.
"""

from __future__ import annotations

K_P = 0.1
K_I = 0.2
MOST_LEARNT = 0.5
"""Largest correction: further off the device is not ours, and the caller shall hear of that."""


class DutyController:
    """A PI controller of one worker's duty.

    Args:
        level: Share asked for, in [0, 1].
    """

    def __init__(self, level: float) -> None:
        self.held = False
        self.set_level(level)

    def set_level(self, level: float) -> None:
        """Ask for another share; what was learnt about the last one is forgotten."""
        self.level = level
        self.duty = level
        self._learnt = 0.0

    def update(self, achieved: float) -> None:
        """Take in what the last cycle achieved. While `held`, the duty stays as it is."""
        # Nothing and everything need no learning, and must be exact.
        if self.held or self.level in (0.0, 1.0):
            return
        error = self.level - achieved
        outward = (self.duty >= 1.0 and error > 0.0) or (self.duty <= 0.0 and error < 0.0)
        if not outward:
            self._learnt = min(max(self._learnt + K_I * error, -MOST_LEARNT), MOST_LEARNT)
        self.duty = min(max(self.level + K_P * error + self._learnt, 0.0), 1.0)
