"""Deadline-aware admission control.

A simulation of the queue decides about a request. It frees each slot at the expected end of its request and
assigns queued requests to slots in order of their deadlines, each with its cheapest plan. A request is
admitted with a guarantee if it is in time with its p99 service time, and without one if it is in time with
its median: an idle slot never refuses a request that it probably serves in time. A request that would be
late, or would make an admitted one late, is refused with a time after which a retry may succeed.

The ratio of actual to predicted service time corrects the simulation: an exponentially weighted mean plus
one standard deviation scales expected times, up to a multiple of the predicted median, and the excess of the
slowest recent requests, which decays within seconds, scales the p99 times.

Queued requests are sorted by deadline (earliest first). A request without a deadline is sorted as if its
deadline were `patience_s` after its arrival, so that it is not overtaken forever. When a request starts, it
gets a target end: its deadline, or an earlier time if the requests behind it need it. Plans get cheaper under
load because of these targets.

All times are in seconds of one monotonic clock; durations are in milliseconds. The classes are not
thread-safe and never block.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sparseflow.adaptive.prompts.messages import ApiError
from sparseflow.core.checks import check_at_least, check_positive

_EWMA_WEIGHT = 0.05
"""Weight of the latest request in the mean and deviation."""
_NUM_DEVIATIONS = 1.0
"""Standard deviations above the mean in expected times: requests ahead in the queue are rarely all slow."""
_MAX_RECENT = 128
"""Number of recent requests that determine the p99 correction."""
_HALF_LIFE_S = 10.0
"""Half-life of the p99 correction while no request completes, and of each recent excess."""
_MAX_MEDIANS = 1.5
"""Expected times are at most this multiple of the predicted median, so that stalls cannot inflate them."""
_BISECTION_STEPS = 8
"""Bisection steps of the search for a target end."""


@dataclass(eq=False, kw_only=True)
class Ticket:
    """Scheduling state of one request.

    Attributes:
        arrival_s: Arrival time.
        deadline_s: Latest completion time; infinite for best-effort requests.
        guaranteed: Whether the request was admitted with its p99 service time.
        min_service_ms: p99 service time of the cheapest plan, from start to last token.
        median_ms: Its median service time.
        start_s: Time at which the request got a slot; None while queued.
        target_end_s: Latest predicted end that keeps this request and those behind it feasible; infinite
            if nothing requires an end.
        predicted_end_s: Predicted end of a running request: an estimate until the caller sets the p99 of
            the selected plan.
        median_end_s: Median of the end of the selected plan; infinite until the caller sets it.
        sort_key: Position in the queue.
    """

    arrival_s: float
    deadline_s: float = math.inf
    guaranteed: bool = False
    min_service_ms: float = 0.0
    median_ms: float = 0.0
    start_s: float | None = None
    target_end_s: float = math.inf
    predicted_end_s: float = math.inf
    median_end_s: float = math.inf
    sort_key: tuple[float, int] = field(default=(math.inf, 0))

    @property
    def has_deadline(self) -> bool:
        """Whether the request has a deadline that admission considers."""
        return math.isfinite(self.deadline_s)


class AdmissionQueue:
    """Queued and running requests of one engine.

    Args:
        slots: Maximum number of running requests.
        max_queued: Maximum number of other requests, in preparation or queued.
        patience_s: Delay after which a request without a deadline is sorted as one with a deadline.
        clock: Monotonic clock, seconds.

    Raises:
        InputError: An argument is not positive.
    """

    def __init__(
        self,
        *,
        slots: int,
        max_queued: int,
        patience_s: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        check_at_least(1, slots=slots, max_queued=max_queued)
        check_positive(patience_s=patience_s)
        self.slots = slots
        self.max_queued = max_queued
        self.service_ms = 0.0
        """Mean service time, exponentially weighted."""
        self._patience_s = patience_s
        self._clock = clock
        self._tickets: set[Ticket] = set()
        self._waiting: list[Ticket] = []
        self._running: set[Ticket] = set()
        self._num_enqueued = 0
        self._updated_s = clock()
        self._mean_ratio = 1.0
        self._ratio_deviation = 0.0
        self._p99_excess = 0.0
        self._recent_excess: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether no request is running or queued."""
        return not self._running and not self._waiting

    @property
    def mean_correction(self) -> float:
        """Factor applied to predicted times in simulations: mean ratio plus one deviation."""
        return self._mean_ratio + _NUM_DEVIATIONS * self._ratio_deviation

    @property
    def p99_correction(self) -> float:
        """Factor (at least 1) applied to predicted p99 times; decays while no request completes."""
        return 1.0 + _decay(self._p99_excess, self._clock() - self._updated_s, _HALF_LIFE_S)

    def reserve(self) -> Ticket:
        """Reserve a place before the request is read.

        Raises:
            ApiError: 429 if all places are taken.
        """
        if len(self._tickets) >= self.slots + self.max_queued:
            retry_after_s = (self.service_ms or 1000.0) / 1000.0 * self.max_queued / self.slots / 2.0
            raise ApiError(
                429,
                f"the server is full: {self.running} requests are running and "
                f"{len(self._tickets) - self.running} are queued; retry later",
                code="overloaded", retry_after_s=retry_after_s,
            )  # fmt: skip
        ticket = Ticket(arrival_s=self._clock())
        self._tickets.add(ticket)
        return ticket

    def estimate_wait_ms(self, deadline_s: float = math.inf) -> float:
        """Return the expected queueing time of a new request with this deadline."""
        now_s = self._clock()
        sort_key = (self._effective_deadline(now_s, deadline_s), self._num_enqueued)
        probe = Ticket(arrival_s=now_s, deadline_s=deadline_s, sort_key=sort_key)
        queue = sorted([*self._waiting, probe], key=_get_sort_key)
        return 1000.0 * (self._simulate_starts(queue, now_s)[queue.index(probe)] - now_s)

    def enqueue(
        self,
        ticket: Ticket,
        *,
        min_service_ms: float,
        median_ms: float | None = None,
        deadline_s: float = math.inf,
    ) -> None:
        """Queue a request, with a guarantee if possible (`ticket.guaranteed`).

        Args:
            ticket: Result of `reserve`.
            min_service_ms: p99 service time of the cheapest plan, from start to last token.
            median_ms: Its median service time; default: the p99.
            deadline_s: Latest completion time; infinite for none.

        Raises:
            ApiError: 429 if this deadline or that of an admitted request will probably be missed. The place
                stays reserved.
        """
        now_s = self._clock()
        ticket.min_service_ms, ticket.deadline_s = min_service_ms, deadline_s
        ticket.median_ms = min_service_ms if median_ms is None else median_ms
        ticket.sort_key = (self._effective_deadline(ticket.arrival_s, deadline_s), self._num_enqueued)
        self._num_enqueued += 1
        queue = sorted([*self._waiting, ticket], key=_get_sort_key)
        starts_s = self._simulate_starts(queue, now_s)
        late_before = self._find_late(self._waiting, self._simulate_starts(self._waiting, now_s))
        excess_s = 0.0
        for guaranteed in (True, False) if ticket.has_deadline else ():
            ticket.guaranteed = guaranteed
            late_after = self._find_late(queue, starts_s)
            excess_s = max(
                (late_s for key, late_s in late_after.items() if key not in late_before), default=0.0
            )
            if not excess_s:
                break
        if excess_s:
            raise ApiError(
                429,
                f"too many queued requests to meet the latency budget; retry in "
                f"{excess_s * 1000.0:.0f} ms or increase the budget",
                code="overloaded", retry_after_s=excess_s,
            )  # fmt: skip
        insort(self._waiting, ticket, key=_get_sort_key)

    def start_next(self) -> Ticket | None:
        """Start the next queued request; None if the queue is empty or no slot is free."""
        if not self._waiting or len(self._running) >= self.slots:
            return None
        ticket = self._waiting.pop(0)
        ticket.start_s = self._clock()
        self._running.add(ticket)
        target_s = self._find_target_end(ticket, ticket.start_s) - ticket.start_s
        is_single = not self._waiting and len(self._running) == 1
        ticket.target_end_s = ticket.start_s + target_s / (1.0 if is_single else self.p99_correction)
        # The plan is not selected yet: the mean service time is the estimate.
        estimate_s = max(ticket.min_service_ms, self.service_ms) / 1000.0
        ticket.predicted_end_s = min(ticket.target_end_s, ticket.start_s + estimate_s)
        return ticket

    def release(self, ticket: Ticket, *, completed: bool = False) -> None:
        """Release a ticket in any state. Releasing it twice has no effect.

        Args:
            ticket: Result of `reserve`.
            completed: Whether the request ran to its end, so that its service time updates the correction.
        """
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        if ticket in self._running:
            self._running.remove(ticket)
            if completed and ticket.start_s is not None:
                self._update_correction(ticket)
        elif ticket in self._waiting:
            self._waiting.remove(ticket)

    def _find_target_end(self, ticket: Ticket, now_s: float) -> float:
        waiting = self._waiting
        earliest_s = now_s + self._required_s(ticket)
        latest_s = max((other.deadline_s for other in waiting if other.has_deadline), default=-math.inf)
        if latest_s <= earliest_s:
            return max(ticket.deadline_s, earliest_s)
        already_late = self._find_late(waiting, self._simulate_starts(waiting, now_s, ticket, earliest_s))

        def delays_nobody(end_s: float) -> bool:
            late = self._find_late(waiting, self._simulate_starts(waiting, now_s, ticket, end_s))
            return all(other in already_late for other in late)

        # An end after the last deadline cannot delay another request further.
        feasible_s, infeasible_s = earliest_s, min(ticket.deadline_s, latest_s)
        if delays_nobody(infeasible_s):
            return max(ticket.deadline_s, earliest_s)
        for _ in range(_BISECTION_STEPS):
            middle_s = (feasible_s + infeasible_s) / 2.0
            feasible_s, infeasible_s = (
                (middle_s, infeasible_s) if delays_nobody(middle_s) else (feasible_s, middle_s)
            )
        return feasible_s

    def _update_correction(self, ticket: Ticket) -> None:
        assert ticket.start_s is not None
        service_s = self._clock() - ticket.start_s
        self.service_ms += (service_s * 1000.0 - self.service_ms) * (_EWMA_WEIGHT if self.service_ms else 1.0)
        if ticket.predicted_end_s > ticket.start_s:
            # Cap the ratio so that one hung request cannot block admission.
            ratio = min(service_s / (ticket.predicted_end_s - ticket.start_s), 4.0)
            now_s = self._clock()
            self._recent_excess.append((now_s, max(ratio - 1.0, 0.0)))
            largest = heapq.nlargest(
                2, (_decay(excess, now_s - time_s, _HALF_LIFE_S) for time_s, excess in self._recent_excess)
            )
            # The largest excess may be an outlier, so the second largest counts.
            self._p99_excess, self._updated_s = largest[1] if len(largest) > 1 else 0.0, now_s
            self._ratio_deviation += _EWMA_WEIGHT * (abs(ratio - self._mean_ratio) - self._ratio_deviation)
            self._mean_ratio += _EWMA_WEIGHT * (ratio - self._mean_ratio)

    def _effective_deadline(self, arrival_s: float, deadline_s: float) -> float:
        return min(deadline_s, arrival_s + self._patience_s)

    def _simulate_starts(
        self, queue: Sequence[Ticket], now_s: float, started: Ticket | None = None, started_end_s: float = 0.0
    ) -> list[float]:
        """Simulate start times of a queue; `started` has just started and ends at `started_end_s`."""
        ends_s = [
            started_end_s if ticket is started else self._predict_end(ticket, now_s)
            for ticket in self._running
        ]
        free_s = [now_s] * (self.slots - len(ends_s)) + ends_s
        heapq.heapify(free_s)
        starts_s: list[float] = []
        for ticket in queue:
            starts_s.append(free_s[0])
            expected_ms = min(ticket.min_service_ms * self.mean_correction, ticket.median_ms * _MAX_MEDIANS)
            heapq.heapreplace(free_s, free_s[0] + expected_ms / 1000.0)
        return starts_s

    def _predict_end(self, ticket: Ticket, now_s: float) -> float:
        assert ticket.start_s is not None
        expected_s = min(
            (ticket.predicted_end_s - ticket.start_s) * self.mean_correction,
            (ticket.median_end_s - ticket.start_s) * _MAX_MEDIANS,
        )
        # An overdue request may end at any moment.
        return max(ticket.start_s + expected_s, now_s)

    def _required_s(self, ticket: Ticket) -> float:
        """Return the service time that a request must have before its deadline."""
        if ticket.has_deadline and not ticket.guaranteed:
            return ticket.median_ms / 1000.0
        return ticket.min_service_ms / 1000.0 * self.p99_correction

    def _find_late(self, queue: Iterable[Ticket], starts_s: Iterable[float]) -> dict[Ticket, float]:
        """Return the requests that miss their deadline, with the delay in seconds."""
        late: dict[Ticket, float] = {}
        for ticket, start_s in zip(queue, starts_s, strict=True):
            late_s = start_s + self._required_s(ticket) - ticket.deadline_s
            if late_s > 0.0:
                late[ticket] = late_s
        return late


def _decay(excess: float, age_s: float, half_life_s: float) -> float:
    return excess * 0.5 ** (age_s / half_life_s)


def _get_sort_key(ticket: Ticket) -> tuple[float, int]:
    return ticket.sort_key
