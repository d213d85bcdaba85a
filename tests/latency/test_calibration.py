"""Calibration on this machine: resumption and the file that `predict` uses."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import InputError
from sparseflow.latency import Predictor, calibrate, calibration, first_answer
from sparseflow.latency.graph import onnx_file
from sparseflow.latency.graph.analysis import analyze
from sparseflow.latency.graph.extraction import is_kernel_model
from sparseflow.latency.measure.blocks import list_blocks, list_training_blocks
from sparseflow.latency.measure.runner import Runner
from tests.latency.conftest import MadeUp, of_this_machine
from tests.latency.synthetic import item_ms

FACTOR = 1.4


@pytest.fixture
def base(made_up: MadeUp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Predictor:
    """Return a shipped predictor of this machine, whose kernels take `FACTOR` times as long today."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))
    predictor = of_this_machine(made_up.predictor).model_copy(update={"origin": "shipped"})
    monkeypatch.setattr(first_answer, "load_shipped", lambda kind: [predictor])
    monkeypatch.setattr(calibration, "list_blocks", lambda: list_blocks()[:3])

    def measure_ms(runner: Runner, seconds: float) -> float:
        is_kernel = is_kernel_model(onnx_file.load_model(runner.path))
        return FACTOR * item_ms(str(runner.path), not is_kernel, "cpu")

    monkeypatch.setattr(calibration, "measure_idle_ms", measure_ms)
    return predictor


def test_calibrate_writes_default_predictor(base: Predictor, made_up: MadeUp, tmp_path: Path) -> None:
    reports: list[float] = []
    result = calibrate(budget_s=5.0, progress=lambda message, fraction: reports.append(fraction))
    assert result.base == "shipped" and result.networks == 3 and result.kernels > 10
    assert reports == sorted(reports) and reports[-1] == 1.0
    assert result.path.is_relative_to(tmp_path / "cache")
    assert list(result.path.parent.iterdir()) == [result.path]
    calibrated = first_answer.find_predictor()
    assert calibrated.origin == "calibrated"
    assert calibrated.corrections == Predictor.load(result.path).corrections
    assert calibrated.measured_s > base.measured_s
    graph = analyze(made_up.models[0])
    assert calibrated.predict(graph).mean_ms > base.predict(graph).mean_ms
    assert calibrate(tmp_path / "other.json", budget_s=5.0).path == tmp_path / "other.json"
    with pytest.raises(InputError, match="budget_s"):
        calibrate(budget_s=float("nan"))


@pytest.mark.usefixtures("base")
def test_calibrate_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = calibrate(tmp_path / "complete.json", budget_s=5.0)
    measure, measured = calibration.measure_idle_ms, []

    def fail_after_five(runner: Runner, seconds: float) -> float:
        if len(measured) == 5:
            raise KeyboardInterrupt
        measured.append(runner.path)
        return measure(runner, seconds)

    monkeypatch.setattr(calibration, "measure_idle_ms", fail_after_five)
    with pytest.raises(KeyboardInterrupt):
        calibrate(tmp_path / "resumed.json", budget_s=5.0)
    assert not (tmp_path / "resumed.json").exists()

    def measure_again(runner: Runner, seconds: float) -> float:
        assert runner.path not in measured
        return measure(runner, seconds)

    monkeypatch.setattr(calibration, "measure_idle_ms", measure_again)
    resumed = calibrate(tmp_path / "resumed.json", budget_s=5.0)
    assert (resumed.kernels, resumed.error_after) == (complete.kernels, complete.error_after)
    first, second = (Predictor.load(result.path) for result in (complete, resumed))
    assert first.corrections == second.corrections


def test_blocks_have_unique_names_and_known_work(tmp_path: Path) -> None:
    blocks = [*list_blocks(), *list_training_blocks()]
    assert len({block.name for block in blocks}) == len(blocks)
    for block in list_blocks():
        graph = analyze(block.write(tmp_path))
        assert all(kernel.flops_known for kernel in graph.kernels)
