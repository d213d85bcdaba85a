"""Contention with a load: invariants, fits, single runs and records."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx")
pytest.importorskip("scipy")

from sparseflow.errors import DeviceError, InputError
from sparseflow.latency.measure.runner import quantile
from sparseflow.latency.model import contention
from sparseflow.latency.model.contention import ContentionModel, ContentionSample
from tests.latency.records import from_record, to_record

CPU = ContentionModel(
    metric="others",
    idle_load=0.05,
    scale=0.95,
    power=1.1,
    idle_overhead=0.02,
    delay_factors=(1.0, 1.5, 0.5),
    slice_ms=2.0,
    yields_device=False,
    cycle_ms=100.0,
    jitter=tuple(0.98 + 0.04 * n / 40 for n in range(41)),
    samples=1,
    highest_load=0.9,
)
GPU = replace(CPU, metric="busy", yields_device=True, delay_factors=(0.5, 1.0, 0.3))
DEVICES = pytest.mark.parametrize("device", [CPU, GPU], ids=["keeps", "yields_device"])

milliseconds = st.floats(1e-3, 1e3)
loads = st.floats(0.0, 1.0)
sharings = st.builds(
    ContentionModel,
    metric=st.just("busy"),
    idle_load=st.floats(0.0, 0.9),
    scale=st.floats(0.3, 2.0),
    power=st.floats(0.3, 2.0),
    idle_overhead=st.floats(0.0, 0.5),
    delay_factors=st.tuples(*[st.floats(0.0, 20.0)] * 3),
    slice_ms=st.sampled_from([0.1, 1.0, 12.0]),
    yields_device=st.booleans(),
    cycle_ms=st.sampled_from([20.0, 100.0, 400.0]),
    jitter=st.just(CPU.jitter),
    samples=st.just(1),
    highest_load=st.just(0.9),
)


@given(sharings, milliseconds, st.floats(0.0, 1e4), st.lists(loads, min_size=2, max_size=6))
def test_slowdown_monotone_and_at_least_one(
    sharing: ContentionModel, idle_ms: float, delay: float, levels: list[float]
) -> None:
    assert sharing.predict_mean_ms(idle_ms, delay, 0.0) == pytest.approx(idle_ms, rel=1e-12)
    assert sharing.predict_mean_ms(idle_ms, delay, sharing.idle_load) == pytest.approx(idle_ms, rel=1e-12)
    slowdowns = [sharing.predict_mean_ms(idle_ms, delay, level) / idle_ms for level in sorted(levels)]
    assert slowdowns[0] >= 1.0 - 1e-12
    assert all(more >= less * (1.0 - 1e-12) for less, more in itertools.pairwise(slowdowns))


@given(sharings, milliseconds, st.lists(st.floats(0.0, 50.0), min_size=2, max_size=6), loads)
def test_latency_grows_with_delay(
    sharing: ContentionModel, idle_ms: float, delays: list[float], load: float
) -> None:
    means_ms = [sharing.predict_mean_ms(idle_ms, delay, load) for delay in sorted(delays)]
    assert all(more >= less * (1.0 - 1e-6) for less, more in itertools.pairwise(means_ms))


@settings(max_examples=50)
@given(sharings, st.floats(0.1, 100.0), st.floats(0.0, 1e3), loads)
def test_runs_not_faster_than_idle(
    sharing: ContentionModel, idle_ms: float, delay: float, load: float
) -> None:
    runs = sharing.sample_runs(idle_ms, delay, load, num_runs=50)
    assert runs.shape == (50,) and runs.min() >= idle_ms * sharing.jitter[0] * (1.0 - 1e-6)


def observed(
    device: ContentionModel, levels: Sequence[float], *, seed: int = 0, noise: float = 0.0
) -> list[ContentionSample]:
    """Sample random kernels and models under load on a device that follows a rule."""
    generator = random.Random(seed)
    samples = []
    for number in range(18):
        is_model = number % 3 == 0
        first, second = sorted((generator.random(), generator.random()))
        waits = (first, second - first, 1.0 - second)
        idle_ms = 10.0 ** (generator.uniform(0.0, 1.5) if is_model else generator.uniform(-2.0, 0.0))
        delay = device.compute_delay_ms(idle_ms, waits)
        for level in levels:
            runs = device.sample_runs(idle_ms, delay, level, num_runs=300, seed=number) if is_model else ()
            mean = device.predict_mean_ms(idle_ms, delay, level) * generator.gauss(1.0, noise)
            ratios = tuple(float(run) / idle_ms for run in runs)
            samples.append(
                ContentionSample(
                    idle_ms=idle_ms,
                    bottleneck_shares=waits,
                    load=level,
                    achieved=device.compute_busy_share(level),
                    mean_ms=mean,
                    ratios=ratios,
                    is_model=is_model,
                )
            )
    return samples


def errors(fitted: ContentionModel, truth: list[ContentionSample]) -> list[float]:
    return [
        abs(
            fitted.predict_mean_ms(o.idle_ms, fitted.compute_delay_ms(o.idle_ms, o.bottleneck_shares), o.load)
            / o.mean_ms
            - 1.0
        )
        for o in truth
    ]


LEFT_OUT = pytest.mark.parametrize(("levels_seen", "left_out"), [((0.3, 0.9), 0.6), ((0.3, 0.6), 0.9)])


@DEVICES
@LEFT_OUT
def test_fit_recovers_device(
    device: ContentionModel, levels_seen: tuple[float, ...], left_out: float
) -> None:
    true = replace(device, scale=1.0, power=1.0, idle_overhead=0.0)
    fitted = ContentionModel.fit(observed(true, levels_seen), true.metric, true.idle_load, true.jitter)
    assert (fitted.yields_device, fitted.metric, fitted.idle_load) == (
        true.yields_device,
        true.metric,
        true.idle_load,
    )
    assert (fitted.scale, fitted.power, *fitted.delay_factors) == pytest.approx(
        (1.0, 1.0, *true.delay_factors), rel=0.01
    )
    assert fitted.slice_ms == true.slice_ms or not true.yields_device
    assert max(errors(fitted, observed(true, [left_out], seed=5))) < 0.01


@pytest.fixture
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the grid of the fit to values around the true ones."""
    monkeypatch.setattr(contention, "_SLICES_MS", (0.5, 1.5, 2.0, 2.5, 6.0))
    monkeypatch.setattr(contention, "_CYCLES_MS", (50.0, 100.0, 200.0))


