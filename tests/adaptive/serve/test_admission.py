"""Admission: who comes in, waits, runs – and whether promises are kept under load, by a clock of the test's
own."""

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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def line(slots: int = 1, places: int = 8, **how: float) -> tuple[AdmissionQueue, Clock]:
    clock = Clock()
    return AdmissionQueue(slots=slots, places=places, clock=clock, **how), clock


def join(here: AdmissionQueue, *, least_ms: float = 100.0, budget_ms: float = math.inf) -> Ticket:
    place = here.enter()
    try:
        here.join(place, least_ms=least_ms, deadline_s=place.arrived_s + budget_ms / 1000.0)
    except ApiError:
        here.leave(place)
        raise
    return place


def run(here: AdmissionQueue) -> Ticket:
    place = here.next()
    assert place is not None
    return place


def test_slots_are_taken_in_turn() -> None:
    here, _ = line(slots=2)
    places = [join(here) for _ in range(3)]
    assert [here.next(), here.next(), here.next()] == [places[0], places[1], None]
    assert (here.running, here.waiting, here.load) == (2, 1, 1.0)
    here.leave(places[0], ended=True)
    here.leave(places[0], ended=True)
    assert here.next() is places[2]
    assert (here.running, here.waiting) == (2, 0)


def test_a_full_house_refuses_before_anything_is_read() -> None:
    here, _ = line(slots=1, places=2)
    held = [here.enter() for _ in range(3)]
    with pytest.raises(ApiError) as caught:
        here.enter()
    assert (caught.value.status, caught.value.code) == (429, "overloaded")
    assert caught.value.headers["Retry-After"] == "1"
    here.leave(held[0])
    here.enter()


def test_who_could_not_keep_a_promise_is_refused_with_a_time() -> None:
    here, clock = line()
    join(here, budget_ms=300.0)
    run(here).ends_s = 0.2
    # At 200 ms the slot is free; 100 ms more are needed.
    join(here, budget_ms=301.0)
    with pytest.raises(ApiError) as caught:
        join(here, budget_ms=350.0)
    # Behind the one that waits.
    assert caught.value.retry_after_s == pytest.approx(0.05)
    assert "try again in 50 ms" in caught.value.message
    assert here.waiting == 1
    clock.now = 0.051
    join(here, budget_ms=350.0)


def test_the_most_urgent_goes_first_unless_it_would_hurt_another() -> None:
    here, _ = line()
    run_first = join(here)
    assert run(here) is run_first
    run_first.ends_s = 0.1
    loose, tight = join(here, budget_ms=2000.0), join(here, budget_ms=400.0)
    with pytest.raises(ApiError):
        # It would be in time itself, and the tight one would not.
        join(here, least_ms=250.0, budget_ms=399.0)
    here.leave(run_first)
    assert run(here) is tight
    here.leave(tight)
    assert run(here) is loose


def test_no_promise_is_no_reason_to_be_passed_for_ever() -> None:
    here, clock = line(places=100, patience_s=1.0)
    join(here)
    first = run(here)
    patient = join(here)
    urgent = [join(here, budget_ms=900.0 + at, least_ms=1.0) for at in range(3)]
    clock.now = 0.5
    later = join(here, budget_ms=900.0, least_ms=1.0)
    here.leave(first)
    order = []
    while (place := here.next()) is not None:
        order.append(place)
        here.leave(place)
    assert order == [*urgent, patient, later]


def test_a_request_is_told_to_end_early_for_those_behind_it() -> None:
    here, _ = line()
    alone = join(here, budget_ms=1000.0)
    assert run(here).until_s == 1.0
    here.leave(alone)

    join(here, budget_ms=1000.0)
    join(here, budget_ms=1000.0)
    first = run(here)
    # The second one needs the last 100 ms.
    assert first.until_s == pytest.approx(0.9, abs=0.01)
    assert first.until_s <= 0.9
    here.leave(first)
    assert run(here).until_s == 1.0


def test_without_a_budget_it_is_told_only_for_the_sake_of_others() -> None:
    here, _ = line()
    here.leave(join(here))
    join(here)
    assert run(here).until_s == math.inf
    here, _ = line(patience_s=0.1)
    join(here)
    join(here, budget_ms=500.0)
    assert run(here).until_s == pytest.approx(0.4, abs=0.01)


