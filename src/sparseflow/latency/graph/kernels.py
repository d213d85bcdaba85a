"""Kernels: what a runtime executes as one unit, with an identity and a canonical name.

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
from dataclasses import dataclass, field, fields
from typing import Any

from sparseflow.errors import FileFormatError, InputError

UNDEFINED = "undefined"
"""Type of an omitted optional input or output."""

DTYPE_BITS: Mapping[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "int4": 4, "int2": 2,
    "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "uint4": 4, "uint2": 2,
    "bool": 8, "complex64": 64, "complex128": 128,
    "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "float8e8m0": 8,
    "float4e2m1": 4, UNDEFINED: 0,
}  # fmt: skip
"""ONNX's name of an element type -> bits per element."""

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

_CONVOLUTIONS = {"Conv", "FusedConv", "NhwcConv", "NhwcFusedConv"}
_RUNTIME_DOMAINS = ("com.microsoft", "com.ms.internal.nhwc")
_SUM_POSITION = 3
"""Position of the input that a runtime's convolution adds to its result."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, type and shape of a kernel's input or output.

    Attributes:
        name: Position: `input_0`, `output_0`, … A tensor that is read twice has its first position's name at
            both; a tensor captured by a subgraph keeps its own name.
        dtype: ONNX's name of the element type, such as `"float32"`; `"undefined"` if omitted.
        shape: Extents; `()` is a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BITS:
            raise InputError(
                f"tensor `{self.name}` has the unknown type {self.dtype!r}; expected one of: "
                f"{', '.join(DTYPE_BITS)}"
            )
        if any(extent < 0 for extent in self.shape):
            raise InputError(f"tensor `{self.name}` has the shape {self.shape}; extents must not be negative")

    @property
    def present(self) -> bool:
        """Whether the tensor exists; False for an omitted optional one."""
        return self.dtype != UNDEFINED

    @property
    def elements(self) -> int:
        return math.prod(self.shape) if self.present else 0

    @property
    def bytes(self) -> int:
        """Bytes of all elements, packed."""
        return (self.elements * DTYPE_BITS[self.dtype] + 7) // 8


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
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
        flops: Floating-point operations; a multiply-add counts as two.
        bytes_moved: Bytes of all inputs, including weights, and all outputs.
        flops_known: False if `flops` is the fallback of one operation per output element.
        id: Canonical name, `_` and 12 hexadecimal digits of a SHA-256 of all fields but `flops`,
            `bytes_moved` and `flops_known`. Computed; leave it out.
    """

    op: str
    node_op: str
    domain: str
    opset: int = 1
    attributes: Mapping[str, Any]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    constants: tuple[int, ...] = ()
    values: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    flops: float
    bytes_moved: float
    flops_known: bool = True
    id: str = ""

    def __post_init__(self) -> None:
        invalid_positions = [
            position for position in (*self.constants, *self.values) if position >= len(self.inputs)
        ]
        if invalid_positions:
            raise InputError(
                f"a `{self.op}` with {len(self.inputs)} inputs cannot have constants at {invalid_positions}"
            )
        if not self.id:
            object.__setattr__(self, "id", f"{self.op}_{self._compute_digest()}")

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
        try:
            text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(f"the attributes of a `{self.op}` must be JSON types: {error}") from error
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]

    @property
    def constant_bytes(self) -> int:
        """Bytes of the inputs that are weights."""
        return sum(self.inputs[position].bytes for position in set(self.constants))

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        record = {f.name: getattr(self, f.name) for f in fields(self)}
        record["attributes"] = dict(self.attributes)
        for side in ("inputs", "outputs"):
            record[side] = [
                {"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in getattr(self, side)
            ]
        record["constants"] = list(self.constants)
        record["values"] = {str(position): list(values) for position, values in self.values.items()}
        return {"id": record.pop("id"), **record}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> KernelSpec:
        """Build a kernel from the result of `to_dict`.

        Raises:
            FileFormatError: A field is unknown, missing or of the wrong type, or the id does not match the
                content.
        """
        names = {f.name for f in fields(cls)}
        _check_fields(record, names, names - {"opset", "constants", "values", "flops_known", "id"}, "kernel")
        try:
            arguments = dict(record)
            record_id = arguments.pop("id", None)
            for side in ("inputs", "outputs"):
                arguments[side] = tuple(_parse_tensor(t) for t in arguments[side])
            arguments["constants"] = tuple(int(position) for position in arguments.get("constants", ()))
            arguments["values"] = {
                int(position): tuple(int(v) for v in values)
                for position, values in arguments.get("values", {}).items()
            }
            for number in ("flops", "bytes_moved"):
                arguments[number] = float(arguments[number])
            kernel = cls(**arguments)
        except FileFormatError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise FileFormatError(f"invalid kernel record: {error}") from error
        if record_id is not None and record_id != kernel.id:
            raise FileFormatError(
                f"the record of the kernel `{record_id}` has the content of `{kernel.id}`: it was edited, "
                "or written by another version; analyze the model again"
            )
        return kernel


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


def _check_fields(record: Any, known: set[str], required: set[str], record_type: str) -> None:
    if not isinstance(record, Mapping):
        raise FileFormatError(
            f"invalid {record_type} record: expected an object, got {type(record).__name__}"
        )
    unknown, missing = sorted(set(record) - known), sorted(required - set(record))
    if unknown or missing:
        raise FileFormatError(
            f"invalid {record_type} record: unknown fields {unknown}, missing fields {missing}; the fields "
            f"are {sorted(known)}"
        )


def _parse_tensor(record: Any) -> TensorSpec:
    names = {f.name for f in fields(TensorSpec)}
    _check_fields(record, names, names, "tensor")
    return TensorSpec(
        name=str(record["name"]),
        dtype=str(record["dtype"]),
        shape=tuple(int(extent) for extent in record["shape"]),
    )