@pytest.mark.usefixtures("small_grid")
@DEVICES
@LEFT_OUT
def test_fit_noisy_predicts_held_out_level(
    device: ContentionModel, levels_seen: tuple[float, ...], left_out: float
) -> None:
    true = replace(device, scale=1.0, power=1.0)
    fitted = ContentionModel.fit(
        observed(true, levels_seen, noise=0.02), true.metric, true.idle_load, true.jitter
    )
    assert fitted.yields_device == true.yields_device
    assert statistics.fmean(errors(fitted, observed(true, [left_out], seed=5))) < 0.05


@pytest.mark.usefixtures("small_grid")
@DEVICES
def test_fit_biased_readings_interpolates_level(
    device: ContentionModel,
) -> None:
    fitted = ContentionModel.fit(
        observed(device, (0.3, 0.9), noise=0.02), device.metric, device.idle_load, device.jitter
    )
    assert fitted.yields_device == device.yields_device
    assert max(errors(fitted, observed(device, [0.6], seed=5))) < 0.10


@pytest.mark.usefixtures("small_grid")
@DEVICES
def test_fit_recovers_quantiles(device: ContentionModel) -> None:
    fitted = ContentionModel.fit(observed(device, (0.4, 0.8)), device.metric, device.idle_load, device.jitter)
    assert fitted.jitter == pytest.approx(device.jitter)
    for idle_ms in (2.0, 20.0):
        waits = (0.4, 0.3, 0.3)
        runs = [
            [float(run) for run in model.sample_runs(idle_ms, model.compute_delay_ms(idle_ms, waits), 0.5)]
            for model in (fitted, device)
        ]
        for q in (0.5, 0.95):
            assert quantile(runs[0], q) == pytest.approx(quantile(runs[1], q), rel=0.1)


def test_fit_without_samples_refuses_load() -> None:
    fitted = ContentionModel.fit([], "others", 0.1, [])
    assert fitted.get_load({"others": 0.1}) == 0.1
    for share in (0.11, 1.0):
        with pytest.raises(InputError, match="idle measurements only"):
            fitted.get_load({"others": share})
    assert fitted.predict_mean_ms(3.0, fitted.compute_delay_ms(3.0, (0.2, 0.3, 0.5)), 1.0) == pytest.approx(
        3.0
    )
    assert set(fitted.sample_runs(3.0, 0.0, 1.0, num_runs=10)) == {3.0}


