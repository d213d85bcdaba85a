"""A kernel: what a runtime executes as one piece, who it is and what it is called.

Two nodes are the same kernel when nothing that can change their latency differs: operator, domain, version,
attributes, every input and output's shape and type, which inputs are weights, and the values of the small
integer inputs that steer the work (axes, pads, a target shape). Where a model keeps the node and what it
calls its tensors does not count, so one measurement serves every model that holds the kernel.

The *name* is coarser on purpose. It says what is computed in terms of ONNX operators, in the order in which
they would run unfused: `Conv_Add_Relu` is a convolution fused with a residual addition and a ReLU, whichever
operator, layout or shape a runtime has for it.
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
"""Type of an optional input or output that a node leaves out."""

ITEM_BITS: Mapping[str, int] = {
    "float64": 64, "float32": 32, "float16": 16, "bfloat16": 16,
    "int64": 64, "int32": 32, "int16": 16, "int8": 8, "int4": 4, "int2": 2,
    "uint64": 64, "uint32": 32, "uint16": 16, "uint8": 8, "uint4": 4, "uint2": 2,
    "bool": 8, "complex64": 64, "complex128": 128,
    "float8e4m3fn": 8, "float8e4m3fnuz": 8, "float8e5m2": 8, "float8e5m2fnuz": 8, "float8e8m0": 8,
    "float4e2m1": 4, UNDEFINED: 0,
}  # fmt: skip
"""ONNX's name of a type -> bits an element."""

_ID_DIGITS = 12

