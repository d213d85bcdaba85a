"""Sessions on the requested provider."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from sparseflow.errors import DeviceError, FileFormatError, InputError, ModelError, RunError
from sparseflow.latency.graph import session
from sparseflow.latency.graph.session import get_device_type, open_session, resolve_provider, run
from tests.latency.onnx_models import FLOAT, convnet, model, values


def test_resolve_provider_names() -> None:
    assert resolve_provider("cpu") == resolve_provider("CPUExecutionProvider") == "CPUExecutionProvider"
    assert get_device_type("CUDAExecutionProvider") == get_device_type("cuda") == "cuda"
    with pytest.raises(InputError, match=r"'tpu'"):
        resolve_provider("tpu")


def test_missing_provider_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(DeviceError):
        open_session(convnet().SerializeToString(), "cuda")


def test_provider_fallback_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime lists CUDA without a GPU and falls back to the CPU with a log line."""

    class FellBack:
        def __init__(self, *arguments: object, **more: object) -> None: ...

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(
        ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(ort, "InferenceSession", FellBack)
    with pytest.raises(DeviceError, match=r"CPUExecutionProvider"):
        open_session(convnet().SerializeToString(), "cuda")


def test_run_endless_loop_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    scalar = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["d"]), helper.make_node("Neg", ["s"], ["t"])],
        "body",
        [scalar("i", TensorProto.INT64, []), scalar("c", TensorProto.BOOL, []), scalar("s", FLOAT, [1])],
        [scalar("d", TensorProto.BOOL, []), scalar("t", FLOAT, [1])],
    )
    loop = helper.make_node("Loop", ["n", "", "x"], ["y"], body=body)
    built = model([loop], [("x", FLOAT, [1])], [("y", FLOAT, [1])], {"n": np.array(2**62)})
    monkeypatch.setattr(session, "RUN_TIMEOUT_S", 0.1)
    with pytest.raises(RunError, match=r"more than 0\.1 s; check its loops"):
        run(open_session(built.SerializeToString()), ["y"], {"x": np.zeros(1, np.float32)})


def test_errors_are_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    for operator in ("NoSuchOp", "Gather"):
        wrong = model([helper.make_node(operator, ["x"], ["y"])], [("x", FLOAT, [1])], [("y", FLOAT, [1])])
        with pytest.raises(ModelError):
            open_session(wrong.SerializeToString())
    assert capfd.readouterr() == ("", "")


def test_invalid_level_or_model_raises() -> None:
    content = convnet().SerializeToString()
    with pytest.raises(InputError, match="'most'"):
        open_session(content, level="most")
    with pytest.raises(FileFormatError):
        open_session(b"not a model")
    stranger = model([helper.make_node("NoSuchOp", ["x"], ["y"])], [("x", FLOAT, [1])], [("y", FLOAT, [1])])
    with pytest.raises(ModelError, match="NoSuchOp"):
        open_session(stranger.SerializeToString())
    new = convnet()
    new.opset_import[0].version = 99
    with pytest.raises(ModelError):
        open_session(new.SerializeToString())


def test_failed_run_raises() -> None:
    opened = open_session(convnet().SerializeToString(), threads=1)
    with pytest.raises(RunError):
        run(opened, ["y"], {"x": values(2, 2)})
