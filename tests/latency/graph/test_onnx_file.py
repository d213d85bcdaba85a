"""Validated reading of ONNX files."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from sparseflow.errors import FileFormatError, InputError, ModelError, OutputError
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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("offset", "abc", "'abc', expected a number of bytes"),
        ("length", "", "'', expected a number of bytes"),
        ("offset", "-5", "'-5', expected a number of bytes"),
        ("length", "9" * 400, "expected a number of bytes"),
        ("length", str(10**18), "is truncated"),
        ("location", "../outside.bin", "outside the directory of the model"),
        ("location", "link.bin", "outside the directory of the model"),
        ("location", "/etc/passwd", "outside the directory of the model"),
        ("location", "a\0b", "outside the directory of the model"),
        ("location", "absent.bin", "does not exist"),
        ("location", ".", "does not exist"),
    ],
)
def test_load_invalid_external_weights_raises(tmp_path: Path, field: str, value: str, message: str) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    path = with_external(folder)
    (tmp_path / "outside.bin").write_bytes((folder / "weights.bin").read_bytes())
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    built = onnx.load_model(str(path), load_external_data=False)
    weight = next(w for w in built.graph.initializer if w.external_data)
    entry = next((e for e in weight.external_data if e.key == field), None) or weight.external_data.add()
    entry.key, entry.value = field, value
    path.write_bytes(built.SerializeToString())
    with pytest.raises(FileFormatError, match=message):
        analyze(path)


def test_load_external_weights_of_attribute_outside_raises(tmp_path: Path) -> None:
    constant = numpy_helper.from_array(values(3), "c")
    constant.ClearField("raw_data")
    constant.data_location = TensorProto.EXTERNAL
    entry = constant.external_data.add()
    entry.key, entry.value = "location", "../outside.bin"
    (tmp_path / "outside.bin").write_bytes(bytes(12))
    nodes = [
        helper.make_node("Constant", [], ["c"], value=constant),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    path = save(model(nodes, [("x", FLOAT, [3])], [("y", FLOAT, [3])]), tmp_path / "models")
    with pytest.raises(FileFormatError, match="outside the directory of the model"):
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
    with pytest.raises(InputError, match=r"--shape x=1,3,1,1 "):
        analyze(path)
    assert analyze(path, shapes={"x": (2, 3, 12, 12)}).inputs[0].shape == (2, 3, 12, 12)
    for wrong in ((2, 4, 12, 12), (2, 3, 12)):
        with pytest.raises(InputError):
            analyze(path, shapes={"x": wrong})
    with pytest.raises(InputError):
        analyze(path, shapes={"x": (2, 3, 12, 12), "z": (1,)})


def test_negative_dimension_is_open(tmp_path: Path) -> None:
    path = save(convnet(batch=-1, size=-1), tmp_path)
    with pytest.raises(InputError, match=r"--shape x=1,3,1,1 "):
        analyze(path)
    graph = analyze(path, shapes={"x": (2, 3, 12, 12)})
    assert graph.outputs[0].shape == (2, 5)
    declared = convnet(batch=-1)
    for extent in (-1, 5):
        declared.graph.output[0].type.tensor_type.shape.dim.add().dim_value = extent
    assert analyze(save(declared, tmp_path), shapes={"x": (2, 3, 12, 12)}).outputs[0].shape == (2, 5)


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


def test_empty_tensors(tmp_path: Path) -> None:
    relu = [helper.make_node("Relu", ["x"], ["y"])]
    for shape in ([0, 3], [2, 0]):
        graph = analyze(save(model(relu, [("x", FLOAT, shape)], [("y", FLOAT, shape)]), tmp_path))
        assert graph.outputs[0].shape == tuple(shape) and graph.flops == graph.bytes_moved == 0
    empty = model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [("x", FLOAT, [2, 3])],
        [("y", FLOAT, None)],
        {"w": np.zeros((3, 0), np.float32)},
    )
    assert analyze(save(empty, tmp_path)).outputs[0].shape == (2, 0)
    # An intermediate tensor: an empty slice.
    inside = model(
        [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Slice", ["h", "a", "b"], ["y"])],
        [("x", FLOAT, [2, 3])],
        [("y", FLOAT, None)],
        {"a": np.array([1]), "b": np.array([1])},
    )
    assert analyze(save(inside, tmp_path)).outputs[0].shape == (0, 3)


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
    with pytest.raises(ModelError, match=r"exceeds 2 GB"):
        analyze(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OutputError, match=r"cannot write the optimized graph.*TMPDIR"):
            analyze(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_unknown_element_types_raise(tmp_path: Path) -> None:
    for damage in ("input", "weight"):
        built = convnet()
        if damage == "input":
            built.graph.input[0].type.tensor_type.elem_type = 99
        else:
            built.graph.initializer[0].data_type = 56
        with pytest.raises(ModelError, match=r"unknown element type (99|56)"):
            analyze(save(built, tmp_path))


def test_names_not_utf8_raise(tmp_path: Path) -> None:
    for name in (b"r1", b"w1", b"Relu"):
        content = convnet().SerializeToString().replace(name, b"\xff" + name[1:])
        path = tmp_path / "model.onnx"
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match="is not UTF-8"):
            analyze(path)


def test_sparse_weights_become_dense(tmp_path: Path) -> None:
    built = model(
        [helper.make_node("MatMul", ["x", "W"], ["y"])], [("x", FLOAT, [4, 4])], [("y", FLOAT, [4, 4])]
    )
    weights = helper.make_tensor("W", FLOAT, [2], [1.0, 2.0])
    expected = np.zeros((4, 4), np.float32)
    expected[0, 0], expected[1, 2] = 1.0, 2.0
    for positions, shape in (([0, 6], [2]), ([0, 0, 1, 2], [2, 2])):
        del built.graph.sparse_initializer[:]
        indices = helper.make_tensor("positions", TensorProto.INT64, shape, positions)
        built.graph.sparse_initializer.append(helper.make_sparse_tensor(weights, indices, [4, 4]))
        path = save(built, tmp_path)
        (weight,) = onnx_file.load_model(path).graph.initializer
        assert np.array_equal(numpy_helper.to_array(weight), expected)
        assert [node.kernel.constants for node in analyze(path).nodes] == [(1,)]
    built.graph.sparse_initializer[0].indices.int64_data[0] = 9
    with pytest.raises(FileFormatError, match="`W` does not fit its shape"):
        analyze(save(built, tmp_path))
    del built.graph.sparse_initializer[0].dims[:]
    built.graph.sparse_initializer[0].dims.extend([2**20, 2**20])
    with pytest.raises(ModelError, match="limit of an ONNX file is 2 GB"):
        analyze(save(built, tmp_path))


@pytest.mark.parametrize("inputs", [["x", "w"], ["x", "w", ""]])
def test_attention_without_bias_raises(tmp_path: Path, inputs: list[str]) -> None:
    """onnxruntime kills the process that runs it."""
    node = helper.make_node("Attention", inputs, ["y"], domain="com.microsoft", num_heads=2)
    built = model(
        [node], [("x", FLOAT, [1, 5, 8])], [("y", FLOAT, None)], {"w": values(8, 24)}, 17, ["com.microsoft"]
    )
    with pytest.raises(ModelError, match="without a bias"):
        analyze(save(built, tmp_path))


def test_model_of_other_type_raises() -> None:
    for wrong in (object(), None, 3):
        with pytest.raises(InputError, match="path of an ONNX file, got"):
            analyze(wrong)  # type: ignore[arg-type]


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
    with pytest.raises(ModelError):
        onnx_file.get_dtype_name("seq(tensor(float))")
    assert onnx_file.get_value_type("seq(tensor(float))") == "sequence"
    assert onnx_file.get_value_type("tensor(string)") == "string"
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
