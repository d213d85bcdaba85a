"""Predictors without a collection: which one answers, and what is shipped."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import InputError
from sparseflow.latency import Predictor, first_answer, predict
from sparseflow.latency.graph.analysis import analyze
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.measure.peaks import Peaks, parse_peaks
from sparseflow.latency.model.features import make_features
from sparseflow.latency.model.kernel_regressor import RATIO
from tests.latency.conftest import MadeUp, of_this_machine

PEAKS = Peaks(flops_per_s=1e10, bytes_per_s=1e9, launch_ms=0.01)


@pytest.fixture
def shipped(made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Predictor]:
    """Return the shipped predictors: one of another device. Directory and cache are empty."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))
    regressor = replace(made_up.predictor.regressor, kind=RATIO)
    update = {"origin": "shipped", "peaks": PEAKS, "regressor": regressor}
    predictors = [made_up.predictor.model_copy(update=update)]
    monkeypatch.setattr(first_answer, "load_shipped", lambda kind: predictors)
    return predictors


def count_measurements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the measurement of peaks and return the providers that are measured."""
    providers: list[str] = []

    def measure(provider: str, **settings: object) -> Peaks:
        providers.append(provider)
        return replace(PEAKS, flops_per_s=2e10)

    monkeypatch.setattr(first_answer, "measure_peaks", measure)
    return providers


def test_shipped_predictors_fit_current_features(made_up: MadeUp) -> None:
    names = sorted(entry.name for entry in (files("sparseflow.latency") / "data").iterdir())
    predictors = [*first_answer.load_shipped("cpu"), *first_answer.load_shipped("cuda")]
    assert len(predictors) == len(names)
    assert all(map(str.startswith, names, [predictor.fingerprint.kind for predictor in predictors]))
    features = make_features(made_up.graphs[0].kernels[0])
    assert predictors
    for predictor in predictors:
        assert predictor.origin == "shipped" and predictor.peaks is not None
        assert predictor.regressor.kind == RATIO
        assert {*predictor.regressor.encoder.numbers, *predictor.regressor.encoder.categories} == set(
            features
        )
        assert predictor.predict(made_up.graphs[0]).mean_ms > 0.0
    for entry in (files("sparseflow.latency") / "data").iterdir():
        # The predictor of a GPU also has trees for the time to issue a kernel.
        assert len(entry.read_bytes()) < (2.5e6 if entry.name.startswith("cuda") else 1e6)


def test_find_predictor_order(
    shipped: list[Predictor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = count_measurements(monkeypatch)
    # Another device is shipped: its predictor is transferred once and cached.
    transferred = first_answer.find_predictor()
    assert transferred.origin == "peaks" and transferred.peaks == replace(PEAKS, flops_per_s=2e10)
    assert first_answer.find_predictor().measured_s == transferred.measured_s
    assert measured == ["CPUExecutionProvider"]

    # This device with another version of onnxruntime and another number of CPUs is shipped.
    local = of_this_machine(shipped[0])
    fingerprint = replace(local.fingerprint, ort_version="1.0", cores=64)
    shipped.append(local.model_copy(update={"fingerprint": fingerprint}))
    answer = first_answer.find_predictor()
    assert answer.origin == "shipped"
    answer.fingerprint.check_local_device()

    path = first_answer.get_calibrated_path(answer.fingerprint)
    answer.model_copy(update={"origin": "calibrated"}).save(path)
    assert path.is_relative_to(tmp_path / "cache")
    assert first_answer.find_predictor().origin == "calibrated"

    trained = answer.model_copy(update={"origin": "trained"})
    trained.save("predictor.json")
    assert first_answer.find_predictor().origin == "trained"
    assert first_answer.find_predictor(path).origin == "calibrated"
    assert first_answer.find_predictor(peaks=PEAKS).origin == "peaks"
    with pytest.raises(InputError, match="exclude"):
        first_answer.find_predictor("predictor.json", peaks=PEAKS)


def test_find_predictor_ignores_foreign_cache(shipped: list[Predictor]) -> None:
    shipped.append(of_this_machine(shipped[0]))
    fingerprint = DeviceFingerprint.from_local_device()
    path = first_answer.get_calibrated_path(fingerprint)
    shipped[0].model_copy(update={"origin": "calibrated"}).save(path)
    assert first_answer.find_predictor().origin == "shipped"
    path.write_text("{", encoding="utf-8")
    assert first_answer.find_predictor().origin == "shipped"


def test_find_predictor_without_shipped_raises(
    shipped: list[Predictor], monkeypatch: pytest.MonkeyPatch
) -> None:
    count_measurements(monkeypatch)
    shipped.clear()
    with pytest.raises(InputError, match="quickstart"):
        first_answer.find_predictor()


def test_predict_first_answer_says_so(
    shipped: list[Predictor], made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    count_measurements(monkeypatch)
    path = made_up.models[0]
    first = predict(path)
    assert first.origin == "peaks" and "calibrate" in " ".join(first.notes)
    low, high = first.interval
    trained_low, trained_high = made_up.predictor.predict(analyze(path)).interval
    assert high / low > trained_high / trained_low
    with pytest.raises(InputError, match="idle measurements only"):
        predict(path, load={"others": 0.9})


def test_parse_peaks() -> None:
    assert parse_peaks("flops=1e10,bytes=1e9,launch_us=10") == PEAKS
    for text in ("", "flops=1", "flops=1,bytes=2,launch_us=0", "flops=1,bytes=x,launch_us=1",
                 "flops=1,flops=2,bytes=1,launch_us=1", "flops=1,bytes=1,launch_us=nan", "a=1"):  # fmt: skip
        with pytest.raises(InputError, match="--peaks"):
            parse_peaks(text)
