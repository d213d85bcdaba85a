"""Timing of single models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnxruntime as ort
from onnx import TensorProto, helper

from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.latency.graph.extraction import extract, make_dummy_inputs
from sparseflow.latency.measure.runner import Runner, quantile
from tests.latency.onnx_models import FLOAT, convnet, model, save


def test_measure_records_every_sample(tmp_path: Path) -> None:
    path = save(convnet(), tmp_path)
    timing = Runner(path, threads=1).measure(warmup=2, loops=7)
    assert len(timing.latency_ms) == 7 and 0.0 < timing.cpu_ratio < 1.5
    assert min(timing.latency_ms) > 0.0 and timing.warmup == 2 and timing.warmup_ms > 0.0
    assert timing.start_s > 1.7e9
    # Samples are contiguous.
    assert timing.end_s - timing.start_s == pytest.approx(sum(timing.latency_ms) / 1e3, abs=2e-6)
    assert (timing.provider, timing.level, timing.threads) == ("CPUExecutionProvider", "all", 1)
    assert timing.conv_search is None and not timing.kernel and timing.ort_version == ort.__version__
    record = timing.to_dict()
    assert (
        record["loops"] == 7 and record["min_ms"] <= record["p50_ms"] <= record["p95_ms"] <= record["max_ms"]
    )
    assert record["latency_ms"] == list(timing.latency_ms)


def test_measure_limits(tmp_path: Path) -> None:
    runner = Runner(save(convnet(), tmp_path), threads=1)
    assert len(runner.measure(warmup=0, loops=1).latency_ms) == 1
    longer = runner.measure(warmup=0, loops=1, min_time_s=0.05)
    # POSIX timestamps have a resolution of 0.2 us.
    assert longer.end_s - longer.start_s >= 0.05 - 1e-6
    assert 1 <= len(runner.measure(warmup=0, loops=10**9, max_time_s=0.01).latency_ms) < 10**6
    several = runner.measure(warmup=0, loops=4, calls_per_sample=3)
    assert len(several.latency_ms) == 4 and several.calls_per_sample == 3
    assert several.end_s - several.start_s == pytest.approx(3 * sum(several.latency_ms) / 1e3, abs=2e-6)
    for bad in ({"warmup": -1}, {"loops": 0}, {"calls_per_sample": 0}):
        with pytest.raises(InputError):
            runner.measure(**bad)


def test_runner_outputs_match_onnxruntime(tmp_path: Path) -> None:
    path = save(convnet(), tmp_path)
    runner = Runner(path, threads=1, seed=3)
    runner.measure(warmup=1, loops=2)
    feeds = make_dummy_inputs(path, 3)
    expected = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)
    for output, expected_output in zip(runner.run_once(), expected, strict=True):
        np.testing.assert_allclose(output, np.asarray(expected_output), rtol=1e-5, atol=1e-6)


def test_runner_kernel_is_not_optimized(tmp_path: Path) -> None:
    kernels = extract(save(convnet(), tmp_path), tmp_path / "out", check=False, threads=1)
    for kernel in kernels:
        assert kernel.path is not None
        timing = Runner(kernel.path, threads=1).measure(warmup=0, loops=2)
        assert timing.kernel and timing.level == "disable" and len(timing.latency_ms) == 2


def test_runner_open_dimensions_need_shapes(tmp_path: Path) -> None:
    path = save(convnet(batch="n"), tmp_path)
    with pytest.raises(InputError):
        Runner(path)
    name = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).get_inputs()[0].name
    shapes = {name: (2, 3, 12, 12)}
    assert len(Runner(path, shapes=shapes, threads=1).measure(loops=2).latency_ms) == 2


def test_runner_bfloat16_input(tmp_path: Path) -> None:
    kind = TensorProto.BFLOAT16
    cast = helper.make_node("Cast", ["x"], ["y"], to=FLOAT)
    path = save(model([cast], [("x", kind, [4])], [("y", FLOAT, [4])]), tmp_path)
    runner = Runner(path, threads=1)
    assert runner.run_once()[0].shape == (4,)


def test_runner_invalid_arguments_raise(tmp_path: Path) -> None:
    path = save(convnet(), tmp_path)
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        with pytest.raises(DeviceError, match=r"CUDAExecutionProvider"):
            Runner(path, "cuda")
    for bad in ({"threads": 0}, {"conv_search": "FAST"}, {"level": "most"}):
        with pytest.raises(InputError):
            Runner(path, **bad)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        Runner(tmp_path / "absent.onnx")
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(path.read_bytes()[:300])
    with pytest.raises(FileFormatError):
        Runner(cut)


def test_runner_failing_run_names_model(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Sub", ["place", "offset"], ["index"]),
        helper.make_node("Gather", ["table", "index"], ["y"]),
    ]
    weights = {"table": np.zeros((10, 8), np.float32), "offset": np.array(100)}
    inputs = [("place", TensorProto.INT64, [4])]
    path = save(model(nodes, inputs, [("y", FLOAT, None)], weights), tmp_path)
    with pytest.raises(RunError, match=r"--input NAME=VALUE.* place \(int64 \[4\]\)"):
        Runner(path, threads=1)
    values = {"place": [100, 109, 101, 105]}
    assert len(Runner(path, threads=1, inputs=values).measure(loops=2).latency_ms) == 2


def test_quantiles_interpolated() -> None:
    assert [quantile([3.0, 1.0, 2.0], q) for q in (0.0, 0.5, 0.75, 1.0)] == [1.0, 2.0, 2.5, 3.0]
    assert quantile([4.0], 0.9) == 4.0


@pytest.mark.gpu
def test_runner_gpu_conv_search(tmp_path: Path) -> None:
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("onnxruntime-gpu is not installed")
    path = save(convnet(), tmp_path)
    for search in ("EXHAUSTIVE", "HEURISTIC"):
        timing = Runner(path, "cuda", conv_search=search).measure(loops=3)
        assert (timing.provider, timing.conv_search) == ("CUDAExecutionProvider", search)
    on_gpu, on_cpu = (Runner(path, provider).run_once()[0] for provider in ("cuda", "cpu"))
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=1e-2, atol=1e-2)
