"""Prediction on this machine: device, files and current load."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

import onnxruntime
import torch

import sparseflow.latency
import sparseflow.latency.api
from sparseflow.core.device import describe_device
from sparseflow.core.telemetry.schema import LoadReading
from sparseflow.errors import DeviceError, FileFormatError, InputError, SparseFlowError
from sparseflow.latency import CoRunner, Prediction, Predictor, predict
from sparseflow.latency.graph.analysis import analyze
from sparseflow.latency.graph.torch_export import export_module
from sparseflow.latency.measure.config import TelemetryConfig
from tests.latency.conftest import MadeUp, of_this_machine
from tests.latency.onnx_models import convnet, save


@pytest.fixture
def file(made_up: MadeUp, tmp_path: Path) -> Path:
    return made_up.predictor.save(tmp_path / "predictor.json")


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Arguments of the readers, which report the load of `shares`."""
    readers: list[Any] = []

    class Reader:
        shares: Mapping[str, float] = {"busy": 0.9, "others": 0.6}

        def read(self, window_s: float = 1.0) -> LoadReading:
            readers.append(window_s)
            return LoadReading(
                timestamp_s=1.0, interval_s=1.0, source="host", device="cpu", shares=self.shares
            )

    def opened(source: str, **settings: Any) -> Reader:
        readers.append((source, settings))
        return Reader()

    monkeypatch.setattr(sparseflow.latency.api, "open_reader", opened)
    return readers


def test_predict_import() -> None:
    assert inspect.isfunction(sparseflow.latency.predict)
    assert sparseflow.latency.predict is sparseflow.latency.api.predict
    assert Predictor.__module__ == "sparseflow.latency.model.predictor"
    assert all(hasattr(sparseflow.latency, name) for name in sparseflow.latency.__all__)
    assert set(sparseflow.latency.__all__) <= set(dir(sparseflow.latency))
    with pytest.raises(AttributeError, match=r"'prediction'"):
        sparseflow.latency.prediction  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.usefixtures("at_home")
def test_predict_file_graph_and_predictor_agree(made_up: MadeUp, file: Path, tmp_path: Path) -> None:
    path = made_up.models[0]
    prediction = predict(path, file, load={"others": 0.5})
    assert isinstance(prediction, Prediction)
    assert prediction == predict(str(path), made_up.predictor, load={"others": 0.5})
    assert prediction == made_up.predictor.predict(made_up.data.graphs[path.stem], {"others": 0.5})
    # An analyzed directory has this version of onnxruntime, which the predictor must have as well.
    fingerprint = replace(made_up.predictor.fingerprint, ort_version=onnxruntime.__version__)
    same = made_up.predictor.model_copy(update={"fingerprint": fingerprint})
    analyze(path, out_dir=tmp_path / "graph")
    for analyzed in (tmp_path / "graph", tmp_path / "graph" / "graph.json"):
        assert predict(analyzed, same, load={"others": 0.5}) == prediction


def test_predict_other_device_raises(made_up: MadeUp, file: Path) -> None:
    device = describe_device("cpu")
    with pytest.raises(InputError) as caught:
        predict(made_up.models[0], file)
    assert f"name is {device.name!r}, expected 'Made Up'" in str(caught.value)
    assert f"ort_version is {onnxruntime.__version__!r}, expected '1.0'" in str(caught.value)
    local_predictor = of_this_machine(made_up.predictor)
    assert predict(made_up.models[0], local_predictor).mean_ms > 0.0
    fingerprint = replace(local_predictor.fingerprint, cores=device.cores + 1)
    fewer = made_up.predictor.model_copy(update={"fingerprint": fingerprint})
    with pytest.raises(InputError, match=rf"{device.cores}.*{device.cores + 1}"):
        predict(made_up.models[0], fewer)


@pytest.mark.usefixtures("at_home")
@pytest.mark.parametrize("change", ["provider", "ort_version"])
def test_predict_graph_of_other_provider_raises(made_up: MadeUp, tmp_path: Path, change: str) -> None:
    analyze(made_up.models[0], out_dir=tmp_path)
    fingerprint = replace(made_up.predictor.fingerprint, ort_version=onnxruntime.__version__)
    other = {"provider": "CUDAExecutionProvider", "ort_version": "1.0"}[change]
    fingerprint = replace(fingerprint, **{change: other})
    predictor = made_up.predictor.model_copy(update={"fingerprint": fingerprint})
    with pytest.raises(InputError, match="CPUExecutionProvider") as caught:
        predict(tmp_path, predictor)
    assert other in str(caught.value) and onnxruntime.__version__ in str(caught.value)


