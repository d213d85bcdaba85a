"""What an engine has done and how busy it is, for whoever asks from whichever thread."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

BUSY_S = 2.0
"""Time constant of the load: what was longer ago than this hardly counts."""

_DOUBT = 2.0
"""Requests' worth that the share of busy time counts in the load, beside what requests met."""

_MISSED = 8.0
"""Requests that would have come by now, had they gone on to come as they did: after so many, those that came
begin to say little of the load."""

RATE_S = 5.0
"""Over how long tokens a second are counted."""


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """An engine at one moment.

    Attributes:
        queued: Requests that wait.
        running: Requests that decode.
        slots: Most requests that may.
        oldest_wait_ms: How long the oldest of those that wait has waited since its receipt.
        load: Share of the last seconds' requests that met the engine at work for others, 0 to 1; where few
            came, share of the time in which it worked. At random arrivals both are the same, but who sends
            one request after the other is alone however busy that keeps the engine.
        tokens_per_s: Generated, over the last seconds.
        submitted: Requests handed in so far.
        ended: Outcome -> requests, of "finished", "refused", "cancelled", "failed",
            "stopped".
        tokens: Generated so far.
        plans: Id of a plan -> requests that began to decode under it.
        batches: Id of what of a plan matters in decoding -> requests that decode under it now.
        cache_bytes: Memory of keys and values.
        recorded: Steps and prompts that are played as recordings.
        unrecorded: Why others are not.
        healthy: Whether the engine works.
    """

    queued: int
    running: int
    slots: int
    oldest_wait_ms: float
    load: float
    tokens_per_s: float
    submitted: int
    ended: Mapping[str, int]
    tokens: int
    plans: Mapping[str, int]
    batches: Mapping[str, int]
    cache_bytes: int
    recorded: int
    unrecorded: tuple[str, ...]
    healthy: bool


@dataclass(kw_only=True)
class EngineMetrics:
    """Counters of an engine.

    Attributes:
        clock: Seconds.
        worked_s: Spent working so far.
    """

    clock: Callable[[], float] = time.perf_counter
    submitted: int = 0
    tokens: int = 0
    worked_s: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    plans: Counter[str] = field(default_factory=Counter)
    _load: float = 0.0
    _seen_s: float | None = None
    _came: float = 0.0
    _met: float = 0.0
    _came_s: float | None = None
    _first_s: float = math.inf
    _recent: deque[tuple[float, int]] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def spent(self, busy: bool) -> None:
        """The time since the last call was spent working, or waiting."""
        with self._lock:
            now = self.clock()
            self._load = self._at(now, busy)
            if busy and self._seen_s is not None:
                self.worked_s += now - self._seen_s
            self._seen_s = now

    def arrived(self, *, busy: bool) -> None:
        """A request came, and the engine was at work for others or not."""
        with self._lock:
            now = self.clock()
            kept = self._kept(now)
            self._came, self._met, self._came_s = self._came * kept + 1.0, self._met * kept + busy, now

    def generated(self, count: int) -> None:
        """Tokens were generated."""
        with self._lock:
            now = self.clock()
            self._first_s = min(self._first_s, now)
            self.tokens += count
            self._recent.append((now, count))
            self._prune(now)

    def load(self, *, busy: bool) -> float:
        """The load now; `busy` says what has been going on since the last call of `spent`."""
        with self._lock:
            now = self.clock()
            kept = self._kept(now)
            share = self._at(now, busy)
            return (self._met * kept + _DOUBT * share) / (self._came * kept + _DOUBT)

    def tokens_per_s(self) -> float:
        """Over the last seconds."""
        with self._lock:
            now = self.clock()
            self._prune(now)
            # Soon after the first tokens there are no such many seconds yet.
            span = min(RATE_S, max(now - self._first_s, 1e-3))
            return sum(count for _, count in self._recent) / span

    def _kept(self, now: float) -> float:
        """What those that came still count; soon nothing where they stop coming, as where all are refused."""
        if self._came_s is None:
            return 0.0
        passed = max(0.0, now - self._came_s) / BUSY_S
        # So many came within the time constant.
        missed = max(0.0, passed * self._came - _MISSED) / _MISSED
        return math.exp(-passed - missed)

    def _at(self, now: float, busy: bool) -> float:
        passed = 0.0 if self._seen_s is None else max(0.0, now - self._seen_s)
        kept = math.exp(-passed / BUSY_S)
        return self._load * kept + (1.0 - kept) * busy

    def _prune(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - RATE_S:
            self._recent.popleft()
