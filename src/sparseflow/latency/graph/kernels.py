"""Kernels: the units that a runtime executes, with an identity and a canonical name.

Two nodes have the same kernel if everything that can change their latency is equal: operator, domain,
version, attributes, shapes and types of inputs and outputs, which inputs are weights, and the values of small
integer inputs (axes, pads, a target shape). The node's position and tensor names do not count, so that one
measurement serves every model with the kernel.

The canonical name is coarser. It lists the computation as ONNX operators in their unfused order:
`Conv_Add_Relu` is a convolution fused with a residual addition and a ReLU, for every operator, layout and
shape of a runtime.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import NonNegativeFloat, NonNegativeInt, ValidationError, field_validator, model_validator

from sparseflow.core.config import StrictModel, describe_validation_error
from sparseflow.errors import FileFormatError

UNDEFINED = "undefined"
"""Type of an omitted optional input or output."""

STRING = "string"
"""Type of a tensor of text."""

OPAQUE_TYPES = ("sequence", "optional", "map", "sparse_tensor")
"""Types of values that are not tensors; their shape is recorded as `()`."""

DTYPE_BITS: Mapping[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "int4": 4, "int2": 2,
    "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "uint4": 4, "uint2": 2,
    "bool": 8, "complex64": 64, "complex128": 128,
    "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "float8e8m0": 8,
    "float4e2m1": 4, STRING: 256, UNDEFINED: 0, **dict.fromkeys(OPAQUE_TYPES, 0),
}  # fmt: skip
"""ONNX's name of an element type -> bits per element; a text counts as the header of a C++ string."""

_ID_DIGITS = 12

_RUNTIME_OP_NAMES = {
    "BiasGelu": "Add_Gelu",
    "BiasSoftmax": "Add_Softmax",
    "BiasAdd": "Add_Add",
    "BiasDropout": "Add_Dropout",
    "SkipLayerNormalization": "Add_LayerNormalization",
    "SkipSimplifiedLayerNormalization": "Add_RMSNormalization",
    "SkipGroupNorm": "Add_GroupNormalization",
    "SimplifiedLayerNormalization": "RMSNormalization",
    "GroupNorm": "GroupNormalization",
    "GemmFastGelu": "MatMul_Gelu",
    "NhwcMaxPool": "MaxPool",
    "Upsample": "Resize",
}
"""Operator of a runtime -> its computation in ONNX operators."""

_MAIN_OPERATORS = {
    **dict.fromkeys(("ConvInteger", "FusedConv", "NhwcConv", "NhwcFusedConv"), "Conv"),
    **dict.fromkeys(("FusedGemm", "QGemm"), "Gemm"),
    **dict.fromkeys(
        (
            "FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", "MatMulInteger", "MatMulInteger16",
            "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits", "MatMulBnb4", "GemmFastGelu",
        ),
        "MatMul",
    ),
    "DynamicQuantizeLSTM": "LSTM",
    "NhwcMaxPool": "MaxPool",
}  # fmt: skip
"""Operator of a runtime, or of quantized tensors -> operator that determines its latency."""

_CONTRACTIONS = ("Conv", "MatMul", "Gemm")

_CONVOLUTIONS = {"Conv", "FusedConv", "NhwcConv", "NhwcFusedConv"}
_RUNTIME_DOMAINS = ("com.microsoft", "com.ms.internal.nhwc")
_SUM_POSITION = 3
"""Position of the input that a runtime's convolution adds to its result."""


