"""`sparseflow latency` export, analyze and extract: text output, JSON output and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("yaml")

import numpy as np
from onnx import TensorProto, helper

from sparseflow.cli.latency.base import parse_gpu, parse_inputs, parse_labels, parse_provider, parse_shapes
from sparseflow.cli.root import run
from sparseflow.errors import InputError
from tests.latency.onnx_models import FLOAT, convnet, model, save

ZOO = """
models:
  - {name: tiny, source: "tests.latency.onnx_models:tiny"}
sizes: [8]
"""


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """Run a command with --json and parse its only output line."""
    assert run([*arguments, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_export_analyze_extract_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, models, graph, out = (tmp_path / name for name in ("zoo.yaml", "models", "graph", "out"))
    config.write_text(ZOO)
    (exported,) = run_json(["latency", "export", "--config", str(config), "--out", str(models)], capsys)[
        "models"
    ]
    assert exported["name"] == "tiny_b1_8" and not exported["reused"]
    assert run_json(["latency", "export", "--config", str(config), "--out", str(models)], capsys)["models"][
        0
    ]["reused"]
    result = run_json(["latency", "analyze", exported["path"], "--out", str(graph)], capsys)
    assert result["summary"]["counts"]["Conv_Relu"] == 1 and result["summary"]["flops"] > 0
    assert {n["kernel_id"] for n in result["nodes"]} == {k["id"] for k in result["kernels"]}
    assert (graph / "graph.json").is_file()
    extracted = run_json(["latency", "extract", str(graph), "--out", str(out)], capsys)
    assert extracted["summary"]["ok"] == extracted["summary"]["kernels"] == len(result["kernels"])
    assert extracted["summary"]["matched"] == len(result["nodes"])
    assert all(Path(kernel["path"]).is_file() for kernel in extracted["kernels"])


def test_export_analyze_extract_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "zoo.yaml"
    config.write_text(ZOO)
    assert run(["latency", "export", "--config", str(config), "--out", str(tmp_path)]) == 0
    assert "exported" in capsys.readouterr().out
    path = str(tmp_path / "tiny_b1_8.onnx")
    assert run(["latency", "analyze", path]) == 0
    out = capsys.readouterr().out
    assert "Conv_Relu" in out and "1×3×8×8" in out and "GFLOP" in out
    assert run(["latency", "analyze", path, "--kernels", "--opt-level", "disable"]) == 0
    out = capsys.readouterr().out
    assert "Conv_Relu" not in out and "1 Relu" in out
    assert run(["latency", "extract", path, "--out", str(tmp_path / "k"), "--no-check"]) == 0
    assert "0 of" in capsys.readouterr().out
    assert run(["latency", "extract", path, "--out", str(tmp_path / "k")]) == 0
    assert "nodes match" in capsys.readouterr().out


def test_shape_option_sets_open_dimensions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        parse_shapes(["a=1,3,8,8", "b:0=2"]) == {"a": (1, 3, 8, 8), "b:0": (2,)} and parse_shapes(None) == {}
    )
    for text in ("a", "a=", "=1", "a=1,x", "a=-1"):
        with pytest.raises(InputError, match="--shape"):
            parse_shapes([text])
    path = str(save(convnet(batch="N"), tmp_path))
    error = run_json(["latency", "analyze", path], capsys, code=2)["error"]
    assert error["type"] == "InputError" and "--shape x=" in error["message"]
    result = run_json(["latency", "analyze", path, "--shape", "x=3,3,12,12"], capsys)
    assert result["inputs"][0]["shape"] == [3, 3, 12, 12]


def test_input_option_sets_values(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert parse_inputs(["a=1,64", "b:0=m.npy"]) == {"a": "1,64", "b:0": "m.npy"} and parse_inputs(None) == {}
    for text in ("a", "a=", "=1"):
        with pytest.raises(InputError, match="--input"):
            parse_inputs([text])
    built = model(
        [helper.make_node("Reshape", ["x", "size"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        [("x", FLOAT, [6]), ("size", TensorProto.INT64, [2])],
        [("y", FLOAT, None)],
    )
    path = str(save(built, tmp_path))
    result = run_json(["latency", "analyze", path, "--input", "size=2,3"], capsys)
    assert result["outputs"][0]["shape"] == [2, 3]
    error = run_json(["latency", "analyze", path, "--input", "size=4,4"], capsys, code=1)["error"]
    assert error["type"] == "RunError"
    np.save(tmp_path / "size.npy", [3, 2])
    value = f"size={tmp_path / 'size.npy'}"
    out = tmp_path / "out"
    summary = run_json(["latency", "extract", path, "--out", str(out), "--input", value], capsys)["summary"]
    assert summary["matched"] == 2 and summary["skipped"] == 0
    assert run_json(["latency", "run", path, "--input", value, "--loops", "2"], capsys)["loops"] == 2
    assert run_json(["latency", "overlap", path, "--input", value], capsys)["nodes"] > 0


def test_extract_lists_skipped_nodes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    built = model(
        [
            helper.make_node("SplitToSequence", ["x"], ["s"], axis=0),
            helper.make_node("ConcatFromSequence", ["s"], ["y"], axis=0),
        ],
        [("x", FLOAT, [4, 8])],
        [("y", FLOAT, None)],
    )
    path = str(save(built, tmp_path))
    assert run(["latency", "extract", path, "--out", str(tmp_path / "k")]) == 0
    assert "2 nodes cannot be models of their own" in capsys.readouterr().out
    assert run(["latency", "analyze", path]) == 0
    assert "unknown work of: 1 SplitToSequence, 1 ConcatFromSequence" in capsys.readouterr().out


def test_invalid_input_exits_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"no model")
    for arguments, kind in (
        (["analyze", str(bad)], "FileFormatError"),
        (["analyze", str(tmp_path / "absent.onnx")], "InputError"),
        (["extract", str(bad), "--out", str(tmp_path)], "FileFormatError"),
        (["extract", str(tmp_path), "--out", str(tmp_path)], "InputError"),
        (["export", "--config", str(tmp_path / "absent.yaml"), "--out", str(tmp_path)], "InputError"),
    ):
        assert run_json(["latency", *arguments], capsys, code=2)["error"]["type"] == kind


def test_absent_provider_exits_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    path = str(save(convnet(), tmp_path))
    error = run_json(["latency", "analyze", path, "--device", "cuda"], capsys, code=1)["error"]
    assert error["type"] == "DeviceError"


def test_export_failed_model_exits_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "zoo.yaml"
    config.write_text(ZOO.replace("sizes: [8]", "sizes: [8, 9]"))
    result = run_json(["latency", "export", "--config", str(config), "--out", str(tmp_path)], capsys, code=2)[
        "models"
    ]
    assert [row["problem"] is None for row in result] == [True, False]


def test_extract_failed_kernel_exits_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseflow.latency.graph import extraction

    monkeypatch.setattr(extraction, "TOLERANCE", -1.0)
    path = str(save(convnet(), tmp_path))
    summary = run_json(["latency", "extract", path, "--out", str(tmp_path / "k")], capsys, code=1)["summary"]
    assert summary["ok"] == 0 and summary["kernels"] > 0


def test_parse_labels_splits_at_the_first_equals_sign() -> None:
    assert parse_labels(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"} and parse_labels(None) == {}
    with pytest.raises(InputError, match="--label gpu"):
        parse_labels(["gpu"])


def test_parse_provider_and_gpu_of_a_device() -> None:
    assert parse_provider("cpu") == ("cpu", 0)
    assert parse_provider("cuda") == ("cuda", 0) and parse_provider("cuda:3") == ("cuda", 3)
    assert parse_gpu(None, required="cuda") == 0 and parse_gpu("cuda:2", required="cuda") == 2
    for device in ("gpu", "cuda:", "cuda:-1"):
        with pytest.raises(InputError, match=f"`--device {device}`"):
            parse_provider(device)
    with pytest.raises(InputError, match="`--device cpu`"):
        parse_gpu("cpu", required="cuda")
