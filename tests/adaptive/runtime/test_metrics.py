"""Load and rates, by a clock that the test holds."""

from __future__ import annotations

import math

import pytest

from sparseflow.adaptive.runtime.metrics import BUSY_S, RATE_S, Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_load_follows_work() -> None:
    clock = Clock()
    metrics = Metrics(clock=clock)
    metrics.spent(busy=False)
    assert metrics.load(busy=True) == 0.0
    clock.now += BUSY_S
    assert metrics.load(busy=True) == pytest.approx(1 - math.exp(-1))
    metrics.spent(busy=True)
    clock.now += 100 * BUSY_S
    assert metrics.load(busy=True) == pytest.approx(1.0)
    assert metrics.load(busy=False) == pytest.approx(0.0)


def test_load_of_work_that_comes_and_goes() -> None:
    clock = Clock()
    metrics = Metrics(clock=clock)
    metrics.spent(busy=False)
    for _ in range(3000):
        clock.now += 0.007
        metrics.spent(busy=True)
        clock.now += 0.003
        metrics.spent(busy=False)
    assert metrics.load(busy=False) == pytest.approx(0.7, abs=0.01)


def test_tokens_a_second() -> None:
    clock = Clock()
    metrics = Metrics(clock=clock)
    assert metrics.tokens_per_s() == 0.0
    for _ in range(200):
        clock.now += 0.1
        metrics.generated(3)
    assert metrics.tokens == 600
    assert metrics.tokens_per_s() == pytest.approx(30.0, rel=0.05)
    clock.now += RATE_S / 2
    assert metrics.tokens_per_s() == pytest.approx(15.0, rel=0.1)
    clock.now += RATE_S
    assert metrics.tokens_per_s() == 0.0


def test_a_rate_soon_after_the_start() -> None:
    clock = Clock()
    metrics = Metrics(clock=clock)
    metrics.generated(1)
    clock.now += 0.5
    metrics.generated(4)
    assert metrics.tokens_per_s() == pytest.approx(10.0)
