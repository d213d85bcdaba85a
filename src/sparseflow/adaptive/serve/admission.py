"""Who may come in, who waits, and who runs: admission so that what is promised can be kept.

A request that is let in with a budget is promised that it will be kept. So the line of those who wait is
played forward: every slot is free at the predicted end of its request, those who wait take slots in turn,
each as short as its cheapest plan. A newcomer that would end too late, or make another end too late, is
refused at once, with the time after which another try may help. How long requests really take, as a share of
what was predicted, is followed by an exponentially weighted mean and deviation, so that the forecast follows
the load; and where the longest of late were beyond their prediction, promises are counted with as much more,
which fades with time.

Those who wait stand by deadline (earliest first); one without a promise stands as if it had `patience_s`, so
that it is not passed for ever. When a request's turn comes it is told by when to end: its own deadline, or
earlier where those behind it could not keep theirs otherwise. That is what makes plans cheaper under load.

Times are those of one clock, in seconds; durations in ms. Nothing here waits or knows threads.
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
from sparseflow.errors import InputError

_SHARE = 0.05
"""Weight of the newest service time in mean and deviation."""
_DEVIATIONS = 1.0
"""Deviations above the mean that a forecast counts with: those ahead in a line rarely are all slow
together."""
_REMEMBERED = 128
"""Latest requests that say how a promise is to be counted: only one or two of so many may take longer."""
_FORGETS_S = 10.0
"""Seconds without an end in which half of what promises are counted with above 1 is forgotten; where ends
are frequent, likewise of each request that took longer than predicted."""
_HALVINGS = 8
"""Steps in which a request's time is narrowed down for those behind it."""


@dataclass(eq=False, kw_only=True)
class Ticket:
    """One request's place in the house.

    Attributes:
        arrived_s: When it came.
        deadline_s: By when it must end; infinite where nothing is promised.
        least_ms: p99 of its cheapest plan, from its turn to its last token.
        began_s: When its turn came; None before.
        until_s: From its turn on, by when its plan should be predicted to end, so that it and those behind it
            keep their promises: infinite where nothing asks for an end, never sooner than its cheapest plan
            needs, and the sooner the more predictions turned out too short.
        ends_s: When it is predicted to end, from its turn on: a guess, until whoever runs it puts the p99 of
            its plan here.
        order: What the line is sorted by.
    """

    arrived_s: float
    deadline_s: float = math.inf
    least_ms: float = 0.0
    began_s: float | None = None
    until_s: float = math.inf
    ends_s: float = math.inf
    order: tuple[float, int] = field(default=(math.inf, 0))

    @property
    def promised(self) -> bool:
        """Whether it was let in with a budget that is to be kept."""
        return math.isfinite(self.deadline_s)


