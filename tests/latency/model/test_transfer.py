"""Transfer of a predictor to another device, and its calibration there."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import InputError
from sparseflow.latency.measure.peaks import Peaks
from sparseflow.latency.model.calibration import calibrate_predictor
from sparseflow.latency.model.corrections import (
    LAUNCH,
    NO_CORRECTIONS,
    CorrectionSample,
    KernelCorrections,
)
from sparseflow.latency.model.kernel_regressor import RATIO, KernelRegressor
from sparseflow.latency.model.predictor import Predictor
from sparseflow.latency.model.transfer import TRANSFER_INTERVAL, transfer
from tests.latency.conftest import MadeUp
from tests.latency.synthetic import BYTES_PER_S, FLOPS_PER_S, LAUNCH_MS, rest_ms

PEAKS = Peaks(flops_per_s=FLOPS_PER_S, bytes_per_s=BYTES_PER_S, launch_ms=LAUNCH_MS)


@pytest.fixture(scope="module")
def source(made_up: MadeUp) -> Predictor:
    names = made_up.data.list_device_kernels()
    kernels = [made_up.data.kernels[name] for name in names]
    regressor = KernelRegressor.fit(kernels, [rest_ms(kernel) for kernel in kernels], RATIO)
    return made_up.predictor.model_copy(update={"peaks": PEAKS, "regressor": regressor, "measured_ms": {}})


def test_transfer_scales_with_peaks(source: Predictor, made_up: MadeUp) -> None:
    slower = Peaks(flops_per_s=FLOPS_PER_S / 3.0, bytes_per_s=BYTES_PER_S / 3.0, launch_ms=3.0 * LAUNCH_MS)
    transferred = transfer(source, source.fingerprint, slower)
    assert transferred.origin == "peaks" and transferred.idle_interval == TRANSFER_INTERVAL
    assert transferred.kernel_intervals.frequent == transferred.kernel_intervals.rare == TRANSFER_INTERVAL
    for graph in made_up.graphs:
        ratio = transferred.predict(graph).mean_ms / source.predict(graph).mean_ms
        assert ratio == pytest.approx(3.0, rel=0.02)
    # Only the launch becomes cheaper.
    quick = transfer(source, source.fingerprint, replace(PEAKS, launch_ms=LAUNCH_MS / 10.0))
    graph = made_up.graphs[0]
    assert source.predict(graph).mean_ms / 10.0 < quick.predict(graph).mean_ms < source.predict(graph).mean_ms


def test_transfer_needs_peaks_and_ratios(source: Predictor, made_up: MadeUp) -> None:
    with pytest.raises(InputError, match="no peaks"):
        transfer(made_up.predictor.model_copy(update={"peaks": None}), source.fingerprint, PEAKS)
    forest = replace(source.regressor, kind="xgboost")
    with pytest.raises(InputError, match="xgboost"):
        transfer(source.model_copy(update={"regressor": forest}), source.fingerprint, PEAKS)


def test_corrections_follow_classes() -> None:
    factors = {"convolution": 2.0, LAUNCH: 1.3, "product": 1.0}
    samples = [
        CorrectionSample(class_ms={name: ms}, measured_ms=ms * factor, is_network=False)
        for name, factor in factors.items()
        for ms in (0.1, 1.0, 10.0, 20.0)
    ]
    corrections = KernelCorrections.fit(samples)
    for name, factor in factors.items():
        # Shrunken, so between the common factor and its own.
        low, high = sorted((corrections.common, factor))
        assert low < corrections.get_factor(name) < high
        assert corrections.get_factor(name) == pytest.approx(factor, rel=0.12)
    assert corrections.get_factor("pooling") == corrections.common
    outlier = CorrectionSample(class_ms={"product": 1.0}, measured_ms=1000.0, is_network=False)
    assert KernelCorrections.fit([*samples, outlier]).get_factor("product") < 1.5
    assert KernelCorrections.fit([]) == NO_CORRECTIONS


def test_calibrate_corrects_networks(source: Predictor, made_up: MadeUp) -> None:
    networks = [1.5 * source.predict(graph).mean_ms for graph in made_up.graphs]
    both = calibrate_predictor(source, [], [], made_up.graphs, networks)
    assert max(abs(ratio - 1.5) for ratio in both.ratios_before) < 1e-6
    assert max(abs(ratio - 1.0) for ratio in both.ratios_after) < 0.1
    for graph, expected in zip(made_up.graphs, networks, strict=True):
        prediction = both.predictor.predict(graph)
        assert prediction.mean_ms == pytest.approx(expected, rel=0.1)
        assert prediction.interval[0] <= expected <= prediction.interval[1]


def test_calibrate_fits_intervals_of_kernels(source: Predictor, made_up: MadeUp) -> None:
    kernels = [made_up.data.kernels[name] for name in made_up.data.list_device_kernels()]
    noise = [1.3 if number % 4 == 0 else 1.0 for number in range(len(kernels))]
    kernel_ms = [rest_ms(kernel) * factor for kernel, factor in zip(kernels, noise, strict=True)]
    networks = [source.predict(graph).mean_ms for graph in made_up.graphs]
    calibrated = calibrate_predictor(source, kernels, kernel_ms, made_up.graphs, networks).predictor
    intervals = calibrated.kernel_intervals
    assert intervals.frequent.samples == len(kernels)
    assert 1.1 < intervals.frequent.high < 1.5 and intervals.frequent.low > 0.7
    assert intervals.rare.high >= source.kernel_intervals.rare.high


def test_calibrate_twice_replaces_corrections(source: Predictor, made_up: MadeUp) -> None:
    graph = made_up.graphs[0]
    expected = 1.5 * source.predict(graph).mean_ms
    once = calibrate_predictor(source, [], [], [graph], [expected]).predictor
    repeated = calibrate_predictor(once, [], [], [graph], [expected]).predictor
    assert repeated.corrections == once.corrections != NO_CORRECTIONS


def test_corrections_of_launches_do_not_hide_networks() -> None:
    launches = [
        CorrectionSample(class_ms={LAUNCH: 0.01}, measured_ms=0.005, is_network=False) for _ in range(30)
    ]
    networks = [
        CorrectionSample(class_ms={LAUNCH: 0.1, "product": 10.0}, measured_ms=15.05, is_network=True)
        for _ in range(5)
    ]
    corrections = KernelCorrections.fit([*launches, *networks])
    assert corrections.get_factor(LAUNCH) == pytest.approx(0.5, rel=0.05)
    assert networks[0].predict_ms(corrections) == pytest.approx(15.05, rel=0.05)