def test_fit_ignores_share_of_load_beside_other_work() -> None:
    # Other work takes the CPU besides the load, which reports its own share only.
    samples = [replace(sample, achieved=0.1) for sample in observed(CPU, (0.4, 0.6, 0.9))]
    assert max(errors(ContentionModel.fit(samples, "others", CPU.idle_load, []), samples)) < 0.1


@pytest.mark.parametrize("faster", [1.0, 0.8])
def test_fit_unaffected_targets(faster: float) -> None:
    samples = [
        replace(sample, mean_ms=sample.idle_ms * faster, ratios=()) for sample in observed(CPU, (0.4, 0.8))
    ]
    fitted = ContentionModel.fit(samples, "others", 0.0, [])
    assert max(errors(fitted, [replace(sample, mean_ms=sample.idle_ms) for sample in samples])) < 0.02


def test_runs_much_longer_than_cycle() -> None:
    device = replace(CPU, cycle_ms=1e-6)
    runs = device.sample_runs(50.0, 50.0, 0.6, num_runs=200)
    expected = device.predict_mean_ms(50.0, 50.0, 0.6)
    assert statistics.fmean(runs.tolist()) == pytest.approx(expected, rel=0.05)


@DEVICES
@pytest.mark.parametrize("idle_ms", [0.5, 5.0, 80.0])
@pytest.mark.parametrize("load", [0.3, 0.7, 1.0])
def test_runs_match_mean_and_seed(device: ContentionModel, idle_ms: float, load: float) -> None:
    delay = device.compute_delay_ms(idle_ms, (0.3, 0.4, 0.3))
    runs = device.sample_runs(idle_ms, delay, load, num_runs=20000)
    assert runs.mean() == pytest.approx(device.predict_mean_ms(idle_ms, delay, load), rel=0.06)
    repeated, other = (device.sample_runs(idle_ms, delay, load, num_runs=20000, seed=seed) for seed in (0, 1))
    assert (runs == repeated).all() and (runs != other).any()


def test_runs_without_load_follow_jitter() -> None:
    runs = [float(run) for run in CPU.sample_runs(2.0, 5.0, CPU.idle_load)]
    assert 2.0 * CPU.jitter[0] <= min(runs) and max(runs) <= 2.0 * CPU.jitter[-1]
    assert [quantile(runs, q) for q in (0.1, 0.5, 0.9)] == pytest.approx([1.968, 2.0, 2.032], rel=0.005)


def test_short_runs_are_bimodal() -> None:
    runs = replace(CPU, idle_overhead=0.0, jitter=(1.0, 1.0), cycle_ms=400.0).sample_runs(0.1, 1.0, 0.5)
    assert quantile([float(run) for run in runs], 0.5) == pytest.approx(0.1)
    assert runs.max() > 1.9


def test_get_load_missing_metric_raises() -> None:
    assert CPU.get_load({"busy": 0.9, "others": 0.4}) == 0.4
    with pytest.raises(DeviceError, match=r"`others`"):
        CPU.get_load({"busy": 0.9, "dram": 0.1})
    with pytest.raises(DeviceError):
        CPU.get_load({})


@given(sharings)
def test_contention_round_trip(sharing: ContentionModel) -> None:
    assert from_record(ContentionModel, to_record(sharing)) == sharing


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"power": float("nan")},
        {"delay_factors": [1.0, 1.0]},
        {"delay_factors": [1.0, 1.0, -0.1]},
        {"delay_factors": 1.0},
        {"jitter": [1.0]},
        {"jitter": [1.0, 0.0]},
        {"jitter": None},
        {"slice_ms": "long"},
        {"slice_ms": float("inf")},
        {"cycle_ms": -1.0},
        {"idle_load": "low"},
        {"idle_load": None},
        {"idle_load": float("nan")},
        {"metric": None},
        {"surprise": 1.0},
    ],
)
def test_contention_damaged_record_raises(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        from_record(ContentionModel, to_record(CPU) | change)


@pytest.mark.parametrize("record", [{}, {"metric": "busy"}, [], None])
def test_contention_foreign_record_raises(record: Any) -> None:
    with pytest.raises(ValueError):
        from_record(ContentionModel, record)
