"""Reading ONNX files: whatever is wrong with one is said in words."""

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
from sparseflow.latency import onnx_file, session
from sparseflow.latency.graph import analyze
from tests.latency.onnx_models import FLOAT, convnet, lookup, model, save, values


def with_external(folder: Path) -> Path:
    path = folder / "model.onnx"
    onnx.save_model(
        convnet(width=32), str(path), save_as_external_data=True, location="weights.bin", size_threshold=64
    )
    return path


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.onnx", tmp_path):
        with pytest.raises(InputError, match="no model file"):
            analyze(path)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"\x00" * 64, b"\x08\x08", b"%PDF-1.7 and so on", bytes(range(256))]
)
def test_not_onnx(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(FileFormatError, match="not an ONNX model"):
        analyze(path)


@given(share=st.floats(0, 0.999))
def test_cut_off_anywhere(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    content = convnet().SerializeToString()
    path = tmp_path_factory.mktemp("cut") / "model.onnx"
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(InputError):
        onnx_file.load(path)


def test_external_weights(tmp_path: Path) -> None:
    path = with_external(tmp_path)
    whole = analyze(path)
    assert whole.counts() == analyze(save(convnet(width=32), tmp_path, "one.onnx")).counts()
    data = tmp_path / "weights.bin"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(FileFormatError, match=r"weights\.bin was cut off"):
        analyze(path)
    data.unlink()
    with pytest.raises(FileFormatError, match=r"weights\.bin, which is not there"):
        analyze(path)


def test_more_than_2_gb_of_weights(tmp_path: Path) -> None:
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
    with pytest.raises(ModelError, match=r"4\.\d+ GB"):
        analyze(path)


def test_open_extents(tmp_path: Path) -> None:
    path = save(convnet(batch="N", size="H"), tmp_path)
    with pytest.raises(InputError, match=r"--shape x=1,3,224,224"):
        analyze(path)
    assert analyze(path, shapes={"x": (2, 3, 12, 12)}).inputs[0].shape == (2, 3, 12, 12)
    for wrong in ((2, 4, 12, 12), (2, 3, 12)):
        with pytest.raises(InputError, match="does not fit"):
            analyze(path, shapes={"x": wrong})
    with pytest.raises(InputError, match="no input z"):
        analyze(path, shapes={"x": (2, 3, 12, 12), "z": (1,)})


def test_an_input_of_unknown_rank(tmp_path: Path) -> None:
    path = save(
        model([helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, None)], [("y", FLOAT, None)]), tmp_path
    )
    with pytest.raises(InputError, match="no shape at all"):
        analyze(path)
    assert analyze(path, shapes={"x": (3,)}).outputs[0].shape == (3,)


def test_a_newer_opset(tmp_path: Path) -> None:
    built = convnet()
    built.opset_import[0].version = 999
    with pytest.raises(ModelError, match=r"opset 999.*older opset"):
        analyze(save(built, tmp_path))


def test_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no operator"):
        analyze(save(model([], [("x", FLOAT, [1])], [("x", FLOAT, [1])]), tmp_path))


def test_tensors_without_elements(tmp_path: Path) -> None:
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    for shape in ([0, 3], [2, 0]):
        with pytest.raises(ModelError, match="no elements"):
            analyze(save(model(relu, [("x", FLOAT, shape)], [("y", FLOAT, shape)]), tmp_path))
    empty = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", FLOAT, [2, 3])],
        [("y", FLOAT, None)],
        {"w": np.zeros((3, 0), np.float32)},
    )
    with pytest.raises(ModelError, match="no elements"):
        analyze(save(empty, tmp_path))
    # Only inside: a slice that leaves nothing.
    inside = model(
        [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Slice", ["h", "a", "b"], ["y"])],
        [("x", FLOAT, [2, 3])],
        [("y", FLOAT, None)],
        {"a": np.array([1]), "b": np.array([1])},
    )
    with pytest.raises(ModelError, match="`y` has no elements"):
        analyze(save(inside, tmp_path))


def test_an_input_of_more_than_2_gb(tmp_path: Path) -> None:
    path = save(convnet(batch="N", size="H"), tmp_path)
    with pytest.raises(ModelError, match=r"12\.\d+ GB"):
        analyze(path, shapes={"x": (1024, 3, 1024, 1024)})


def test_an_optimised_graph_of_more_than_2_gb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a mask that is worked out in advance for every image of a large batch."""
    path = save(convnet(), tmp_path)

    def fails(*arguments: object, **more: object) -> None:
        raise FileFormatError("INVALID_PROTOBUF : Protobuf serialization failed.")

    monkeypatch.setattr(session, "open_session", fails)
    with pytest.raises(ModelError, match=r"more than 2 GB.*smaller batch"):
        analyze(path)


def test_values_that_are_no_tensors_of_numbers(tmp_path: Path) -> None:
    text = model(
        [helper.make_node("Identity", ["x"], ["y"])],
        [("x", TensorProto.STRING, [1])],
        [("y", TensorProto.STRING, [1])],
    )
    with pytest.raises(ModelError, match="string"):
        analyze(save(text, tmp_path))


def test_weights_that_are_listed_as_inputs(tmp_path: Path) -> None:
    """As files of the first versions of ONNX do."""
    built = convnet()
    for weight in built.graph.initializer:
        built.graph.input.append(helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
    graph = analyze(save(built, tmp_path))
    assert [t.name for t in graph.inputs] == ["x"]


def test_types_and_attributes() -> None:
    assert onnx_file.dtype_name("tensor(double)") == onnx_file.dtype_name(TensorProto.DOUBLE) == "float64"
    assert onnx_file.dtype_name("tensor(bfloat16)") == "bfloat16"
    assert onnx_file.element_type("float32") == FLOAT
    assert onnx_file.numpy_type("int64") == np.int64
    for kind in ("seq(tensor(float))", "tensor(string)"):
        with pytest.raises(ModelError, match="only tensors of numbers"):
            onnx_file.dtype_name(kind)
    attribute = helper.make_attribute
    assert onnx_file.attribute_value(attribute("a", [1, 2])) == [1, 2]
    assert onnx_file.attribute_value(attribute("a", "Relu")) == "Relu"
    assert onnx_file.attribute_value(attribute("a", float("inf"))) == "inf"
    tensors = [
        onnx_file.attribute_value(attribute("a", numpy_helper.from_array(values(2, seed=seed))))
        for seed in (0, 0, 1)
    ]
    assert tensors[0] == tensors[1] != tensors[2] and tensors[0]["shape"] == [2]


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    assert onnx_file.load(save(lookup(), tmp_path)) == lookup()
