"""Timing with a fake clock that only the timed work advances."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core import timing
from sparseflow.errors import DeviceError, InputError


class FakeClock:
    """Replacement for the time module; only work advances it."""

    def __init__(self) -> None:
        self.time_ns = 1_000

    def perf_counter_ns(self) -> int:
        return self.time_ns

    def work(self, ms: float, log: list[str] | None = None, name: str = "") -> Callable[[], None]:
        def run() -> None:
            self.time_ns += round(ms * 1e6)
            if log is not None:
                log.append(name)

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    fake = FakeClock()
    monkeypatch.setattr(timing, "time", fake)
    return fake


def test_measure_keeps_every_sample_after_the_warmup(clock: FakeClock) -> None:
    log: list[str] = []
    result = timing.measure(clock.work(2.5, log, "x"), warmup=4, repeats=7)
    assert len(log) == 11
    assert result.times_ms == (2.5,) * 7
    assert (result.timer, result.device, result.warmup) == ("perf_counter", "cpu", 4)
    assert result.median_ms == result.min_ms == result.quantile_ms(0.95) == 2.5


def test_measure_divides_by_calls_per_sample(clock: FakeClock) -> None:
    log: list[str] = []
    result = timing.measure(clock.work(1.5, log), warmup=0, repeats=3, calls_per_sample=5)
    assert result.times_ms == (1.5,) * 3
    assert len(log) == 15


def test_measure_with_min_time_continues_sampling(clock: FakeClock) -> None:
    result = timing.measure(clock.work(10.0), warmup=0, repeats=2, min_time_s=0.1)
    assert len(result.times_ms) == 10


def test_measure_of_no_elapsed_time_is_above_0(clock: FakeClock) -> None:
    assert timing.measure(clock.work(0.0), warmup=0, repeats=1).min_ms > 0.0


def test_to_rows_has_labels_and_units(clock: FakeClock) -> None:
    rows = timing.measure(clock.work(1.0), warmup=0, repeats=2).to_rows(layer="conv1")
    assert rows[1] == {
        "layer": "conv1",
        "sample": 1,
        "latency_ms": 1.0,
        "timer": "perf_counter",
        "device": "cpu",
    }


def test_compare_interleaves_candidates_in_random_order(clock: FakeClock) -> None:
    log: list[str] = []
    candidates = {name: clock.work(ms, log, name) for name, ms in (("dense", 3.0), ("a", 2.0), ("b", 6.0))}
    calls: list[tuple[str, float]] = []
    result = timing.compare(
        candidates,
        rounds=30,
        warmup=2,
        baseline="dense",
        seed=5,
        progress=lambda message, fraction: calls.append((message, fraction)),
    )
    timed = log[6:]
    for index, order in enumerate(result.order):
        assert sorted(order) == ["a", "b", "dense"]
        assert timed[3 * index : 3 * index + 3] == list(order)
    assert len(set(result.order)) == 6, "30 rounds of 3 candidates contain every order"
    assert result.ratios("a") == (1.5,) * 30
    assert result.speedup("b") == timing.Interval(median=0.5, low=0.5, high=0.5)
    assert result.speedup("b", baseline="a").median == pytest.approx(1 / 3)
    assert result.fastest() == "a"
    assert calls == [(f"round {count} of 30", count / 30) for count in range(1, 31)]


def test_compare_ratios_are_robust_to_drift(clock: FakeClock) -> None:
    slowness = iter(np.repeat(np.linspace(1.0, 3.0, 12), 2).tolist())

    def drifting(ms: float) -> Callable[[], None]:
        def run() -> None:
            clock.time_ns += round(ms * next(slowness) * 1e6)

        return run

    result = timing.compare(
        {"slow": drifting(4.0), "fast": drifting(2.0)}, rounds=12, warmup=0, baseline="slow", seed=0
    )
    assert result.ratios("fast") == pytest.approx([2.0] * 12)


def test_compare_orders_depend_on_the_seed(clock: FakeClock) -> None:
    def orders(seed: int) -> tuple[tuple[str, ...], ...]:
        work = {"a": clock.work(1.0), "b": clock.work(1.0)}
        return timing.compare(work, rounds=16, warmup=0, baseline="a", seed=seed).order

    assert orders(3) == orders(3) != orders(4)


def test_comparison_to_rows_is_in_measurement_order(clock: FakeClock) -> None:
    result = timing.compare(
        {"a": clock.work(1.0), "b": clock.work(2.0)}, rounds=3, warmup=0, baseline="a", seed=1
    )
    rows = result.to_rows(model="m")
    assert [row["candidate"] for row in rows] == [name for order in result.order for name in order]
    assert {row["position"] for row in rows} == {0, 1}
    assert all(row["latency_ms"] == (1.0 if row["candidate"] == "a" else 2.0) for row in rows)


def test_samples_of_an_unknown_candidate_raises(clock: FakeClock) -> None:
    result = timing.compare({"a": clock.work(1.0)}, rounds=1, warmup=0, baseline="a")
    assert result.samples("a").times_ms == (1.0,)
    with pytest.raises(InputError, match=r"`z`.*: a"):
        result.samples("z")


@pytest.mark.parametrize(
    ("call", "pattern"),
    [
        (lambda: timing.measure(int, repeats=0), r"`repeats` \(=0\)"),
        (lambda: timing.measure(int, warmup=-1), r"`warmup` \(=-1\)"),
        (lambda: timing.measure(int, calls_per_sample=0), r"`calls_per_sample` \(=0\)"),
        (lambda: timing.measure(int, device="tpu"), r"`device` \(='tpu'\)"),
        (lambda: timing.compare({}, rounds=1, baseline="a"), "none"),
        (lambda: timing.compare({"a": int}, rounds=1, baseline="b"), r"`baseline` \(='b'\).*: a"),
        (lambda: timing.compare({"a": int}, rounds=0, baseline="a"), r"`rounds` \(=0\)"),
        (lambda: timing.bootstrap_median([]), "none"),
    ],
)
def test_invalid_input_raises(call: Callable[[], object], pattern: str) -> None:
    with pytest.raises(InputError, match=pattern):
        call()


def test_measure_on_a_missing_gpu_raises() -> None:
    with pytest.raises(DeviceError, match="99"):
        timing.measure(int, device="cuda:99")


def test_compare_propagates_errors_of_candidates() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        timing.compare({"a": int, "b": broken}, rounds=2, warmup=0, baseline="a")


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=30))
def test_bootstrap_median_contains_the_median(values: list[float]) -> None:
    result = timing.bootstrap_median(values)
    assert min(values) <= result.low <= result.median <= result.high <= max(values)
    assert result == timing.bootstrap_median(values)


def test_bootstrap_median_narrows_with_more_values() -> None:
    values = np.random.default_rng(0).normal(10.0, 1.0, 400).tolist()
    interval_20, interval_all = timing.bootstrap_median(values[:20]), timing.bootstrap_median(values)
    assert interval_all.high - interval_all.low < (interval_20.high - interval_20.low) / 2
    assert interval_all.low < 10.0 < interval_all.high


@pytest.mark.gpu
def test_measure_on_gpu_times_the_device() -> None:
    a = torch.ones(4096, 4096, device="cuda")
    long = timing.measure(lambda: [a @ a for _ in range(20)], device="cuda", repeats=5)
    short = timing.measure(lambda: a @ a, device="cuda", repeats=5)
    assert long.timer == "cuda_event"
    assert long.median_ms > 5 * short.median_ms > 0.0
