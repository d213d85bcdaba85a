"""Sessions: the provider that was asked for, or an error."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnxruntime as ort
from onnx import helper

from sparseflow.errors import DeviceError, FileFormatError, InputError, ModelError, RunError
from sparseflow.latency.session import open_session, provider_name, run, short_name
from tests.latency.onnx_models import FLOAT, convnet, model, values


def test_names() -> None:
    assert provider_name("cpu") == provider_name("CPUExecutionProvider") == "CPUExecutionProvider"
    assert short_name("CUDAExecutionProvider") == short_name("cuda") == "cuda"
    with pytest.raises(InputError, match="'tpu' is not known"):
        provider_name("tpu")


def test_a_provider_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(DeviceError, match="onnxruntime-gpu"):
        open_session(convnet().SerializeToString(), "cuda")


def test_a_silent_fallback_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime lists CUDA without a GPU, logs a line and takes the CPU."""

    class FellBack:
        def __init__(self, *arguments: object, **more: object) -> None: ...

        def get_providers(self) -> list[str]:
            return ["CPUExecutionProvider"]

    monkeypatch.setattr(
        ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    monkeypatch.setattr(ort, "InferenceSession", FellBack)
    with pytest.raises(DeviceError, match="fell back to CPUExecutionProvider"):
        open_session(convnet().SerializeToString(), "cuda")


def test_wrong_levels_and_models_are_told() -> None:
    content = convnet().SerializeToString()
    with pytest.raises(InputError, match="'most'"):
        open_session(content, level="most")
    with pytest.raises(FileFormatError, match="cannot be read"):
        open_session(b"not a model")
    stranger = model([helper.make_node("NoSuchOp", ["x"], ["y"])], [("x", FLOAT, [1])], [("y", FLOAT, [1])])
    with pytest.raises(ModelError, match="NoSuchOp"):
        open_session(stranger.SerializeToString())
    new = convnet()
    new.opset_import[0].version = 99
    with pytest.raises(ModelError, match="older opset"):
        open_session(new.SerializeToString())


def test_a_failed_run_is_told() -> None:
    opened = open_session(convnet().SerializeToString(), threads=1)
    with pytest.raises(RunError, match="failed while it ran"):
        run(opened, ["y"], {"x": values(2, 2)})