def test_it_is_never_told_to_end_before_it_can() -> None:
    here, clock = line()
    first = join(here)
    run(here)
    late = join(here, budget_ms=300.0)
    clock.now = 0.5
    here.leave(first)
    assert run(here) is late
    assert late.until_s == pytest.approx(0.6)


def test_who_leaves_the_line_makes_room() -> None:
    here, _ = line()
    run_first = join(here)
    run(here)
    waits = join(here, budget_ms=500.0)
    assert here.wait_ms() == pytest.approx(200.0)
    here.leave(waits)
    assert here.wait_ms() == pytest.approx(100.0)
    here.leave(run_first)
    assert here.wait_ms() == 0.0
    assert here.next() is None


def test_what_things_take_is_learnt() -> None:
    here, clock = line()
    for _ in range(200):
        join(here, least_ms=100.0)
        place = run(here)
        place.ends_s = clock.now + 0.1
        clock.now += 0.05
        here.leave(place, ended=True)
    assert here.service_ms == pytest.approx(50.0)
    assert here.pace == pytest.approx(0.5, abs=0.01)
    # One that hung does not close the house.
    join(here)
    place = run(here)
    clock.now += 3600.0
    here.leave(place, ended=True)
    assert here.pace < 1.0
    # One that was called off tells nothing.
    before = here.pace, here.service_ms
    join(here)
    here.leave(run(here))
    assert (here.pace, here.service_ms) == before


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"places": 0}, {"patience_s": 0.0}, {"patience_s": math.nan}]
)
def test_numbers_that_are_none(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="must be positive"):
        AdmissionQueue(**{"slots": 1, "places": 1, **wrong})  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    arrived_s: float
    kind: str
    retry_after_s: float = 0.0


PLANS_MS = (40.0, 60.0, 90.0, 140.0, 200.0)
"""Medians; the 99th percentile is a quarter above."""
P99 = 1.25


def simulate(
    rate: Callable[[float], float],
    seconds: float,
    *,
    seed: int,
    slots: int = 4,
    obeys: bool = True,
    slower: float = 1.0,
    spread: float = 0.08,
) -> list[Outcome]:
    """A server whose engine runs each request by the dearest plan that fits what it is told."""
    drawn, here = random.Random(seed), line(slots, 64)
    waiting_line, clock = here
    ids, events = count(), []
    arrival = 0.0
    while arrival < seconds:
        arrival += drawn.expovariate(rate(arrival))
        events.append((arrival, next(ids), None))
    heapq.heapify(events)
    found: list[Outcome] = []
    while events:
        clock.now, _, place = heapq.heappop(events)
        if place is None:
            budget_ms = drawn.uniform(PLANS_MS[0] * P99 + 10.0, 600.0)
            try:
                join(waiting_line, least_ms=PLANS_MS[0] * P99, budget_ms=budget_ms)
            except ApiError as refusal:
                assert refusal.status == 429
                assert refusal.retry_after_s is not None
                assert refusal.retry_after_s > 0.0
                found.append(Outcome(arrived_s=clock.now, kind="shed", retry_after_s=refusal.retry_after_s))
        else:
            waiting_line.leave(place, ended=True)
            kept = clock.now <= place.deadline_s
            found.append(Outcome(arrived_s=place.arrived_s, kind="kept" if kept else "missed"))
        while (begun := waiting_line.next()) is not None:
            left_ms = 1000.0 * ((begun.until_s if obeys else begun.deadline_s) - clock.now)
            plan_ms = max((plan for plan in PLANS_MS if plan * P99 <= left_ms), default=PLANS_MS[0])
            begun.ends_s = clock.now + plan_ms * P99 / 1000.0
            took_s = plan_ms / 1000.0 * slower * math.exp(drawn.gauss(0.0, spread))
            heapq.heappush(events, (clock.now + took_s, next(ids), begun))
    return found


def shares(outcomes: list[Outcome], begin_s: float, end_s: float) -> tuple[float, float]:
    """Of those who came in a time: kept promises of those accepted, and accepted of all."""
    kinds = [outcome.kind for outcome in outcomes if begin_s <= outcome.arrived_s < end_s]
    accepted = [kind for kind in kinds if kind != "shed"]
    return accepted.count("kept") / len(accepted), len(accepted) / len(kinds)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("base", [35.0, 70.0])
