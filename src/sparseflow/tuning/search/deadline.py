"""Time limit that the phases of a tuning session share."""

from __future__ import annotations

import time


class Deadline:
    """Time limit of a session, which starts with the creation.

    Args:
        budget_s: Time limit, seconds; may be infinite.
    """

    def __init__(self, budget_s: float) -> None:
        self.budget_s = budget_s
        self._start_s = time.monotonic()
        self._end_s = self._start_s + budget_s

    @property
    def elapsed_s(self) -> float:
        """Time since the creation, seconds."""
        return time.monotonic() - self._start_s

    @property
    def remaining_s(self) -> float:
        """Time until the deadline, seconds; at least 0."""
        return max(self._end_s - time.monotonic(), 0.0)

    def allows(self, cost_s: float) -> bool:
        """Return whether work that takes `cost_s` seconds ends before the deadline."""
        return cost_s <= self.remaining_s

    def shorten(self, remaining_s: float) -> None:
        """Move the deadline forward so that at most `remaining_s` seconds remain."""
        self._end_s = min(self._end_s, time.monotonic() + remaining_s)
