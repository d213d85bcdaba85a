"""Timing, on a clock that only the timed work moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core import timing
from sparseflow.errors import DeviceError, InputError


class Clock:
    """Stands in for the time module: it stands still unless work is done."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def work(self, ms: float, log: list[str] | None = None, name: str = "") -> Callable[[], None]:
        def run() -> None:
            self.now_ns += round(ms * 1e6)
            if log is not None:
                log.append(name)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in = Clock()
    monkeypatch.setattr(timing, "time", stand_in)
    return stand_in


def test_measure_keeps_every_sample_after_the_warm_up(clock: Clock) -> None:
    log: list[str] = []
    found = timing.measure(clock.work(2.5, log, "x"), warmup=4, repeats=7)
    assert len(log) == 11
    assert found.times_ms == (2.5,) * 7
    assert (found.timer, found.device, found.warmup) == ("perf_counter", "cpu", 4)
    assert found.median_ms == found.min_ms == found.quantile_ms(0.95) == 2.5


def test_measure_divides_by_the_calls_in_a_sample(clock: Clock) -> None:
    log: list[str] = []
    found = timing.measure(clock.work(1.5, log), warmup=0, repeats=3, calls_per_sample=5)
    assert found.times_ms == (1.5,) * 3
    assert len(log) == 15


def test_measure_goes_on_until_the_time_is_filled(clock: Clock) -> None:
    found = timing.measure(clock.work(10.0), warmup=0, repeats=2, min_time_s=0.1)
    assert len(found.times_ms) == 10


def test_time_that_stands_still_is_not_zero(clock: Clock) -> None:
    assert timing.measure(clock.work(0.0), warmup=0, repeats=1).min_ms > 0.0


def test_rows_carry_labels_and_units(clock: Clock) -> None:
    rows = timing.measure(clock.work(1.0), warmup=0, repeats=2).to_rows(layer="conv1")
    assert rows[1] == {
        "layer": "conv1",
        "sample": 1,
        "latency_ms": 1.0,
        "timer": "perf_counter",
        "device": "cpu",
    }


def test_compare_interleaves_and_pairs(clock: Clock) -> None:
    log: list[str] = []
    candidates = {name: clock.work(ms, log, name) for name, ms in (("dense", 3.0), ("a", 2.0), ("b", 6.0))}
    seen: list[tuple[int, int]] = []
    found = timing.compare(
        candidates,
        rounds=30,
        warmup=2,
        baseline="dense",
        seed=5,
        progress=lambda done, total: seen.append((done, total)),
    )
    timed = log[6:]
    for index, order in enumerate(found.order):
        assert sorted(order) == ["a", "b", "dense"]
        assert timed[3 * index : 3 * index + 3] == list(order)
    assert len(set(found.order)) == 6, "thirty rounds of three must meet every order"
    assert found.ratios("a") == (1.5,) * 30
    assert found.speedup("b") == timing.Interval(median=0.5, low=0.5, high=0.5)
    assert found.speedup("b", baseline="a").median == pytest.approx(1 / 3)
    assert found.fastest() == "a"
    assert seen == [(done, 30) for done in range(1, 31)]


def test_compare_pairs_within_a_round_whatever_drifts(clock: Clock) -> None:
    slowness = iter(np.repeat(np.linspace(1.0, 3.0, 12), 2).tolist())

    def drifting(ms: float) -> Callable[[], None]:
        def run() -> None:
            clock.now_ns += round(ms * next(slowness) * 1e6)

        return run

    found = timing.compare(
        {"slow": drifting(4.0), "fast": drifting(2.0)}, rounds=12, warmup=0, baseline="slow", seed=0
    )
    assert found.ratios("fast") == pytest.approx([2.0] * 12)


def test_the_seed_decides_the_orders(clock: Clock) -> None:
    def orders(seed: int) -> tuple[tuple[str, ...], ...]:
        work = {"a": clock.work(1.0), "b": clock.work(1.0)}
        return timing.compare(work, rounds=16, warmup=0, baseline="a", seed=seed).order

    assert orders(3) == orders(3) != orders(4)


def test_comparison_rows_are_in_the_order_measured(clock: Clock) -> None:
    found = timing.compare(
        {"a": clock.work(1.0), "b": clock.work(2.0)}, rounds=3, warmup=0, baseline="a", seed=1
    )
    rows = found.to_rows(model="m")
    assert [row["candidate"] for row in rows] == [name for order in found.order for name in order]
    assert {row["position"] for row in rows} == {0, 1}
    assert all(row["latency_ms"] == (1.0 if row["candidate"] == "a" else 2.0) for row in rows)


def test_candidates_are_looked_up_by_name(clock: Clock) -> None:
    found = timing.compare({"a": clock.work(1.0)}, rounds=1, warmup=0, baseline="a")
    assert found.samples("a").times_ms == (1.0,)
    with pytest.raises(InputError, match=r"no candidate `z`.*: a"):
        found.samples("z")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: timing.measure(int, repeats=0), r"`repeats` \(=0\)"),
        (lambda: timing.measure(int, warmup=-1), r"`warmup` \(=-1\)"),
        (lambda: timing.measure(int, calls_per_sample=0), r"`calls_per_sample` \(=0\)"),
        (lambda: timing.measure(int, device="tpu"), r"`device` \(='tpu'\)"),
        (lambda: timing.compare({}, rounds=1, baseline="a"), "none given"),
        (lambda: timing.compare({"a": int}, rounds=1, baseline="b"), r"`baseline` \(='b'\).*: a"),
        (lambda: timing.compare({"a": int}, rounds=0, baseline="a"), r"`rounds` \(=0\)"),
        (lambda: timing.bootstrap_median([]), "at least one value"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceError, match="GPU 99 was asked for"):
        timing.measure(int, device="cuda:99")


def test_work_that_fails_is_not_hidden() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        timing.compare({"a": int, "b": broken}, rounds=2, warmup=0, baseline="a")


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30))
def test_the_interval_holds_the_median_and_stays_within_the_values(values: list[float]) -> None:
    found = timing.bootstrap_median(values)
    assert min(values) <= found.low <= found.median <= found.high <= max(values)
    assert found == timing.bootstrap_median(values)


def test_the_interval_narrows_with_more_values() -> None:
    values = np.random.default_rng(0).normal(10.0, 1.0, 400).tolist()
    few, many = timing.bootstrap_median(values[:20]), timing.bootstrap_median(values)
    assert many.high - many.low < (few.high - few.low) / 2
    assert many.low < 10.0 < many.high


@pytest.mark.gpu
def test_cuda_events_time_the_device_and_not_the_launch() -> None:
    a = torch.ones(4096, 4096, device="cuda")
    long = timing.measure(lambda: [a @ a for _ in range(20)], device="cuda", repeats=5)
    short = timing.measure(lambda: a @ a, device="cuda", repeats=5)
    assert long.timer == "cuda_event"
    assert long.median_ms > 5 * short.median_ms > 0.0