def test_promises_are_kept_when_the_load_doubles(base: float, seed: int) -> None:
    """Four slots do 100 requests a second by the cheapest plan: steps from 35 to 70 and from 70 to 140 %."""
    found = simulate(lambda t: base * (2.0 if 10.0 <= t < 20.0 else 1.0), 30.0, seed=seed)
    kept, _ = shares(found, 0.0, 30.0)
    assert kept >= 0.99
    before, during, after = (shares(found, *when)[1] for when in ((0.0, 10.0), (10.0, 20.0), (22.0, 30.0)))
    assert before > 0.9
    # What can be done is done: nobody is sent away while slots are idle.
    assert during > 0.9 * min(1.0, 100.0 / (2.0 * base))
    assert after > before - 0.05


@pytest.mark.parametrize("wrong", [{"slower": 1.5}, {"spread": 0.2}])
def test_predictions_that_are_too_short_are_seen_through(wrong: dict[str, Any]) -> None:
    """Everything takes half as long again as predicted, or every seventh request is beyond its p99."""
    found = simulate(lambda _: 50.0, 30.0, seed=1, **wrong)
    kept, accepted = shares(found, 3.0, 30.0)
    assert kept >= 0.99
    assert accepted > 0.8


def test_one_slow_hour_does_not_keep_everybody_out() -> None:
    here, clock = line()
    for _ in range(100):
        join(here)
        place = run(here)
        place.ends_s = clock.now + 0.1
        clock.now += 0.3
        here.leave(place, ended=True)
    assert here.stretch == pytest.approx(3.0, rel=0.2)
    with pytest.raises(ApiError):
        join(here, budget_ms=150.0)
    clock.now += 60.0
    join(here, budget_ms=150.0)


def test_what_was_slow_is_forgotten_while_others_end() -> None:
    here, clock = line()
    stretches = []
    for number in range(60):
        join(here)
        place = run(here)
        place.ends_s = clock.now + 1.0
        clock.now += 3.0 if number < 2 else 1.0
        here.leave(place, ended=True)
        stretches.append(here.stretch)
    # No more than half of so many had ended by then: that alone would still remember.
    assert stretches[1] == pytest.approx(3.0, rel=0.3)
    assert stretches[-1] < 1.25


def test_an_engine_that_does_not_obey_breaks_promises() -> None:
    """Why a plan is to be chosen for `until_s`, and not for the budget."""
    found = simulate(lambda _: 140.0, 10.0, seed=1, obeys=False)
    assert shares(found, 0.0, 10.0)[0] < shares(simulate(lambda _: 140.0, 10.0, seed=1), 0.0, 10.0)[0] - 0.02


def test_trying_again_when_told_helps() -> None:
    here, clock = line()
    join(here, budget_ms=500.0)
    run(here).ends_s = 0.45
    with pytest.raises(ApiError) as caught:
        join(here, budget_ms=500.0)
    assert caught.value.retry_after_s is not None
    clock.now += caught.value.retry_after_s + 1e-6
    join(here, budget_ms=500.0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["join", "next", "end", "leave"]),
        st.integers(0, 9),
        st.floats(1.0, 500.0),
        st.floats(0.0, 0.3),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(STEPS, st.integers(1, 3), st.integers(1, 5))
def test_whatever_happens_the_line_holds_together(
    steps: list[tuple[str, int, float, float]], slots: int, places: int
) -> None:
    here, clock = line(slots, places)
    inside: list[Ticket] = []
    running: list[Ticket] = []
    for what, which, number, passes in steps:
        clock.now += passes
        if what == "join":
            try:
                inside.append(
                    join(here, least_ms=number, budget_ms=number * (1 + which) if which else math.inf)
                )
            except ApiError as refusal:
                assert refusal.status == 429
        elif what == "next":
            place = here.next()
            assert (place is None) == (len(running) == slots or len(running) == len(inside))
            if place is not None:
                assert place in inside
                assert place not in running
                assert place.until_s >= clock.now + place.least_ms / 1000.0 - 1e-9
                running.append(place)
        elif inside:
            place = inside.pop(which % len(inside))
            here.leave(place, ended=what == "end" and place in running)
            running = [other for other in running if other is not place]
        assert (here.running, here.waiting) == (len(running), len(inside) - len(running))
        assert len(inside) <= slots + places
        assert here.wait_ms() >= 0.0
        assert here.pace > 0.0