class AdmissionQueue:
    """The requests of one engine.

    Args:
        slots: How many run at once.
        places: How many may be prepared or wait besides.
        patience_s: After what time in the line one without promise stands as one with a deadline.
        clock: Seconds that never go back.

    Raises:
        InputError: A number is not positive.
    """

    def __init__(
        self,
        *,
        slots: int,
        places: int,
        patience_s: float = 10.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if slots < 1 or places < 1 or not patience_s > 0.0:
            raise InputError(
                f"`slots` (={slots}), `places` (={places}) and `patience_s` (={patience_s}) must be positive"
            )
        self.slots = slots
        self.places = places
        self.service_ms = 0.0
        """How long requests take from their turn to their end; a mean that follows."""
        self._patience_s = patience_s
        self._clock = clock
        self._inside: set[Ticket] = set()
        self._waiting: list[Ticket] = []
        self._running: set[Ticket] = set()
        self._count = 0
        self._learnt_s = clock()
        self._mean = 1.0
        self._deviation = 0.0
        self._excess = 0.0
        self._beyond: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many had their turn and have not ended."""
        return len(self._running)

    @property
    def load(self) -> float:
        """Share of the slots that are taken, 0 to 1."""
        return len(self._running) / self.slots

    @property
    def pace(self) -> float:
        """What times are expected to be over those predicted."""
        return self._mean + _DEVIATIONS * self._deviation

    @property
    def stretch(self) -> float:
        """What a promise is counted with over the predicted p99: 1, or more where predictions were too short.

        Fades, lest a slow hour, long over, keep everybody out.
        """
        return 1.0 + _faded(self._excess, self._clock() - self._learnt_s, _FORGETS_S)

    def enter(self) -> Ticket:
        """Take a place, before anything is known of the request.

        Raises:
            Refusal: 429; all places are taken.
        """
        if len(self._inside) >= self.slots + self.places:
            soon_s = (self.service_ms or 1000.0) / 1000.0 * self.places / self.slots / 2.0
            raise ApiError(
                429,
                f"the server is full: {self.running} requests run and {len(self._inside) - self.running} "
                "wait; try again later",
                code="overloaded", retry_after_s=soon_s,
            )  # fmt: skip
        place = Ticket(arrived_s=self._clock())
        self._inside.add(place)
        return place

    def wait_ms(self, deadline_s: float = math.inf) -> float:
        """How long a request with this deadline would wait for its turn if it came now."""
        now = self._clock()
        probe = Ticket(arrived_s=now, deadline_s=deadline_s, order=(self._key(now, deadline_s), self._count))
        line = sorted([*self._waiting, probe], key=_order)
        return 1000.0 * (self._turns(line, now)[line.index(probe)] - now)

    def join(self, place: Ticket, *, least_ms: float, deadline_s: float = math.inf) -> None:
        """Stand in line.

        Args:
            place: Of `enter`.
            least_ms: p99 of its cheapest plan, from its turn to its last token.
            deadline_s: Promise that it ends by then; infinite promises nothing.

        Raises:
            Refusal: 429; the promise could not be kept, or one that was given before. The place is still
                held.
        """
        now = self._clock()
        place.least_ms, place.deadline_s = least_ms, deadline_s
        place.order = (self._key(place.arrived_s, deadline_s), self._count)
        self._count += 1
        line = sorted([*self._waiting, place], key=_order)
        after = self._late(line, self._turns(line, now))
        before = self._late(self._waiting, self._turns(self._waiting, now))
        broken = [late for late in after if late not in before]
        if place.promised and broken:
            excess_s = max(after[late] for late in broken)
            raise ApiError(
                429,
                f"too many requests are in line to answer within the budget; try again in "
                f"{excess_s * 1000.0:.0f} ms, or give a larger one",
                code="overloaded", retry_after_s=excess_s,
            )  # fmt: skip
        insort(self._waiting, place, key=_order)

    def next(self) -> Ticket | None:
        """Whose turn it is; None while no slot is free or nobody waits."""
        if not self._waiting or len(self._running) >= self.slots:
            return None
        place = self._waiting.pop(0)
        place.began_s = self._clock()
        self._running.add(place)
        place.until_s = place.began_s + (self._until(place, place.began_s) - place.began_s) / self.stretch
        # Nothing says yet how long it takes; what others took is a guess until its plan is known.
        guess_s = max(place.least_ms, self.service_ms) / 1000.0
        place.ends_s = place.until_s if math.isfinite(place.until_s) else place.began_s + guess_s
        return place

    def leave(self, place: Ticket, *, ended: bool = False) -> None:
        """Give the place up, whatever its state; a second time does nothing.

        Args:
            place: Of `enter`.
            ended: It ran to its end, so that its time tells of others.
        """
        if place not in self._inside:
            return
        self._inside.remove(place)
        if place in self._running:
            self._running.remove(place)
            if ended and place.began_s is not None:
                self._learn(place)
        elif place in self._waiting:
            self._waiting.remove(place)

    def _until(self, place: Ticket, now: float) -> float:
        waiting = self._waiting
        soonest = now + place.least_ms / 1000.0 * self.stretch
        latest = max((other.deadline_s for other in waiting if other.promised), default=-math.inf)
        if latest <= soonest:
            return max(place.deadline_s, soonest)
        spared = self._late(waiting, self._turns(waiting, now, place, soonest))

        def harmless(end: float) -> bool:
            return all(late in spared for late in self._late(waiting, self._turns(waiting, now, place, end)))

        # Whatever ends after all deadlines of others is all the same to them.
        good, bad = soonest, min(place.deadline_s, latest)
        if harmless(bad):
            return max(place.deadline_s, soonest)
        for _ in range(_HALVINGS):
            middle = (good + bad) / 2.0
            good, bad = (middle, bad) if harmless(middle) else (good, middle)
        return good

    def _learn(self, place: Ticket) -> None:
        assert place.began_s is not None
        took_s = self._clock() - place.began_s
        self.service_ms += (took_s * 1000.0 - self.service_ms) * (_SHARE if self.service_ms else 1.0)
        if place.ends_s > place.began_s:
            # One request that hung must not close the house to all others.
            ratio = min(took_s / (place.ends_s - place.began_s), 4.0)
            now = self._clock()
            self._beyond.append((now, max(ratio - 1.0, 0.0)))
            # Where ends are seldom, those that are remembered reach farther back.
            half_s = max(_FORGETS_S, (now - self._beyond[0][0]) / 4.0)
            beyond = heapq.nlargest(2, (_faded(each, now - then, half_s) for then, each in self._beyond))
            # One that was slow may have been alone in it; the second one says that it happens.
            self._excess, self._learnt_s = beyond[1] if len(beyond) > 1 else 0.0, now
            self._deviation += _SHARE * (abs(ratio - self._mean) - self._deviation)
            self._mean += _SHARE * (ratio - self._mean)

    def _key(self, arrived_s: float, deadline_s: float) -> float:
        return min(deadline_s, arrived_s + self._patience_s)

    def _turns(
        self, line: Sequence[Ticket], now: float, begun: Ticket | None = None, begun_ends_s: float = 0.0
    ) -> list[float]:
        """When the turn of each in a line would come; `begun` has just had its own and ends as told."""
        ends = [begun_ends_s if place is begun else self._end(place, now) for place in self._running]
        free = [now] * (self.slots - len(ends)) + ends
        heapq.heapify(free)
        turns: list[float] = []
        pace_s = self.pace / 1000.0
        for place in line:
            turns.append(free[0])
            heapq.heapreplace(free, free[0] + place.least_ms * pace_s)
        return turns

    def _end(self, place: Ticket, now: float) -> float:
        """When a running request ends."""
        assert place.began_s is not None
        # One that is overdue may end at any moment.
        return max(place.began_s + (place.ends_s - place.began_s) * self.pace, now)

    def _late(self, line: Iterable[Ticket], turns: Iterable[float]) -> dict[Ticket, float]:
        """Those that would break a promise -> by how many seconds."""
        stretch_s, late = self.stretch / 1000.0, {}
        for place, turn in zip(line, turns, strict=True):
            late_s = turn + place.least_ms * stretch_s - place.deadline_s
            if late_s > 0.0:
                late[place] = late_s
        return late


def _faded(excess: float, age_s: float, half_s: float) -> float:
    return excess * 0.5 ** (age_s / half_s)


def _order(place: Ticket) -> tuple[float, int]:
    return place.order
