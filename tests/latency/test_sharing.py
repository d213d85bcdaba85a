"""Sharing a device with a load: what holds for any parameters, what is learned back, single runs, records."""

from __future__ import annotations

import itertools
import json
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

from sparseflow.errors import DeviceError, FileFormatError
from sparseflow.latency.runner import quantile
from sparseflow.latency.sharing import Observed, Sharing

CPU = Sharing(
    metric="others", calm=0.05, scale=0.95, power=1.1, presence=0.02, delays=(1.0, 1.5, 0.5), wait_ms=2.0,
    yields=False, cycle_ms=100.0, jitter=tuple(0.98 + 0.04 * n / 40 for n in range(41)),
)  # fmt: skip
GPU = replace(CPU, metric="busy", yields=True, delays=(0.5, 1.0, 0.3))
DEVICES = pytest.mark.parametrize("device", [CPU, GPU], ids=["keeps", "yields"])

milliseconds = st.floats(1e-3, 1e3)
loads = st.floats(0.0, 1.0)
sharings = st.builds(
    Sharing,
    metric=st.just("busy"),
    calm=st.floats(0.0, 0.9),
    scale=st.floats(0.3, 2.0),
    power=st.floats(0.3, 2.0),
    presence=st.floats(0.0, 0.5),
    delays=st.tuples(*[st.floats(0.0, 20.0)] * 3),
    wait_ms=st.sampled_from([0.1, 1.0, 12.0]),
    yields=st.booleans(),
    cycle_ms=st.sampled_from([20.0, 100.0, 400.0]),
    jitter=st.just(CPU.jitter),
)


@settings(deadline=None)
@given(sharings, milliseconds, st.floats(0.0, 1e4), st.lists(loads, min_size=2, max_size=6))
def test_a_slowdown_is_1_without_load_never_below_and_grows_with_it(
    sharing: Sharing, rest: float, delay: float, levels: list[float]
) -> None:
    assert sharing.mean_ms(rest, delay, 0.0) == pytest.approx(rest, rel=1e-12)
    assert sharing.mean_ms(rest, delay, sharing.calm) == pytest.approx(rest, rel=1e-12)
    found = [sharing.mean_ms(rest, delay, level) / rest for level in sorted(levels)]
    assert found[0] >= 1.0 - 1e-12
    assert all(more >= less * (1.0 - 1e-12) for less, more in itertools.pairwise(found))


@settings(deadline=None)
@given(sharings, milliseconds, st.lists(st.floats(0.0, 50.0), min_size=2, max_size=6), loads)
def test_who_waits_longer_is_slowed_more(
    sharing: Sharing, rest: float, delays: list[float], load: float
) -> None:
    found = [sharing.mean_ms(rest, delay, load) for delay in sorted(delays)]
    assert all(more >= less * (1.0 - 1e-6) for less, more in itertools.pairwise(found))


@settings(deadline=None, max_examples=50)
@given(sharings, st.floats(0.1, 100.0), st.floats(0.0, 1e3), loads)
def test_no_run_is_faster_than_the_fastest_at_rest(
    sharing: Sharing, rest: float, delay: float, load: float
) -> None:
    runs = sharing.runs(rest, delay, load, count=50)
    assert runs.shape == (50,) and runs.min() >= rest * sharing.jitter[0] * (1.0 - 1e-6)


def observed(
    device: Sharing, levels: Sequence[float], *, seed: int = 0, noise: float = 0.0
) -> list[Observed]:
    """Kernels and models of many sizes and mixes of waits, beside loads on a device that follows a rule."""
    generator = random.Random(seed)
    found = []
    for number in range(18):
        whole = number % 3 == 0
        first, second = sorted((generator.random(), generator.random()))
        waits = (first, second - first, 1.0 - second)
        rest = 10.0 ** (generator.uniform(0.0, 1.5) if whole else generator.uniform(-2.0, 0.0))
        delay = device.delay_ms(rest, waits)
        for level in levels:
            runs = device.runs(rest, delay, level, count=300, seed=number) if whole else ()
            mean = device.mean_ms(rest, delay, level) * generator.gauss(1.0, noise)
            ratios = tuple(float(run) / rest for run in runs)
            found.append(
                Observed(
                    rest_ms=rest,
                    waits=waits,
                    load=level,
                    alone=device.share(level),
                    mean_ms=mean,
                    ratios=ratios,
                    whole=whole,
                )
            )
    return found


def errors(found: Sharing, truth: list[Observed]) -> list[float]:
    return [
        abs(found.mean_ms(o.rest_ms, found.delay_ms(o.rest_ms, o.waits), o.load) / o.mean_ms - 1.0)
        for o in truth
    ]


LEFT_OUT = pytest.mark.parametrize(("seen", "left_out"), [((0.3, 0.9), 0.6), ((0.3, 0.6), 0.9)])


@DEVICES
@LEFT_OUT
def test_a_device_is_learned_back(device: Sharing, seen: tuple[float, ...], left_out: float) -> None:
    true = replace(device, scale=1.0, power=1.0, presence=0.0)
    found = Sharing.fit(observed(true, seen), true.metric, true.calm, true.jitter)
    assert (found.yields, found.metric, found.calm) == (true.yields, true.metric, true.calm)
    assert (found.scale, found.power, *found.delays) == pytest.approx((1.0, 1.0, *true.delays), rel=0.01)
    assert found.wait_ms == true.wait_ms or not true.yields
    assert max(errors(found, observed(true, [left_out], seed=5))) < 0.01


