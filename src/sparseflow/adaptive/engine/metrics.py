"""Counters and utilization of an engine, readable from any thread."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

BUSY_S = 2.0
"""Time constant of the utilization."""

_BUSY_TIME_WEIGHT = 2.0
"""Weight of the busy time fraction in the utilization, in requests."""

_MAX_MISSED = 8.0
"""Expected arrivals without an arrival after which past arrivals lose weight."""


@dataclass(frozen=True, kw_only=True)
class EngineSnapshot:
    """State of an engine at one time.

    Attributes:
        queued: Waiting requests.
        running: Decoding requests.
        slots: Maximum number of decoding requests.
        load: Utilization: fraction of recent requests that found the engine busy with others, 0 to 1; with
            few requests, fraction of busy time. Both agree for random arrivals, but a client that sends one
            request after another does not count as load for itself.
        submitted: Requests submitted.
        ended: Outcome -> requests: "finished", "refused", "cancelled", "failed", "stopped".
        batches: Decode plan id -> requests that decode now.
        cache_bytes: Size of the key-value caches.
        captured: Captured CUDA graphs.
        uncaptured: Reasons of failed captures.
        healthy: Whether the engine works.
    """

    queued: int
    running: int
    slots: int
    load: float
    submitted: int
    ended: Mapping[str, int]
    batches: Mapping[str, int]
    cache_bytes: int
    captured: int
    uncaptured: tuple[str, ...]
    healthy: bool


@dataclass(kw_only=True)
class EngineMetrics:
    """Counters of an engine.

    Attributes:
        clock: Current time in seconds.
        busy_s: Total busy time.
    """

    clock: Callable[[], float] = time.perf_counter
    submitted: int = 0
    busy_s: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    _utilization: float = 0.0
    _last_time_s: float | None = None
    _arrivals: float = 0.0
    _busy_arrivals: float = 0.0
    _last_arrival_s: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record_time(self, busy: bool) -> None:
        """Count the time since the last call as busy or idle."""
        with self._lock:
            time_s = self.clock()
            self._utilization = self._utilization_at(time_s, busy)
            if busy and self._last_time_s is not None:
                self.busy_s += time_s - self._last_time_s
            self._last_time_s = time_s

    def record_arrival(self, *, busy: bool) -> None:
        """Count a request and whether it found the engine busy."""
        with self._lock:
            time_s = self.clock()
            decay = self._arrival_decay(time_s)
            self._arrivals = self._arrivals * decay + 1.0
            self._busy_arrivals = self._busy_arrivals * decay + busy
            self._last_arrival_s = time_s

    def load(self, *, busy: bool) -> float:
        """Current utilization; `busy` is the state since the last `record_time`."""
        with self._lock:
            time_s = self.clock()
            decay = self._arrival_decay(time_s)
            share = self._utilization_at(time_s, busy)
            return (self._busy_arrivals * decay + _BUSY_TIME_WEIGHT * share) / (
                self._arrivals * decay + _BUSY_TIME_WEIGHT
            )

    def _arrival_decay(self, time_s: float) -> float:
        """Weight of past arrivals; vanishes soon when arrivals stop, for example because all are refused."""
        if self._last_arrival_s is None:
            return 0.0
        passed = max(0.0, time_s - self._last_arrival_s) / BUSY_S
        # Expected arrivals within the time constant.
        missed = max(0.0, passed * self._arrivals - _MAX_MISSED) / _MAX_MISSED
        return math.exp(-passed - missed)

    def _utilization_at(self, time_s: float, busy: bool) -> float:
        elapsed_s = 0.0 if self._last_time_s is None else max(0.0, time_s - self._last_time_s)
        decay = math.exp(-elapsed_s / BUSY_S)
        return self._utilization * decay + (1.0 - decay) * busy
