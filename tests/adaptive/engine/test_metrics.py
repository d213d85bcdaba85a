"""Utilization of an engine, with a simulated clock."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparseflow.adaptive.engine.metrics import BUSY_S, EngineMetrics


class Clock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


def test_load_follows_busy_time() -> None:
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


def test_load_of_alternating_work_is_busy_fraction() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock=clock)
    metrics.record_time(busy=False)
    for _ in range(3000):
        clock.time_s += 0.007
        metrics.record_time(busy=True)
        clock.time_s += 0.003
        metrics.record_time(busy=False)
    assert metrics.load(busy=False) == pytest.approx(0.7, abs=0.01)


def test_load_of_sequential_client_is_near_zero() -> None:
    clock = Clock()
    metrics = EngineMetrics(clock=clock)
    metrics.record_time(busy=False)
    for _ in range(500):
        metrics.record_arrival(busy=False)
        clock.time_s += 0.019
        metrics.record_time(busy=True)
        clock.time_s += 0.001
        metrics.record_time(busy=False)
    # Busy for 95 % of the time, but no request found the engine busy.
    assert metrics.load(busy=False) < 0.03
    clock.time_s += 100 * BUSY_S
    assert metrics.load(busy=False) == pytest.approx(0.0)


def test_load_of_random_arrivals_is_busy_fraction() -> None:
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


def test_load_decays_when_arrivals_stop() -> None:
    """If all requests are refused, an idle engine must not appear busy."""
    clock = Clock()
    metrics = EngineMetrics(clock=clock)
    metrics.record_time(busy=False)
    for _ in range(1000):
        metrics.record_arrival(busy=True)
        clock.time_s += 0.005
        metrics.record_time(busy=True)
    clock.time_s += 0.02
    assert metrics.load(busy=False) > 0.95, "a short gap"
    clock.time_s += BUSY_S
    assert metrics.load(busy=False) <= math.exp(-1), "at most the busy fraction"
    metrics.record_arrival(busy=False)
    assert metrics.load(busy=False) < 0.3, "also when requests come again"
