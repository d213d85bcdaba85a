"""OpenVINO as the runtime: outputs, kernels, errors, and a collection that becomes a predictor."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("openvino")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from onnx import helper

from sparseflow.cli.root import run
from sparseflow.errors import InputError, ModelError
from sparseflow.latency.api import predict
from sparseflow.latency.graph.analysis import analyze
from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.measure.collection import collect, read_rows
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.openvino import OpenVINOModel
from sparseflow.latency.measure.runner import Runner
from sparseflow.latency.model.evaluation import evaluate
from sparseflow.latency.model.training import train
from tests.latency.onnx_models import FLOAT, convnet, lookup, model, save

PRECISION = 0.03
"""Largest difference, relative to the largest output; OpenVINO computes in bfloat16 on some CPUs."""


def check_outputs(path: Path) -> None:
    outputs = [Runner(path, provider, threads=1).run_once() for provider in ("cpu", "openvino")]
    assert len(outputs[0]) == len(outputs[1])
    for expected, actual in zip(*outputs, strict=True):
        assert actual.shape == expected.shape and actual.dtype == expected.dtype
        assert np.abs(actual - expected).max() <= PRECISION * max(np.abs(expected).max(), 1e-6)


def test_outputs_of_models_and_kernels_equal_those_of_onnxruntime(tmp_path: Path) -> None:
    for name, proto in (("conv", convnet()), ("lookup", lookup())):
        path = save(proto, tmp_path, f"{name}.onnx")
        check_outputs(path)
        graph = analyze(path, "openvino", out_dir=tmp_path / name)
        assert (graph.provider, graph.level) == ("CPUExecutionProvider", "extended")
        for result in extract(graph, tmp_path / name):
            assert result.ok and result.path is not None
            check_outputs(result.path)


def test_timing_names_the_runtime(tmp_path: Path) -> None:
    timing = Runner(save(convnet(), tmp_path), "openvino", threads=1).measure(loops=3)
    assert timing.provider == "OpenVINO" and "OpenVINO 20" in timing.ort_version
    assert len(timing.latency_ms) == 3 and timing.mean_ms > 0.0


def test_time_of_a_kernel_excludes_conversions_of_layouts() -> None:
    def node(node_type: str, microseconds: int) -> SimpleNamespace:
        return SimpleNamespace(node_type=node_type, real_time=timedelta(microseconds=microseconds))

    kernel = object.__new__(OpenVINOModel)
    kernel._is_kernel = True
    for nodes, share in (
        ([node("Reorder", 30), node("Convolution", 50), node("Reorder", 20)], 0.5),
        ([node("Reorder", 30)], 1.0),
        ([node("Convolution", 0)], 1.0),
        ([], 1.0),
    ):
        kernel._request = SimpleNamespace(infer=lambda share_outputs: None, profiling_info=nodes)
        assert kernel.measure_kernel_share() == share
    kernel._is_kernel = False
    assert kernel.measure_kernel_share() == 1.0


def test_unsupported_operator_is_named(tmp_path: Path) -> None:
    proto = model(
        [helper.make_node("Unknown", ["x"], ["y"], domain="custom")],
        [("x", FLOAT, [1, 3])],
        [("y", FLOAT, [1, 3])],
        {},
    )
    proto.opset_import.append(helper.make_opsetid("custom", 1))
    with pytest.raises(ModelError, match=r"custom\.Unknown") as caught:
        Runner(save(proto, tmp_path), "openvino")
    assert "\n" not in str(caught.value) and ".cpp" not in str(caught.value)


@pytest.mark.usefixtures("quick")
def test_collection_becomes_a_predictor_of_openvino(tmp_path: Path) -> None:
    paths = [
        save(convnet(size=size), tmp_path / "models", f"net{size}_b1_{size}.onnx") for size in (12, 16, 20)
    ]
    for path in paths:
        assert all(result.ok for result in extract(path, tmp_path / path.stem, provider="openvino"))
    config = CollectionConfig(
        kernels=[tmp_path / path.stem for path in paths],
        models=paths,
        provider="openvino",
        levels=[0.0],
        rounds=1,
        loops=3,
        min_time_s=0.1,
    )
    collect(config, tmp_path / "measured")
    rows = read_rows(tmp_path / "measured")
    assert all(row["error"] is None and row["provider"] == "OpenVINO" for row in rows)
    predictor = train([tmp_path / "measured"], kind="ratio")
    assert predictor.fingerprint.provider == "OpenVINO" and predictor.fingerprint.kind == "cpu"
    predictor.fingerprint.check_local_device()
    assert predict(paths[0], predictor).coverage == 1.0
    assert predict(tmp_path / paths[0].stem, predictor).mean_ms > 0.0
    analyze(paths[0], "cpu", out_dir=tmp_path / "blocked")
    with pytest.raises(InputError, match="level extended"):
        predict(tmp_path / "blocked", predictor)
    (row,) = evaluate(paths[:1], predictor, rounds=1, min_time_s=0.1).rows
    assert row.measured_ms > 0.0


def test_run_command_refuses_openvino_on_a_gpu(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(save(convnet(), tmp_path))
    assert run(["latency", "run", path, "--runtime", "openvino", "--device", "cuda"]) == 2
    assert "--runtime openvino" in capsys.readouterr().err
    assert run(["latency", "run", path, "--runtime", "openvino", "--loops", "2"]) == 0
    assert "OpenVINO" in capsys.readouterr().out