@pytest.mark.usefixtures("at_home")
def test_predict_live_reads_load(made_up: MadeUp, readings: list[Any]) -> None:
    live = TelemetryConfig(source="prometheus", url="http://127.0.0.1:9", labels={"gpu": "0"}, max_age_s=3.0)
    prediction = predict(made_up.models[0], made_up.predictor, live=live, window_s=2.5)
    ((source, settings), window_s) = readings
    assert (source, window_s) == ("prometheus", 2.5)
    assert settings["labels"] == {"gpu": "0"} and settings["max_age_s"] == 3.0
    assert prediction.load == {"busy": 0.9, "others": 0.6}
    expected = predict(made_up.models[0], made_up.predictor, load={"others": 0.6})
    assert (prediction.mean_ms, prediction.p95_ms, prediction.interval) == (
        expected.mean_ms,
        expected.p95_ms,
        expected.interval,
    )


@pytest.mark.usefixtures("at_home")
def test_predict_live_unusable_source_raises(made_up: MadeUp) -> None:
    path, predictor = made_up.models[0], made_up.predictor
    with pytest.raises(DeviceError, match=r"`others`"):
        predict(path, predictor, live=TelemetryConfig(metrics=["busy"]), window_s=0.1)
    with pytest.raises(InputError, match=r"`url`"):
        predict(path, predictor, live=TelemetryConfig(source="prometheus"))
    with pytest.raises(InputError, match=r"'dcgm'"):
        predict(path, predictor, live=TelemetryConfig(source="dcgm"))
    with pytest.raises(InputError, match="window_s"):
        predict(path, predictor, live=TelemetryConfig(), window_s=0.0)


def test_predict_load_and_live_raises(made_up: MadeUp) -> None:
    with pytest.raises(InputError, match=r"`load`.*`live`"):
        predict(made_up.models[0], made_up.predictor, load={"others": 0.0}, live=TelemetryConfig())


@pytest.mark.usefixtures("at_home")
def test_predict_load_of_idle_predictor_raises(made_up: MadeUp, readings: list[Any]) -> None:
    contention = replace(made_up.predictor.contention, samples=0, idle_load=0.05)
    predictor = made_up.predictor.model_copy(update={"contention": contention})
    path = made_up.models[0]
    assert predict(path, predictor).load == {}
    assert predict(path, predictor, load={"others": 0.05}).slowdown == 1.0
    with pytest.raises(InputError, match=r"idle measurements only.*`levels"):
        predict(path, predictor, load={"others": 0.9})
    with pytest.raises(InputError, match="idle measurements only"):
        predict(path, predictor, live=TelemetryConfig())
    assert readings == []


@pytest.mark.usefixtures("at_home")
def test_predict_module_agrees_with_its_export(made_up: MadeUp, tmp_path: Path) -> None:
    module, x = (
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)),
        torch.randn(2, 8),
    )
    export_module(module, {"input": x}, tmp_path / "module.onnx")
    expected = predict(tmp_path / "module.onnx", made_up.predictor)
    assert predict(module, made_up.predictor, example=x) == expected
    assert predict(module, made_up.predictor, example=x, shapes={"batch": (64,)}).mean_ms > expected.mean_ms
    with pytest.raises(InputError, match=r"`example` is required"):
        predict(module, made_up.predictor)


@pytest.mark.usefixtures("at_home")
def test_predict_co_runner_shares_cpus(made_up: MadeUp) -> None:
    path, other = made_up.models[:2]
    # Without measurements under load, threads of a CPU share its time equally.
    contention = replace(made_up.predictor.contention, samples=0)
    predictor = made_up.predictor.model_copy(update={"contention": contention})
    isolated, other_alone = predict(path, predictor), predict(other, predictor)
    assert isolated.co_runner is None
    rate_per_s = 0.25e3 / other_alone.mean_ms
    for co_runner in (f"{other}@{rate_per_s}/s", CoRunner(model=other, rate_per_s=rate_per_s)):
        # The synthetic device has two CPUs.
        separate = predict(path, predictor, co_runner=co_runner)
        assert separate.mean_ms == isolated.mean_ms and separate.load == {}
        assert "CPUs of their own" in separate.notes[-1]
    shared = predict(path, predictor, co_runner=CoRunner(model=other, rate_per_s=rate_per_s, cpus=1))
    predicted = shared.co_runner
    assert predicted is not None and predicted.core_share == 1.0 and predicted.model == str(other)
    assert predicted.duty == pytest.approx(0.25) and predicted.mean_ms == pytest.approx(
        2 * other_alone.mean_ms
    )
    assert sum(predicted.bottleneck_shares.values()) == pytest.approx(1.0)
    # Active for half of the time, in which a run takes twice as long.
    assert predicted.active_share == pytest.approx(0.5)
    assert shared.slowdown == pytest.approx(4 / 3, rel=0.01) and shared.p95_ms > shared.p50_ms
    saturated = predict(path, predictor, co_runner=CoRunner(model=other, rate_per_s=4 * rate_per_s, cpus=1))
    assert saturated.slowdown == pytest.approx(2.0, rel=0.01) and "at most" in saturated.notes[-1]
    record = saturated.to_dict()["co_runner"]
    assert record["active_share"] == 1.0 and record["duty"] == pytest.approx(1.0)


