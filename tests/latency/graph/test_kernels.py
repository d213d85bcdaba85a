"""Kernels: identity, canonical names and records."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.errors import FileFormatError
from sparseflow.latency.graph.kernels import (
    DTYPE_BITS,
    UNDEFINED,
    KernelSpec,
    TensorSpec,
    get_canonical_name,
    parse_kernel,
)

shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
dtypes = st.sampled_from(sorted(set(DTYPE_BITS) - {UNDEFINED}))
attributes = st.dictionaries(
    st.text(max_size=5),
    st.one_of(
        st.integers(-5, 5),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=5),
        st.lists(st.integers(-5, 5), max_size=4),
    ),
    max_size=3,
)


@st.composite
def tensors(draw: Any, side: str) -> tuple[TensorSpec, ...]:
    specs = draw(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=3))
    return tuple(TensorSpec(name=f"{side}_{i}", dtype=d, shape=s) for i, (d, s) in enumerate(specs))


@st.composite
def kernels(draw: Any) -> KernelSpec:
    inputs = draw(tensors("input"))
    positions = st.integers(0, len(inputs) - 1)
    return KernelSpec(
        op="Op",
        node_op=draw(st.sampled_from(["Op", "FusedOp"])),
        domain=draw(st.sampled_from(["", "com.microsoft"])),
        opset=draw(st.integers(1, 3)),
        attributes=draw(attributes),
        inputs=inputs,
        outputs=draw(tensors("output")),
        constants=tuple(sorted(draw(st.sets(positions)))),
        values=draw(
            st.dictionaries(positions, st.lists(st.integers(-9, 9), max_size=3).map(tuple), max_size=2)
        ),
        flops=draw(st.floats(0, 1e12)),
        bytes_moved=draw(st.floats(0, 1e12)),
        flops_known=draw(st.booleans()),
    )


def dump(kernel: KernelSpec) -> dict[str, Any]:
    return kernel.model_dump(mode="json")


def identity(kernel: KernelSpec) -> str:
    """Return the identity of a kernel, computed independently of its id."""
    identity_fields = {
        k: v for k, v in dump(kernel).items() if k not in ("id", "flops", "bytes_moved", "flops_known")
    }
    return json.dumps(identity_fields, sort_keys=True)


def conv(**changes: Any) -> KernelSpec:
    kernel = KernelSpec(
        op="Conv",
        node_op="Conv",
        domain="",
        opset=11,
        attributes={"strides": [1, 1], "group": 1},
        inputs=(
            TensorSpec(name="input_0", dtype="float32", shape=(1, 64, 56, 56)),
            TensorSpec(name="input_1", dtype="float32", shape=(64, 64, 3, 3)),
        ),
        outputs=(TensorSpec(name="output_0", dtype="float32", shape=(1, 64, 56, 56)),),
        constants=(1,),
        flops=1.0,
        bytes_moved=2.0,
    )
    return KernelSpec.model_validate(dict(kernel) | changes | {"id": ""})


def change_tensor(tensor: TensorSpec, **changes: Any) -> TensorSpec:
    return tensor.model_copy(update=changes)


def test_file_stem_shows_the_shape_of_the_first_activation() -> None:
    kernel = conv(op="Conv_Relu")
    digest = kernel.id.removeprefix("Conv_Relu_")
    assert kernel.file_stem == f"Conv_Relu_1x64x56x56_{digest}"
    assert conv(op="Conv_Relu", constants=(0,)).file_stem.startswith("Conv_Relu_64x64x3x3_")
    scalar = TensorSpec(name="input_0", dtype="float32", shape=())
    assert conv(inputs=(scalar,), constants=()).file_stem.startswith("Conv_scalar_")
    assert conv(inputs=(), constants=(), outputs=()).file_stem.startswith("Conv_scalar_")


@given(kernels(), kernels())
def test_equal_ids_iff_equal_identity(first: KernelSpec, second: KernelSpec) -> None:
    assert (first.id == second.id) == (identity(first) == identity(second))


@pytest.mark.parametrize(
    "change",
    [
        {"op": "Conv_Relu"},
        {"node_op": "FusedConv"},
        {"domain": "com.microsoft"},
        {"opset": 12},
        {"attributes": {"strides": [2, 2], "group": 1}},
        {"attributes": {"strides": [1, 1], "group": 64}},
        {"attributes": {"strides": [1, 1], "group": 1, "activation": "Relu"}},
        {"inputs": (conv().inputs[0], change_tensor(conv().inputs[1], shape=(128, 64, 3, 3)))},
        {"inputs": (change_tensor(conv().inputs[0], dtype="float16"), conv().inputs[1])},
        {"inputs": (conv().inputs[0], change_tensor(conv().inputs[1], name="input_0"))},
        {"outputs": (change_tensor(conv().outputs[0], shape=(1, 64, 28, 28)),)},
        {"constants": ()},
        {"values": {1: (0, 1)}},
    ],
)
def test_id_depends_on_identity_fields(change: dict[str, Any]) -> None:
    assert conv(**change).id != conv().id


def test_id_ignores_derived_fields_and_order() -> None:
    assert conv(flops=7.0, bytes_moved=9.0).id == conv().id
    assert conv(attributes={"group": 1, "strides": [1, 1]}).id == conv().id


def test_id_starts_with_canonical_name() -> None:
    name, _, digest = conv(op="Conv_Add_Relu").id.rpartition("_")
    assert name == "Conv_Add_Relu" and len(digest) == 12 and int(digest, 16) >= 0


@given(kernels())
def test_kernel_round_trip(kernel: KernelSpec) -> None:
    assert parse_kernel(json.loads(json.dumps(dump(kernel))), "record") == kernel


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"surprise": 1}, "surprise"),
        ({"attributes": {"strides": [3, 3]}}, conv().id),
        ({"inputs": [{"name": "x", "dtype": "float32"}]}, "shape"),
        ({"inputs": [{"name": "x", "dtype": "float33", "shape": [1]}]}, "float33"),
        ({"inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}]}, "inputs.0.shape.0"),
        ({"inputs": None}, "inputs"),
        ({"flops": "many"}, "flops"),
        ({"constants": [9]}, "[9]"),
    ],
)
def test_kernel_invalid_record_raises(change: dict[str, Any], value: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        parse_kernel({**dump(conv()), **change}, "record")
    assert value in str(caught.value)


def test_kernel_incomplete_record_raises() -> None:
    short = {key: value for key, value in dump(conv()).items() if key != "outputs"}
    for record in (short, [], None, "Conv"):
        with pytest.raises(FileFormatError):
            parse_kernel(record, "record")


def test_non_json_attributes_raise() -> None:
    for value in (float("nan"), b"bytes", object()):
        with pytest.raises(ValueError, match="JSON"):
            conv(attributes={"a": value})


def test_tensor_bytes_packed() -> None:
    assert TensorSpec(name="x", dtype="float16", shape=(3, 5)).bytes == 30
    assert TensorSpec(name="x", dtype="int4", shape=(3,)).bytes == 2
    assert TensorSpec(name="x", dtype="float32", shape=()).bytes == 4
    assert TensorSpec(name="", dtype=UNDEFINED, shape=()).bytes == 0
    assert conv().constant_bytes == 64 * 64 * 9 * 4


X = TensorSpec(name="input_0", dtype="float32", shape=(1, 8, 4, 4))
ABSENT = TensorSpec(name="input_2", dtype=UNDEFINED, shape=())


@pytest.mark.parametrize(
    ("node_op", "domain", "attrs", "inputs", "name"),
    [
        ("Conv", "", {}, (X, X, X), "Conv"),
        ("Conv", "com.microsoft.nchwc", {}, (X, X), "Conv"),
        ("Conv", "com.microsoft.nchwc", {"activation": "Relu"}, (X, X, X), "Conv_Relu"),
        ("Conv", "com.microsoft.nchwc", {"activation": "Relu"}, (X, X, ABSENT, X), "Conv_Add_Relu"),
        ("FusedConv", "com.microsoft", {"activation": "Relu"}, (X, X, X, X), "Conv_Add_Relu"),
        ("FusedConv", "com.microsoft", {"activation": "Relu"}, (X, X, X), "Conv_Relu"),
        ("NhwcFusedConv", "com.microsoft", {"activation": "Relu"}, (X, X, X, X), "Conv_Add_Relu"),
        ("Conv", "com.ms.internal.nhwc", {}, (X, X, X), "Conv"),
        ("Conv", "com.microsoft.nchwc", {"activation": "Clip"}, (X, X, X), "Conv_Clip"),
        ("FusedGemm", "com.microsoft", {"activation": "LeakyRelu"}, (X, X, X), "Gemm_LeakyRelu"),
        ("FusedMatMul", "com.microsoft", {"alpha": 0.125, "transB": 1}, (X, X), "Transpose_MatMul_Mul"),
        ("FusedMatMul", "com.microsoft", {"alpha": 1.0}, (X, X), "MatMul"),
        ("Gelu", "com.microsoft", {}, (X,), "Gelu"),
        ("Gelu", "", {}, (X,), "Gelu"),
        ("BiasGelu", "com.microsoft", {}, (X, X), "Add_Gelu"),
        ("FastGelu", "com.microsoft", {}, (X, X), "Add_Gelu"),
        ("SkipLayerNormalization", "com.microsoft", {}, (X, X, X), "Add_LayerNormalization"),
        ("ReorderInput", "com.microsoft.nchwc", {}, (X,), "ReorderInput"),
        ("BiasGelu", "my.domain", {}, (X, X), "BiasGelu"),
    ],
)
def test_canonical_names(
    node_op: str, domain: str, attrs: dict[str, Any], inputs: tuple[TensorSpec, ...], name: str
) -> None:
    assert get_canonical_name(node_op, domain, attrs, inputs) == name
