"""Validated reading of ONNX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.analysis import analyze
from tests.latency.onnx_models import FLOAT, convnet, lookup, model, save, values


def with_external(folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save_model(
        convnet(width=32), str(path), save_as_external_data=True, location="weights.bin", size_threshold=64
    )
    return path


def test_load_missing_file_raises(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.onnx", tmp_path):
        with pytest.raises(InputError):
            analyze(path)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x00" * 64, b"\x08\x08", b"%PDF-1.7 and so on", bytes(range(256))]
)
def test_load_foreign_file_raises(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(FileFormatError):
        analyze(path)


@given(share=st.floats(0, 0.999))
def test_load_truncated_file_raises(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    content = convnet().SerializeToString()
    path = tmp_path_factory.mktemp("cut") / "model.onnx"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InputError):
        onnx_file.load_model(path)


def test_load_external_weights(tmp_path: Path) -> None:
    path = with_external(tmp_path)
    external = analyze(path)
    assert external.count_ops() == analyze(save(convnet(width=32), tmp_path, "one.onnx")).count_ops()
    data = tmp_path / "weights.bin"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(FileFormatError):
        analyze(path)
    data.unlink()
    with pytest.raises(FileFormatError):
        analyze(path)


def test_load_large_weights_raises(tmp_path: Path) -> None:
    path = with_external(tmp_path)
    built = onnx.load_model(str(path), load_external_data=False)
    weight = next(w for w in built.graph.initializer if w.external_data)
    del weight.dims[:]
    weight.dims.extend([2**15, 2**15])
    del weight.external_data[:]
    for key, value in (("location", "weights.bin"), ("length", str(2**32))):
        entry = weight.external_data.add()
        entry.key, entry.value = key, value
    path.write_bytes(built.SerializeToString())
    with (tmp_path / "weights.bin").open("r+b") as stream:
        stream.truncate(2**32)
    with pytest.raises(ModelError, match=r"4"):
        analyze(path)


def test_open_dimensions_need_shapes(tmp_path: Path) -> None:
    path = save(convnet(batch="N", size="H"), tmp_path)
    with pytest.raises(InputError, match=r"--shape.*1.*3.*224.*224"):
        analyze(path)
    assert analyze(path, shapes={"x": (2, 3, 12, 12)}).inputs[0].shape == (2, 3, 12, 12)
    for wrong in ((2, 4, 12, 12), (2, 3, 12)):
        with pytest.raises(InputError):
            analyze(path, shapes={"x": wrong})
    with pytest.raises(InputError):
        analyze(path, shapes={"x": (2, 3, 12, 12), "z": (1,)})


def test_unknown_rank_needs_shape(tmp_path: Path) -> None:
    path = save(
        model([helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, None)], [("y", FLOAT, None)]), tmp_path
    )
    with pytest.raises(InputError):
        analyze(path)
    assert analyze(path, shapes={"x": (3,)}).outputs[0].shape == (3,)


def test_load_newer_opset_raises(tmp_path: Path) -> None:
    built = convnet()
    built.opset_import[0].version = 999
    with pytest.raises(ModelError, match=r"999."):
        analyze(save(built, tmp_path))


def test_load_empty_model_raises(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        analyze(save(model([], [("x", FLOAT, [1])], [("x", FLOAT, [1])]), tmp_path))


def test_empty_tensors_raise(tmp_path: Path) -> None:
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    for shape in ([0, 3], [2, 0]):
        with pytest.raises(ModelError):
            analyze(save(model(relu, [("x", FLOAT, shape)], [("y", FLOAT, shape)]), tmp_path))
    empty = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", FLOAT, [2, 3])],
        [("y", FLOAT, None)],
        {"w": np.zeros((3, 0), np.float32)},
    )
    with pytest.raises(ModelError):
        analyze(save(empty, tmp_path))
    # An intermediate tensor: an empty slice.
    inside = model(
        [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Slice", ["h", "a", "b"], ["y"])],
        [("x", FLOAT, [2, 3])],
        [("y", FLOAT, None)],
        {"a": np.array([1]), "b": np.array([1])},
    )
    with pytest.raises(ModelError, match=r"`y`"):
        analyze(save(inside, tmp_path))


def test_large_input_raises(tmp_path: Path) -> None:
    path = save(convnet(batch="N", size="H"), tmp_path)
    with pytest.raises(ModelError, match=r"12"):
        analyze(path, shapes={"x": (1024, 3, 1024, 1024)})


def test_large_optimized_graph_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer precomputes a mask for every image of a large batch."""
    path = save(convnet(), tmp_path)

    def fails(*arguments: object, **more: object) -> None:
        raise FileFormatError("INVALID_PROTOBUF : Protobuf serialization failed.")

    monkeypatch.setattr(session, "open_session", fails)
    with pytest.raises(ModelError, match=r"2"):
        analyze(path)


def test_non_numeric_values_raise(tmp_path: Path) -> None:
    text = model(
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", TensorProto.STRING, [1])],
        [("y", TensorProto.STRING, [1])],
    )
    with pytest.raises(ModelError):
        analyze(save(text, tmp_path))


def test_weights_listed_as_inputs(tmp_path: Path) -> None:
    """Early versions of ONNX list weights as inputs."""
    built = convnet()
    for weight in built.graph.initializer:
        built.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    graph = analyze(save(built, tmp_path))
    assert [t.name for t in graph.inputs] == ["x"]


def test_dtypes_and_attributes() -> None:
    assert (
        onnx_file.get_dtype_name("tensor(double)")
        == onnx_file.get_dtype_name(TensorProto.DOUBLE)
        == "float64"
    )
    assert onnx_file.get_dtype_name("tensor(bfloat16)") == "bfloat16"
    assert onnx_file.get_element_type("float32") == FLOAT
    assert onnx_file.get_numpy_dtype("int64") == np.int64
    for kind in ("seq(tensor(float))", "tensor(string)"):
        with pytest.raises(ModelError):
            onnx_file.get_dtype_name(kind)
    attribute = helper.make_attribute
    assert onnx_file.parse_attribute(attribute("a", [1, 2])) == [1, 2]
    assert onnx_file.parse_attribute(attribute("a", "Relu")) == "Relu"
    assert onnx_file.parse_attribute(attribute("a", float("inf"))) == "inf"
    tensors = [
        onnx_file.parse_attribute(attribute("a", numpy_helper.from_array(values(2, seed=seed))))
        for seed in (0, 0, 1)
    ]
    assert tensors[0] == tensors[1] != tensors[2] and tensors[0]["shape"] == [2]


def test_attribute_round_trip(tmp_path: Path) -> None:
    assert onnx_file.load_model(save(lookup(), tmp_path)) == lookup()
