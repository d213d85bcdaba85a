"""Synthetic kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from pydantic import ValidationError

from sparseflow.errors import RunError
from sparseflow.latency.graph import synthetic_kernels
from sparseflow.latency.graph.extraction import read_kernel
from sparseflow.latency.graph.synthetic_kernels import SyntheticKernelsConfig, write_synthetic_kernels
from sparseflow.latency.measure.runner import Runner


def list_kernels(folder: Path) -> list[Path]:
    return sorted((folder / "kernels").glob("*.onnx"))


@pytest.mark.parametrize("group", synthetic_kernels._GROUPS)
def test_kernels_of_each_group_run(group: str, tmp_path: Path) -> None:
    config = SyntheticKernelsConfig(kernels=16, operators=[group], seed=3)
    paths = list_kernels(write_synthetic_kernels(config, tmp_path))
    assert len(paths) >= 16
    for path in paths:
        kernel = read_kernel(path)
        assert kernel.flops_known and kernel.flops < 1e9, kernel.op
        Runner(path, threads=1).warm_up(1)


def test_types_and_fusions(tmp_path: Path) -> None:
    folder = write_synthetic_kernels(SyntheticKernelsConfig(kernels=60, operators=["conv", "gemm"]), tmp_path)
    names = {read_kernel(path).op for path in list_kernels(folder)}
    assert {"Conv", "Gemm", "QLinearConv", "QGemm"} <= names
    assert any(name.startswith("Conv_") for name in names) and any(name.startswith("Gemm_") for name in names)


def test_kernels_are_deterministic_and_kept(tmp_path: Path) -> None:
    config = SyntheticKernelsConfig(kernels=12)
    first, second = (write_synthetic_kernels(config, tmp_path / name) for name in ("first", "second"))
    assert [(p.name, p.read_bytes()) for p in list_kernels(first)] == [
        (p.name, p.read_bytes()) for p in list_kernels(second)
    ]
    assert {path.name for path in first.iterdir()} == {"kernels", "synthetic.json"}
    times = [path.stat().st_mtime_ns for path in list_kernels(first)]
    write_synthetic_kernels(config, first)
    assert [path.stat().st_mtime_ns for path in list_kernels(first)] == times
    write_synthetic_kernels(SyntheticKernelsConfig(kernels=12, seed=1), second)
    assert [p.name for p in list_kernels(first)] != [p.name for p in list_kernels(second)]


def test_frequent_operators_limited(tmp_path: Path) -> None:
    config = SyntheticKernelsConfig(kernels=40, operators=["unary", "binary"], dtypes=["int8"])
    names = [read_kernel(path).op for path in list_kernels(write_synthetic_kernels(config, tmp_path))]
    assert names.count("DequantizeLinear") == names.count("QuantizeLinear") == 2


def test_invalid_settings_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="unknown convolution; expected some of: conv, "):
        SyntheticKernelsConfig(operators=["convolution"])
    groups: Any = synthetic_kernels._GROUPS
    monkeypatch.setitem(groups, "unary", lambda b: b.add_output(b.add_node("Bad", b.add_input([2]))))
    with pytest.raises(RunError, match="Bad"):
        write_synthetic_kernels(SyntheticKernelsConfig(operators=["unary"], kernels=2), tmp_path)