class TensorSpec(StrictModel):
    """Name, type and shape of a kernel's input or output.

    Attributes:
        name: Position: `input_0`, `output_0`, … A tensor that is read twice has its first position's name at
            both; a tensor captured by a subgraph keeps its own name.
        dtype: ONNX's name of the element type, such as `"float32"`; `"undefined"` if omitted, one of
            `OPAQUE_TYPES` if the value is not a tensor.
        shape: Extents; `()` is a scalar.
    """

    name: str
    dtype: str
    shape: tuple[NonNegativeInt, ...]

    @field_validator("dtype")
    @classmethod
    def _check_dtype(cls, dtype: str) -> str:
        if dtype not in DTYPE_BITS:
            raise ValueError(f"unknown type {dtype!r}; expected one of: {', '.join(DTYPE_BITS)}")
        return dtype

    @property
    def present(self) -> bool:
        """Whether the tensor exists; False for an omitted optional one."""
        return self.dtype != UNDEFINED

    @property
    def opaque(self) -> bool:
        """Whether the value is not a tensor: a sequence, an optional value or a map."""
        return self.dtype in OPAQUE_TYPES

    @property
    def elements(self) -> int:
        return math.prod(self.shape) if self.present and not self.opaque else 0

    @property
    def bytes(self) -> int:
        """Bytes of all elements, packed."""
        return (self.elements * DTYPE_BITS[self.dtype] + 7) // 8


class Body(StrictModel):
    """A subgraph of If, Loop or Scan, with its runs in one run of the node.

    Attributes:
        name: Attribute of the node, such as `"then_branch"`.
        trips: Number of runs; for a branch of If 1 or 0.
        kernels: Kernels in execution order, one per node.
    """

    name: str
    trips: NonNegativeFloat
    kernels: tuple[KernelSpec, ...]

    @property
    def flops(self) -> float:
        """Operations of all runs."""
        return self.trips * sum(kernel.flops for kernel in self.kernels)

    @property
    def bytes_moved(self) -> float:
        """Bytes of all runs."""
        return self.trips * sum(kernel.bytes_moved for kernel in self.kernels)


class KernelSpec(StrictModel):
    """One kernel.

    Attributes:
        op: Canonical name, such as `"Conv_Add_Relu"`.
        node_op: Operator of the node, such as `"FusedConv"`.
        domain: Domain of the operator; `""` is ONNX's own.
        opset: Version in which the operator last changed, or else the imported version.
        attributes: Name -> value in JSON types; a tensor is `{"dtype", "shape", "sha256"}`, a subgraph
            `{"graph_sha256"}`, a non-finite float its text.
        inputs: Inputs by position.
        outputs: Outputs by position.
        constants: Positions of inputs that are weights.
        values: Position of a small integer constant -> its elements; for the exponent of a power,
            thousandths.
        bodies: Subgraphs of If, Loop or Scan; empty if they could not be analyzed.
        flops: Floating-point operations; a multiply-add counts as two.
        bytes_moved: Bytes of all inputs, including weights, and all outputs.
        flops_known: False if `flops` is the fallback of one operation per output element.
        id: Canonical name, `_` and 12 hexadecimal digits of a SHA-256 of all fields but `flops`,
            `bytes_moved` and `flops_known`. Computed; in a record it must match the content.
    """

    op: str
    node_op: str
    domain: str
    opset: int = 1
    attributes: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: tuple[NonNegativeInt, ...] = ()
    values: Mapping[NonNegativeInt, tuple[int, ...]] = {}
    bodies: tuple[Body, ...] = ()
    flops: NonNegativeFloat
    bytes_moved: NonNegativeFloat
    flops_known: bool = True
    id: str = ""

    @model_validator(mode="after")
    def _set_id(self) -> Self:
        invalid = [position for position in (*self.constants, *self.values) if position >= len(self.inputs)]
        if invalid:
            raise ValueError(f"a `{self.op}` with {len(self.inputs)} inputs has no constants at {invalid}")
        kernel_id = f"{self.op}_{self._compute_digest()}"
        if self.id not in ("", kernel_id):
            raise ValueError(
                f"the record of the kernel `{self.id}` has the content of `{kernel_id}`: it was edited, or "
                "written by another version; analyze the model again"
            )
        object.__setattr__(self, "id", kernel_id)
        return self

    def __hash__(self) -> int:
        return hash(self.id)

    def _compute_digest(self) -> str:
        identity = {
            "op": self.op,
            "node_op": self.node_op,
            "domain": self.domain,
            "opset": self.opset,
            "attributes": dict(self.attributes),
            "inputs": [[t.name, t.dtype, list(t.shape)] for t in self.inputs],
            "outputs": [[t.dtype, list(t.shape)] for t in self.outputs],
            "constants": sorted(self.constants),
            "values": {str(position): list(values) for position, values in self.values.items()},
        }
        if self.bodies:
            identity["bodies"] = [[b.name, b.trips, [k.id for k in b.kernels]] for b in self.bodies]
        try:
            text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except TypeError as error:
            raise ValueError(f"the attributes of a `{self.op}` must be JSON types: {error}") from error
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]

    @property
    def opaque_tensors(self) -> tuple[str, ...]:
        """Names of the inputs and outputs that are not tensors; with some, no model has this node alone."""
        return tuple(t.name for t in (*self.inputs, *self.outputs) if t.opaque)

    @property
    def constant_bytes(self) -> int:
        """Bytes of the inputs that are weights."""
        return sum(self.inputs[position].bytes for position in set(self.constants))

    @property
    def file_stem(self) -> str:
        """Name of the kernel's files without suffix: the id with the shape of the first activation.

        It is `Conv_Add_Relu_1x64x56x56_55d0777aba49` for the id `Conv_Add_Relu_55d0777aba49`.
        """
        activations = (t for n, t in enumerate(self.inputs) if t.present and n not in self.constants)
        tensor = next(activations, next(iter(self.outputs), None))
        shape = "x".join(map(str, tensor.shape)) if tensor is not None else ""
        return f"{self.op}_{shape or 'scalar'}_{self.id.removeprefix(f'{self.op}_')}"