@pytest.mark.usefixtures("at_home")
def test_predict_co_runner_uses_the_measured_contention(made_up: MadeUp) -> None:
    path, other = made_up.models[:2]
    contention = replace(made_up.predictor.contention, delay_factors=(3.0, 3.0, 3.0))
    predictor = made_up.predictor.model_copy(update={"contention": contention})
    co_runner = CoRunner(model=other, rate_per_s=1e5, cpus=1)
    slow, fair = (predict(path, p, co_runner=co_runner).slowdown for p in (predictor, made_up.predictor))
    assert slow > fair > 1.5
    gpu = replace(predictor.fingerprint, kind="cuda", provider="CPUExecutionProvider")
    idle_gpu = predictor.model_copy(update={"fingerprint": gpu, "contention": replace(contention, samples=0)})
    with pytest.raises(InputError, match="idle measurements only"):
        predict(path, idle_gpu, co_runner=f"{other}@1/s")
    # A GPU alternates between all models.
    assert (
        predict(path, predictor.model_copy(update={"fingerprint": gpu}), co_runner=f"{other}@1e5/s").slowdown
        > 1.5
    )


@pytest.mark.usefixtures("at_home")
def test_predict_co_runner_invalid_raises(made_up: MadeUp, tmp_path: Path) -> None:
    path, other = made_up.models[:2]
    for text in ("model.onnx", "model.onnx@fast", "@3/s", "model.onnx@nan"):
        with pytest.raises(InputError, match=r"MODEL@RATE/s"):
            predict(path, made_up.predictor, co_runner=text)
    for co_runner in (
        CoRunner(model=other, rate_per_s=0.0),
        CoRunner(model=other, rate_per_s=1.0, cpus=0),
        CoRunner(model=other, rate_per_s=1.0, cpus=3),
        CoRunner(model=tmp_path / "absent.onnx", rate_per_s=1.0),
    ):
        with pytest.raises(InputError):
            predict(path, made_up.predictor, co_runner=co_runner)
    with pytest.raises(InputError, match=r"`co_runner`"):
        predict(path, made_up.predictor, load={"others": 0.5}, co_runner=f"{other}@1/s")


@pytest.mark.usefixtures("at_home")
def test_predict_open_dimensions_need_shape(made_up: MadeUp, tmp_path: Path) -> None:
    path = save(convnet(batch="N", width=4, size=8), tmp_path)
    with pytest.raises(InputError):
        predict(path, made_up.predictor)
    small, large = (
        predict(path, made_up.predictor, shapes={"x": (batch, 3, 8, 8)}).mean_ms for batch in (1, 16)
    )
    assert small < large
    analyze(path, shapes={"x": (1, 3, 8, 8)}, out_dir=tmp_path / "graph")
    fingerprint = replace(made_up.predictor.fingerprint, ort_version=onnxruntime.__version__)
    predictor = made_up.predictor.model_copy(update={"fingerprint": fingerprint})
    # An analyzed graph has fixed shapes.
    with pytest.raises(InputError):
        predict(tmp_path / "graph", predictor, shapes={"x": (16, 3, 8, 8)})


@pytest.mark.usefixtures("at_home")
def test_predict_invalid_files_raise(made_up: MadeUp, tmp_path: Path) -> None:
    content = made_up.models[0].read_bytes()
    graph = tmp_path / "graph"
    analyze(made_up.models[0], out_dir=graph)
    record = json.loads((graph / "graph.json").read_text())
    cases: list[tuple[str, bytes | None, type[SparseFlowError]]] = [
        ("text.onnx", b"no model", FileFormatError),
        ("text", b"no model", FileFormatError),
        ("cut.onnx", content[: len(content) // 2], FileFormatError),
        ("empty.onnx", b"", FileFormatError),
        ("absent.onnx", None, InputError),
        ("absent", None, InputError),
        ("cut.json", json.dumps(record).encode()[:100], FileFormatError),
        ("other.json", b"{}", FileFormatError),
    ]
    for name, content, kind in cases:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(kind) as caught:
            predict(path, made_up.predictor)
        assert name in str(caught.value) or name == "other.json", name
    with pytest.raises(InputError):
        predict(made_up.models[0], tmp_path / "absent.json")
    with pytest.raises(FileFormatError):
        predict(made_up.models[0], made_up.models[0])