_PREFIXED = {
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
"""What a runtime's own operator computes, in operators of ONNX."""

_CONVOLUTIONS = {"Conv", "FusedConv", "NhwcConv", "NhwcFusedConv"}
_RUNTIME_DOMAINS = ("com.microsoft", "com.ms.internal.nhwc")
_SUM_POSITION = 3
"""Where a convolution of the runtime takes the tensor that is added to its result."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """What goes into a kernel or comes out of it.

    Attributes:
        name: `input_0`, `output_0`, …: the position, since a model's own names are not a kernel's business.
            One tensor read at two positions has the name of the first at both; what a subgraph captures has
            its own.
        dtype: ONNX's name, such as `"float32"`; `"undefined"` where an optional one is left out.
        shape: Extents; `()` is a scalar.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BITS:
            raise InputError(
                f"tensor `{self.name}` has the type {self.dtype!r}; known: {', '.join(ITEM_BITS)}"
            )
        if any(extent < 0 for extent in self.shape):
            raise InputError(f"tensor `{self.name}` has the shape {self.shape}; no extent may be negative")

    @property
    def present(self) -> bool:
        """False for an optional tensor that is left out."""
        return self.dtype != UNDEFINED

    @property
    def elements(self) -> int:
        return math.prod(self.shape) if self.present else 0

    @property
    def bytes(self) -> int:
        """Bytes of its elements, packed."""
        return (self.elements * ITEM_BITS[self.dtype] + 7) // 8


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel.

    Leave `id` out: it is worked out from the rest, of which only `flops` and `bytes_moved` do not count.

    Attributes:
        op: Canonical name, such as `"Conv_Add_Relu"`.
        node_op: The node's operator, such as `"FusedConv"`.
        domain: Its domain; `""` is ONNX's own.
        opset: Version of the domain in which the operator last changed, or the one that was imported.
        attributes: Name -> value in JSON's types; a tensor is `{"dtype", "shape", "sha256"}`, a subgraph
            `{"graph_sha256"}`, a float that JSON cannot write its text.
        inputs: One a position.
        outputs: One a position.
        constants: Positions of inputs that are weights: known before the model runs.
        values: Position of a small integer constant -> its elements; of a power's exponent -> thousandths.
        flops: Floating-point operations, a multiplication and an addition being two.
        bytes_moved: Bytes of all inputs, weights included, and all outputs.
        flops_known: False where `flops` is a stand-in of one operation an output element.
        id: Name, `_` and the first 12 hexadecimal digits of a SHA-256.
    """

    op: str
    node_op: str
    domain: str
    opset: int = 1
    attributes: Mapping[str, Any]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    constants: tuple[int, ...] = ()
    values: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    flops: float
    bytes_moved: float
    flops_known: bool = True
    id: str = ""

    def __post_init__(self) -> None:
        beyond = [position for position in (*self.constants, *self.values) if position >= len(self.inputs)]
        if beyond:
            raise InputError(f"a `{self.op}` of {len(self.inputs)} inputs cannot have constants at {beyond}")
        if not self.id:
            object.__setattr__(self, "id", f"{self.op}_{self._digest()}")

    def __hash__(self) -> int:
        return hash(self.id)

    def _digest(self) -> str:
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
            raise InputError(
                f"the attributes of a `{self.op}` are not made of JSON's types: {error}"
            ) from error
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]

    @property
    def constant_bytes(self) -> int:
        """Bytes of the inputs that are weights."""
        return sum(self.inputs[position].bytes for position in set(self.constants))

    def to_dict(self) -> dict[str, Any]:
        """The kernel in JSON's types."""
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
    def from_dict(cls, record: Mapping[str, Any]) -> Kernel:
        """Read back what `to_dict` gave.

        Raises:
            FileFormatError: A field is unknown, absent or of the wrong kind, or the record's id is not that
                of its content.
        """
        names = {f.name for f in fields(cls)}
        _check_fields(record, names, names - {"opset", "constants", "values", "flops_known", "id"}, "kernel")
        try:
            content = dict(record)
            given = content.pop("id", None)
            for side in ("inputs", "outputs"):
                content[side] = tuple(_tensor(t) for t in content[side])
            content["constants"] = tuple(int(position) for position in content.get("constants", ()))
            content["values"] = {
                int(position): tuple(int(v) for v in values)
                for position, values in content.get("values", {}).items()
            }
            for number in ("flops", "bytes_moved"):
                content[number] = float(content[number])
            kernel = cls(**content)
        except FileFormatError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise FileFormatError(f"a kernel's record cannot be read: {error}") from error
        if given is not None and given != kernel.id:
            raise FileFormatError(
                f"the record of the kernel `{given}` describes `{kernel.id}`: it was edited, or written by "
                f"another version; analyse the model again"
            )
        return kernel


def canonical_name(
    node_op: str, domain: str, attributes: Mapping[str, Any], inputs: tuple[Tensor, ...]
) -> str:
    """What a node computes, in ONNX's operators joined by `_`.

    Args:
        node_op: The node's operator.
        domain: Its domain.
        attributes: Its attributes, in JSON's types.
        inputs: Its inputs, with optional ones that are left out.
    """

    def given(position: int) -> bool:
        return position < len(inputs) and inputs[position].present

    if not domain.startswith(_RUNTIME_DOMAINS):
        return node_op
    if node_op in _CONVOLUTIONS:
        parts = ["Conv", "Add" if given(_SUM_POSITION) else "", attributes.get("activation", "")]
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
        parts = ["Add" if given(1) else "", "Gelu"]
    else:
        parts = [_PREFIXED.get(node_op, node_op)]
    return "_".join(part for part in parts if part)


def _check_fields(record: Any, known: set[str], needed: set[str], what: str) -> None:
    if not isinstance(record, Mapping):
        raise FileFormatError(f"the record of a {what} is a {type(record).__name__}, not an object")
    unknown, absent = sorted(set(record) - known), sorted(needed - set(record))
    if unknown or absent:
        raise FileFormatError(
            f"the record of a {what} has unknown fields {unknown} and lacks {absent}; it must hold "
            f"{sorted(known)}"
        )


def _tensor(record: Any) -> Tensor:
    names = {f.name for f in fields(Tensor)}
    _check_fields(record, names, names, "tensor")
    return Tensor(
        name=str(record["name"]),
        dtype=str(record["dtype"]),
        shape=tuple(int(extent) for extent in record["shape"]),
    )
