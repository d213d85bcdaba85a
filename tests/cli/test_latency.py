"""`sparseflow latency`: export, analyze and extract, for readers and for scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("yaml")

from sparseflow.cli.latency.base import shapes_of
from sparseflow.cli.root import run
from sparseflow.errors import InputError
from tests.latency.onnx_models import convnet, save

ZOO = """
models:
  - {name: tiny, source: "tests.latency.onnx_models:tiny"}
sizes: [8]
"""


def told(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """The one object on standard output."""
    assert run([*arguments, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_from_a_zoo_to_kernels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, models, graph, out = (tmp_path / name for name in ("zoo.yaml", "models", "graph", "out"))
    config.write_text(ZOO)
    (exported,) = told(["latency", "export", str(config), "--out", str(models)], capsys)["models"]
    assert exported["name"] == "tiny_b1_8" and not exported["kept"]
    assert told(["latency", "export", str(config), "--out", str(models)], capsys)["models"][0]["kept"]
    found = told(["latency", "analyze", exported["path"], "--out", str(graph)], capsys)
    assert found["summary"]["counts"]["Conv_Relu"] == 1 and found["summary"]["flops"] > 0
    assert {n["kernel_id"] for n in found["nodes"]} == {k["id"] for k in found["kernels"]}
    assert (graph / "graph.json").is_file()
    extracted = told(["latency", "extract", str(graph), "--out", str(out)], capsys)
    assert extracted["summary"]["ok"] == extracted["summary"]["kernels"] == len(found["kernels"])
    assert extracted["summary"]["matched"] == len(found["nodes"])
    assert all(Path(kernel["path"]).is_file() for kernel in extracted["kernels"])


def test_for_a_reader(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "zoo.yaml"
    config.write_text(ZOO)
    assert run(["latency", "export", str(config), "--out", str(tmp_path)]) == 0
    assert "exported" in capsys.readouterr().out
    model = str(tmp_path / "tiny_b1_8.onnx")
    assert run(["latency", "analyze", model]) == 0
    out = capsys.readouterr().out
    assert "Conv_Relu" in out and "1×3×8×8" in out and "GFLOP" in out
    assert run(["latency", "analyze", model, "--kernels", "--level", "disable"]) == 0
    out = capsys.readouterr().out
    assert "Conv_Relu" not in out and "1 Relu" in out
    assert run(["latency", "extract", model, "--out", str(tmp_path / "k"), "--no-check"]) == 0
    assert "0 of" in capsys.readouterr().out
    assert run(["latency", "extract", model, "--out", str(tmp_path / "k")]) == 0
    assert "nodes match" in capsys.readouterr().out


def test_shapes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert shapes_of(["a=1,3,8,8", "b:0=2"]) == {"a": (1, 3, 8, 8), "b:0": (2,)} and shapes_of(None) == {}
    for text in ("a", "a=", "=1", "a=1,x", "a=0,3", "a=-1"):
        with pytest.raises(InputError, match="--shape"):
            shapes_of([text])
    path = str(save(convnet(batch="N"), tmp_path))
    error = told(["latency", "analyze", path], capsys, code=2)["error"]
    assert error["type"] == "InputError" and "--shape x=" in error["message"]
    found = told(["latency", "analyze", path, "--shape", "x=3,3,12,12"], capsys)
    assert found["inputs"][0]["shape"] == [3, 3, 12, 12]


def test_bad_input_exits_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"no model")
    for arguments, kind in (
        (["analyze", str(bad)], "FileFormatError"),
        (["analyze", str(tmp_path / "absent.onnx")], "InputError"),
        (["extract", str(bad), "--out", str(tmp_path)], "FileFormatError"),
        (["extract", str(tmp_path), "--out", str(tmp_path)], "InputError"),
        (["export", str(tmp_path / "absent.yaml"), "--out", str(tmp_path)], "InputError"),
    ):
        assert told(["latency", *arguments], capsys, code=2)["error"]["type"] == kind


def test_a_provider_that_is_absent_exits_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    path = str(save(convnet(), tmp_path))
    error = told(["latency", "analyze", path, "--provider", "cuda"], capsys, code=1)["error"]
    assert error["type"] == "DeviceError"


def test_a_model_that_fails_is_told_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "zoo.yaml"
    config.write_text(ZOO.replace("sizes: [8]", "sizes: [8, 9]"))
    found = told(["latency", "export", str(config), "--out", str(tmp_path)], capsys, code=2)["models"]
    assert [row["problem"] is None for row in found] == [True, False]


def test_a_kernel_that_fails_exits_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparseflow.latency import extract

    monkeypatch.setattr(extract, "TOLERANCE", -1.0)
    path = str(save(convnet(), tmp_path))
    summary = told(["latency", "extract", path, "--out", str(tmp_path / "k")], capsys, code=1)["summary"]
    assert summary["ok"] == 0 and summary["kernels"] > 0