def parse_kernel(record: object, source: object) -> KernelSpec:
    """Validate the JSON record of a kernel.

    Raises:
        FileFormatError: A field is unknown, missing or invalid, or the id does not match the content; the
            message names `source`.
    """
    try:
        return KernelSpec.model_validate(record)
    except ValidationError as error:
        raise FileFormatError(
            f"{source}: invalid kernel record: {describe_validation_error(error)}"
        ) from error


def get_canonical_name(
    node_op: str, domain: str, attributes: Mapping[str, Any], inputs: tuple[TensorSpec, ...]
) -> str:
    """Return the computation of a node as ONNX operators joined by `_`.

    Args:
        node_op: Operator of the node.
        domain: Domain of the operator.
        attributes: Attributes in JSON types.
        inputs: Inputs, including omitted optional ones.
    """

    def is_present(position: int) -> bool:
        return position < len(inputs) and inputs[position].present

    if not domain.startswith(_RUNTIME_DOMAINS):
        return node_op
    if node_op in _CONVOLUTIONS:
        parts = ["Conv", "Add" if is_present(_SUM_POSITION) else "", attributes.get("activation", "")]
    elif node_op == "FusedGemm":
        parts = ["Gemm", attributes.get("activation", "")]
    elif node_op in ("FusedMatMul", "TransposeMatMul", "FusedMatMulActivation"):
        transposed = any(attributes.get(name) for name in ("transA", "transB", "transBatchA", "transBatchB"))
        scaled = attributes.get("alpha", 1.0) != 1.0
        parts = [
            "Transpose" if transposed else "",
            "MatMul",
            "Mul" if scaled else "",
            attributes.get("activation", ""),
        ]
    elif node_op == "FastGelu":
        parts = ["Add" if is_present(1) else "", "Gelu"]
    else:
        parts = [_RUNTIME_OP_NAMES.get(node_op, node_op)]
    return "_".join(part for part in parts if part)


def get_main_operator(op: str) -> str:
    """Return the operator that determines the latency of a kernel.

    Args:
        op: Canonical name such as `"Conv_Add_Relu"`, or operator of a node such as `"QLinearConv"`.
    """
    parts = [_MAIN_OPERATORS.get(part, part).removeprefix("QLinear") for part in op.split("_")]
    return next((part for part in parts if part in _CONTRACTIONS), parts[-1])