@DEVICES
@LEFT_OUT
def test_a_level_left_out_is_right_on_average_though_latencies_scatter(
    device: Sharing, seen: tuple[float, ...], left_out: float
) -> None:
    true = replace(device, scale=1.0, power=1.0)
    found = Sharing.fit(observed(true, seen, noise=0.02), true.metric, true.calm, true.jitter)
    assert found.yields == true.yields
    assert statistics.fmean(errors(found, observed(true, [left_out], seed=5))) < 0.05


@DEVICES
def test_a_level_between_is_right_within_a_tenth_though_readings_are_off_as_well(device: Sharing) -> None:
    found = Sharing.fit(observed(device, (0.3, 0.9), noise=0.02), device.metric, device.calm, device.jitter)
    assert found.yields == device.yields
    assert max(errors(found, observed(device, [0.6], seed=5))) < 0.10


@DEVICES
def test_the_spread_of_single_runs_is_learned_from_whole_models(device: Sharing) -> None:
    found = Sharing.fit(observed(device, (0.4, 0.8)), device.metric, device.calm, device.jitter)
    assert found.jitter == pytest.approx(device.jitter)
    for rest in (2.0, 20.0):
        waits = (0.4, 0.3, 0.3)
        runs = [
            [float(run) for run in one.runs(rest, one.delay_ms(rest, waits), 0.5)] for one in (found, device)
        ]
        for q in (0.5, 0.95):
            assert quantile(runs[0], q) == pytest.approx(quantile(runs[1], q), rel=0.1)


def test_without_observations_load_changes_nothing() -> None:
    found = Sharing.fit([], "others", 0.1, [])
    assert found.mean_ms(3.0, found.delay_ms(3.0, (0.2, 0.3, 0.5)), 1.0) == pytest.approx(3.0)
    assert set(found.runs(3.0, 0.0, 1.0, count=10)) == {3.0}


@pytest.mark.parametrize("faster", [1.0, 0.8])
def test_what_load_does_not_slow_is_learned_to_be_unmoved(faster: float) -> None:
    seen = [replace(one, mean_ms=one.rest_ms * faster, ratios=()) for one in observed(CPU, (0.4, 0.8))]
    found = Sharing.fit(seen, "others", 0.0, [])
    assert max(errors(found, [replace(one, mean_ms=one.rest_ms) for one in seen])) < 0.02


@DEVICES
@pytest.mark.parametrize("rest", [0.5, 5.0, 80.0])
@pytest.mark.parametrize("load", [0.3, 0.7, 1.0])
def test_runs_take_the_mean_on_average_and_follow_from_the_seed(
    device: Sharing, rest: float, load: float
) -> None:
    delay = device.delay_ms(rest, (0.3, 0.4, 0.3))
    runs = device.runs(rest, delay, load, count=20000)
    assert runs.mean() == pytest.approx(device.mean_ms(rest, delay, load), rel=0.06)
    again, other = (device.runs(rest, delay, load, count=20000, seed=seed) for seed in (0, 1))
    assert (runs == again).all() and (runs != other).any()


def test_runs_without_load_have_the_jitter_and_nothing_else() -> None:
    runs = [float(run) for run in CPU.runs(2.0, 5.0, CPU.calm)]
    assert 2.0 * CPU.jitter[0] <= min(runs) and max(runs) <= 2.0 * CPU.jitter[-1]
    assert [quantile(runs, q) for q in (0.1, 0.5, 0.9)] == pytest.approx([1.968, 2.0, 2.032], rel=0.005)


def test_short_runs_meet_the_load_or_do_not() -> None:
    runs = replace(CPU, presence=0.0, jitter=(1.0, 1.0), cycle_ms=400.0).runs(0.1, 1.0, 0.5)
    assert quantile([float(run) for run in runs], 0.5) == pytest.approx(0.1)
    assert runs.max() > 1.9


def test_a_reading_without_the_metric_is_refused_with_what_it_holds() -> None:
    assert CPU.load_of({"busy": 0.9, "others": 0.4}) == 0.4
    with pytest.raises(DeviceError, match=r"needs the metric `others`.*holds busy, dram"):
        CPU.load_of({"busy": 0.9, "dram": 0.1})
    with pytest.raises(DeviceError, match="holds nothing"):
        CPU.load_of({})


@settings(deadline=None)
@given(sharings)
def test_a_record_is_read_back(sharing: Sharing) -> None:
    assert Sharing.from_dict(json.loads(json.dumps(sharing.to_dict()))) == sharing


@pytest.mark.parametrize(
    "change",
    [
        {"scale": 0.0},
        {"power": float("nan")},
        {"delays": [1.0, 1.0]},
        {"delays": [1.0, 1.0, -0.1]},
        {"delays": 1.0},
        {"jitter": [1.0]},
        {"jitter": [1.0, 0.0]},
        {"jitter": None},
        {"wait_ms": "long"},
        {"wait_ms": float("inf")},
        {"cycle_ms": -1.0},
        {"calm": "low"},
        {"calm": None},
        {"calm": float("nan")},
        {"metric": None},
        {"surprise": 1.0},
    ],
)
def test_a_damaged_record_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FileFormatError, match="how the device is shared cannot be read"):
        Sharing.from_dict(CPU.to_dict() | change)


@pytest.mark.parametrize("record", [{}, {"metric": "busy"}, [], None])
def test_what_is_no_record_is_refused(record: Any) -> None:
    with pytest.raises(FileFormatError, match="how the device is shared cannot be read"):
        Sharing.from_dict(record)
