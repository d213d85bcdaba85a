"""Tests of deadline-aware admission, including simulations of a loaded server with a fake clock."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.prompts.messages import ApiError
from sparseflow.adaptive.serve.admission import AdmissionQueue, Ticket
from sparseflow.errors import InputError


class FakeClock:
    time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def make_queue(slots: int = 1, max_queued: int = 8, **options: float) -> tuple[AdmissionQueue, FakeClock]:
    clock = FakeClock()
    return AdmissionQueue(slots=slots, max_queued=max_queued, clock=clock, **options), clock


def enqueue(
    queue: AdmissionQueue,
    *,
    service_ms: float = 100.0,
    median_ms: float | None = None,
    budget_ms: float = math.inf,
) -> Ticket:
    ticket = queue.reserve()
    deadline_s = ticket.arrival_s + budget_ms / 1000.0
    try:
        queue.enqueue(ticket, min_service_ms=service_ms, median_ms=median_ms, deadline_s=deadline_s)
    except ApiError:
        queue.release(ticket)
        raise
    return ticket


def start_next(queue: AdmissionQueue) -> Ticket:
    ticket = queue.start_next()
    assert ticket is not None
    return ticket


def test_start_next_uses_slots_in_queue_order() -> None:
    queue, _ = make_queue(slots=2)
    tickets = [enqueue(queue) for _ in range(3)]
    assert [queue.start_next(), queue.start_next(), queue.start_next()] == [tickets[0], tickets[1], None]
    assert (queue.running, queue.waiting) == (2, 1)
    queue.release(tickets[0], completed=True)
    queue.release(tickets[0], completed=True)
    assert queue.start_next() is tickets[2]
    assert (queue.running, queue.waiting) == (2, 0)


def test_reserve_full_queue_raises_overloaded() -> None:
    queue, _ = make_queue(slots=1, max_queued=2)
    tickets = [queue.reserve() for _ in range(3)]
    with pytest.raises(ApiError) as caught:
        queue.reserve()
    assert (caught.value.status, caught.value.code) == (429, "overloaded")
    assert caught.value.headers["Retry-After"] == "1"
    queue.release(tickets[0])
    queue.reserve()


def test_enqueue_infeasible_deadline_raises_with_retry_time() -> None:
    queue, clock = make_queue()
    enqueue(queue, budget_ms=300.0)
    start_next(queue).predicted_end_s = 0.2
    # The slot is free at 200 ms and the request takes 100 ms.
    enqueue(queue, budget_ms=301.0)
    with pytest.raises(ApiError) as caught:
        enqueue(queue, budget_ms=350.0)
    # It would run after the queued request.
    assert caught.value.retry_after_s == pytest.approx(0.05)
    assert "50 ms" in caught.value.message
    assert queue.waiting == 1
    clock.time_s = 0.051
    enqueue(queue, budget_ms=350.0)


def test_enqueue_delaying_guaranteed_request_raises() -> None:
    queue, _ = make_queue()
    first = enqueue(queue)
    assert start_next(queue) is first
    first.predicted_end_s = 0.1
    flexible, urgent = enqueue(queue, budget_ms=2000.0), enqueue(queue, budget_ms=400.0)
    with pytest.raises(ApiError):
        # It would meet its deadline, but the urgent request would not.
        enqueue(queue, service_ms=250.0, budget_ms=399.0)
    queue.release(first)
    assert start_next(queue) is urgent
    queue.release(urgent)
    assert start_next(queue) is flexible


def test_start_next_best_effort_runs_after_patience() -> None:
    queue, clock = make_queue(max_queued=100, patience_s=1.0)
    enqueue(queue)
    first = start_next(queue)
    patient = enqueue(queue)
    urgent = [enqueue(queue, budget_ms=900.0 + index, service_ms=1.0) for index in range(3)]
    clock.time_s = 0.5
    later = enqueue(queue, budget_ms=900.0, service_ms=1.0)
    queue.release(first)
    order = []
    while (ticket := queue.start_next()) is not None:
        order.append(ticket)
        queue.release(ticket)
    assert order == [*urgent, patient, later]


def test_target_end_leaves_time_for_queued_request() -> None:
    queue, _ = make_queue()
    single = enqueue(queue, budget_ms=1000.0)
    assert start_next(queue).target_end_s == 1.0
    queue.release(single)

    enqueue(queue, budget_ms=1000.0)
    enqueue(queue, budget_ms=1000.0)
    first = start_next(queue)
    # The second request needs the last 100 ms.
    assert first.target_end_s == pytest.approx(0.9, abs=0.01)
    assert first.target_end_s <= 0.9
    queue.release(first)
    assert start_next(queue).target_end_s == 1.0


def test_target_end_without_deadline_is_set_by_queued_requests() -> None:
    queue, _ = make_queue()
    queue.release(enqueue(queue))
    enqueue(queue)
    assert start_next(queue).target_end_s == math.inf
    queue, _ = make_queue(patience_s=0.1)
    enqueue(queue)
    enqueue(queue, budget_ms=500.0)
    assert start_next(queue).target_end_s == pytest.approx(0.4, abs=0.01)


def test_target_end_is_not_before_min_service_time() -> None:
    queue, clock = make_queue()
    first = enqueue(queue)
    start_next(queue)
    late = enqueue(queue, budget_ms=300.0)
    clock.time_s = 0.5
    queue.release(first)
    assert start_next(queue) is late
    assert late.target_end_s == pytest.approx(0.6)


def test_release_queued_ticket_shortens_wait() -> None:
    queue, _ = make_queue()
    first = enqueue(queue)
    start_next(queue)
    queued = enqueue(queue, budget_ms=500.0)
    assert queue.estimate_wait_ms() == pytest.approx(200.0)
    queue.release(queued)
    assert queue.estimate_wait_ms() == pytest.approx(100.0)
    queue.release(first)
    assert queue.estimate_wait_ms() == 0.0
    assert queue.start_next() is None


def test_release_completed_updates_correction() -> None:
    queue, clock = make_queue()
    for _ in range(200):
        enqueue(queue, service_ms=100.0)
        ticket = start_next(queue)
        ticket.predicted_end_s = clock.time_s + 0.1
        clock.time_s += 0.05
        queue.release(ticket, completed=True)
    assert queue.service_ms == pytest.approx(50.0)
    assert queue.mean_correction == pytest.approx(0.5, abs=0.01)
    # A single hung request does not block admission.
    enqueue(queue)
    ticket = start_next(queue)
    clock.time_s += 3600.0
    queue.release(ticket, completed=True)
    assert queue.mean_correction < 1.0
    # A cancelled request does not update the correction.
    expected = queue.mean_correction, queue.service_ms
    enqueue(queue)
    queue.release(start_next(queue))
    assert (queue.mean_correction, queue.service_ms) == expected


@pytest.mark.parametrize(
    ("name", "value"), [("slots", 0), ("max_queued", 0), ("patience_s", 0.0), ("patience_s", math.nan)]
)
def test_queue_non_positive_argument_raises(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"`{name}` \(={value}\)"):
        AdmissionQueue(**{"slots": 1, "max_queued": 1, name: value})  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class RequestOutcome:
    arrival_s: float
    kind: str
    retry_after_s: float = 0.0
    in_time: bool = False


PLANS_MS = (40.0, 60.0, 90.0, 140.0, 200.0)
"""Median service time of each plan."""
P99_FACTOR = 1.25
"""Ratio of the 99th percentile to the median."""


def simulate(
    rate: Callable[[float], float],
    duration_s: float,
    *,
    seed: int,
    slots: int = 4,
    follows_target: bool = True,
    slowdown: float = 1.0,
    spread: float = 0.08,
) -> list[RequestOutcome]:
    """Simulate a server that runs each request with the largest plan that fits its target end."""
    rng = random.Random(seed)
    queue, clock = make_queue(slots, 64)
    ids, events = count(), []
    arrival_s = 0.0
    while arrival_s < duration_s:
        arrival_s += rng.expovariate(rate(arrival_s))
        events.append((arrival_s, next(ids), None))
    heapq.heapify(events)
    outcomes: list[RequestOutcome] = []
    while events:
        clock.time_s, _, ticket = heapq.heappop(events)
        if ticket is None:
            budget_ms = rng.uniform(PLANS_MS[0] * P99_FACTOR + 10.0, 600.0)
            try:
                enqueue(
                    queue, service_ms=PLANS_MS[0] * P99_FACTOR, median_ms=PLANS_MS[0], budget_ms=budget_ms
                )
            except ApiError as refusal:
                assert refusal.status == 429
                assert refusal.retry_after_s is not None
                assert refusal.retry_after_s > 0.0
                outcomes.append(
                    RequestOutcome(arrival_s=clock.time_s, kind="shed", retry_after_s=refusal.retry_after_s)
                )
        else:
            queue.release(ticket, completed=True)
            met = clock.time_s <= ticket.deadline_s
            kind = ("met" if met else "missed") if ticket.guaranteed else "unguaranteed"
            outcomes.append(RequestOutcome(arrival_s=ticket.arrival_s, kind=kind, in_time=met))
        while (started := queue.start_next()) is not None:
            remaining_ms = 1000.0 * (
                (started.target_end_s if follows_target else started.deadline_s) - clock.time_s
            )
            plan_ms = max(
                (plan for plan in PLANS_MS if plan * P99_FACTOR <= remaining_ms), default=PLANS_MS[0]
            )
            started.predicted_end_s = clock.time_s + plan_ms * P99_FACTOR / 1000.0
            service_s = plan_ms / 1000.0 * slowdown * math.exp(rng.gauss(0.0, spread))
            heapq.heappush(events, (clock.time_s + service_s, next(ids), started))
    return outcomes


def compute_rates(outcomes: list[RequestOutcome], start_s: float, end_s: float) -> tuple[float, float]:
    """Return the fraction of guaranteed requests that met their deadline, and of accepted requests.

    Only requests that arrived between `start_s` and `end_s` count.
    """
    kinds = [outcome.kind for outcome in outcomes if start_s <= outcome.arrival_s < end_s]
    met, missed = kinds.count("met"), kinds.count("missed")
    return met / (met + missed), 1.0 - kinds.count("shed") / len(kinds)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("rate", [35.0, 70.0])
def test_deadlines_are_met_when_load_doubles(rate: float, seed: int) -> None:
    """The cheapest plan serves 100 requests/s, so the load rises from 35 to 70 % or from 70 to 140 %."""
    outcomes = simulate(lambda time_s: rate * (2.0 if 10.0 <= time_s < 20.0 else 1.0), 30.0, seed=seed)
    met_rate, _ = compute_rates(outcomes, 0.0, 30.0)
    assert met_rate >= 0.99
    before, during, after = (
        compute_rates(outcomes, *interval_s)[1] for interval_s in ((0.0, 10.0), (10.0, 20.0), (22.0, 30.0))
    )
    assert before > 0.9
    # No request is refused while slots are idle.
    assert during > 0.9 * min(1.0, 100.0 / (2.0 * rate))
    assert after > before - 0.05


@pytest.mark.parametrize("options", [{"slowdown": 1.5}, {"spread": 0.2}])
def test_deadlines_are_met_when_predictions_are_too_low(options: dict[str, Any]) -> None:
    """Requests take 50 % longer than predicted, or 1 in 7 exceeds its p99."""
    outcomes = simulate(lambda _: 50.0, 30.0, seed=1, **options)
    met_rate, accepted = compute_rates(outcomes, 3.0, 30.0)
    assert met_rate >= 0.99
    assert accepted > 0.8


def test_p99_correction_decays_while_no_request_completes() -> None:
    queue, clock = make_queue()
    for _ in range(100):
        enqueue(queue)
        ticket = start_next(queue)
        ticket.predicted_end_s = clock.time_s + 0.1
        clock.time_s += 0.3
        queue.release(ticket, completed=True)
    assert queue.p99_correction == pytest.approx(3.0, rel=0.2)
    ticket = enqueue(queue, budget_ms=150.0)
    assert not ticket.guaranteed, "it is in time with its median only"
    queue.release(ticket)
    clock.time_s += 60.0
    assert enqueue(queue, budget_ms=150.0).guaranteed


def test_enqueue_without_guarantee_needs_median_in_time() -> None:
    queue, _ = make_queue()
    first = enqueue(queue, service_ms=400.0, median_ms=50.0, budget_ms=60.0)
    assert not first.guaranteed
    start_next(queue)
    assert first.target_end_s == 0.06, "a single request may use its full budget"
    first.median_end_s = 0.05
    # The slot is expected to be free at 75 ms, 1.5 medians.
    assert not enqueue(queue, service_ms=400.0, median_ms=50.0, budget_ms=130.0).guaranteed
    with pytest.raises(ApiError):
        enqueue(queue, service_ms=400.0, median_ms=50.0, budget_ms=160.0)
    guaranteed = enqueue(queue, service_ms=400.0, median_ms=50.0, budget_ms=700.0)
    assert guaranteed.guaranteed


def test_slow_spell_does_not_refuse_requests_afterwards() -> None:
    """A burst at which every request takes far longer than predicted ends, and 8 requests/s follow."""
    queue, clock = make_queue(slots=4, max_queued=64)
    for _ in range(50):
        queue.enqueue(queue.reserve(), min_service_ms=400.0, median_ms=60.0)
        ticket = start_next(queue)
        ticket.predicted_end_s, ticket.median_end_s = clock.time_s + 0.4, clock.time_s + 0.06
        clock.time_s += 2.0
        queue.release(ticket, completed=True)
    for _ in range(60):
        enqueue(queue, service_ms=400.0, median_ms=60.0, budget_ms=1000.0)
        ticket = start_next(queue)
        ticket.predicted_end_s, ticket.median_end_s = clock.time_s + 0.4, clock.time_s + 0.06
        clock.time_s += 0.06
        queue.release(ticket, completed=True)
        clock.time_s += 0.065


def test_p99_correction_decays_while_requests_complete() -> None:
    queue, clock = make_queue()
    corrections = []
    for index in range(60):
        enqueue(queue)
        ticket = start_next(queue)
        ticket.predicted_end_s = clock.time_s + 1.0
        clock.time_s += 3.0 if index < 2 else 1.0
        queue.release(ticket, completed=True)
        corrections.append(queue.p99_correction)
    # The window of recent requests still contains the slow ones.
    assert corrections[1] == pytest.approx(3.0, rel=0.3)
    assert corrections[-1] < 1.25


def test_ignoring_target_end_misses_deadlines() -> None:
    outcomes = simulate(lambda _: 140.0, 5.0, seed=1, follows_target=False)
    assert (
        compute_rates(outcomes, 0.0, 5.0)[0]
        < compute_rates(simulate(lambda _: 140.0, 5.0, seed=1), 0.0, 5.0)[0] - 0.02
    )


def test_enqueue_after_retry_time_is_accepted() -> None:
    queue, clock = make_queue()
    enqueue(queue, budget_ms=500.0)
    start_next(queue).predicted_end_s = 0.45
    with pytest.raises(ApiError) as caught:
        enqueue(queue, budget_ms=500.0)
    assert caught.value.retry_after_s is not None
    clock.time_s += caught.value.retry_after_s + 1e-6
    enqueue(queue, budget_ms=500.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enqueue", "start", "complete", "cancel"]),
        st.integers(0, 9),
        st.floats(1.0, 500.0),
        st.floats(0.0, 0.3),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(STEPS, st.integers(1, 3), st.integers(1, 5))
def test_queue_any_sequence_keeps_invariants(
    steps: list[tuple[str, int, float, float]], slots: int, max_queued: int
) -> None:
    queue, clock = make_queue(slots, max_queued)
    tickets: list[Ticket] = []
    running: list[Ticket] = []
    for action, selector, service_ms, elapsed_s in steps:
        clock.time_s += elapsed_s
        if action == "enqueue":
            try:
                tickets.append(
                    enqueue(
                        queue,
                        service_ms=service_ms,
                        budget_ms=service_ms * (1 + selector) if selector else math.inf,
                    )
                )
            except ApiError as refusal:
                assert refusal.status == 429
        elif action == "start":
            ticket = queue.start_next()
            assert (ticket is None) == (len(running) == slots or len(running) == len(tickets))
            if ticket is not None:
                assert ticket in tickets
                assert ticket not in running
                assert ticket.target_end_s >= clock.time_s + ticket.min_service_ms / 1000.0 - 1e-9
                running.append(ticket)
        elif tickets:
            ticket = tickets.pop(selector % len(tickets))
            queue.release(ticket, completed=action == "complete" and ticket in running)
            running = [other for other in running if other is not ticket]
        assert (queue.running, queue.waiting) == (len(running), len(tickets) - len(running))
        assert len(tickets) <= slots + max_queued
        assert queue.estimate_wait_ms() >= 0.0
        assert queue.mean_correction > 0.0
