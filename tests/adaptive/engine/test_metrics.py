"""Load and rates, by a clock that the test holds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparseflow.adaptive.engine.metrics import BUSY_S, RATE_S, EngineMetrics


class Clock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


def test_load_follows_work() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock=clock)
    metrics.record_time(busy=False)
    assert metrics.load(busy=True) == 0.0
    clock.time_s += BUSY_S
    assert metrics.load(busy=True) == pytest.approx(1 - math.exp(-1))
    metrics.record_time(busy=True)
    clock.time_s += 100 * BUSY_S
    assert metrics.load(busy=True) == pytest.approx(1.0)
    assert metrics.load(busy=False) == pytest.approx(0.0)


def test_load_of_work_that_comes_and_goes() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock=clock)
    metrics.record_time(busy=False)
    for _ in range(3000):
        clock.time_s += 0.007
        metrics.record_time(busy=True)
        clock.time_s += 0.003
        metrics.record_time(busy=False)
    assert metrics.load(busy=False) == pytest.approx(0.7, abs=0.01)


def test_who_sends_one_request_after_the_other_is_alone() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock=clock)
    metrics.record_time(busy=False)
    for _ in range(500):
        metrics.record_arrival(busy=False)
        clock.time_s += 0.019
        metrics.record_time(busy=True)
        clock.time_s += 0.001
        metrics.record_time(busy=False)
    # Busy for 95 % of the time, and nobody ever met another.
    assert metrics.load(busy=False) < 0.03
    clock.time_s += 100 * BUSY_S
    assert metrics.load(busy=False) == pytest.approx(0.0)


def test_at_random_arrivals_load_is_the_share_of_busy_time() -> None:
    clock, random = Clock(), np.random.default_rng(0)
    metrics = EngineMetrics(clock=clock)
    metrics.record_time(busy=False)
    loads, until = [], clock.time_s
    for _ in range(20_000):
        arrival_s = clock.time_s + random.exponential(0.01)
        if until < arrival_s:
            clock.time_s = max(clock.time_s, until)
            metrics.record_time(busy=True)
            clock.time_s = arrival_s
            metrics.record_time(busy=False)
        clock.time_s = arrival_s
        metrics.record_arrival(busy=until > arrival_s)
        until = max(until, arrival_s) + 0.006
        loads.append(metrics.load(busy=True))
    assert np.mean(loads[1000:]) == pytest.approx(0.6, abs=0.03)


def test_what_requests_met_is_soon_forgotten_where_they_stop_coming() -> None:
    """As where all are refused: an engine that has nothing to do must not be taken for a full one."""
    clock = Clock()
    metrics = EngineMetrics(clock=clock)
    metrics.record_time(busy=False)
    for _ in range(1000):
        metrics.record_arrival(busy=True)
        clock.time_s += 0.005
        metrics.record_time(busy=True)
    clock.time_s += 0.02
    assert metrics.load(busy=False) > 0.95, "for a moment none came"
    clock.time_s += BUSY_S
    assert metrics.load(busy=False) <= math.exp(-1), "no more than the share of time says"
    metrics.record_arrival(busy=False)
    assert metrics.load(busy=False) < 0.3, "nor when they come again"


def test_tokens_a_second() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock=clock)
    assert metrics.tokens_per_s() == 0.0
    for _ in range(200):
        clock.time_s += 0.1
        metrics.record_tokens(3)
    assert metrics.tokens == 600
    assert metrics.tokens_per_s() == pytest.approx(30.0, rel=0.05)
    clock.time_s += RATE_S / 2
    assert metrics.tokens_per_s() == pytest.approx(15.0, rel=0.1)
    clock.time_s += RATE_S
    assert metrics.tokens_per_s() == 0.0


def test_a_rate_soon_after_the_start() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock=clock)
    metrics.record_tokens(1)
    clock.time_s += 0.5
    metrics.record_tokens(4)
    assert metrics.tokens_per_s() == pytest.approx(10.0)
