"""Reading an ONNX file with care, and the few things that onnx spells in its own way.

A file is looked at before onnxruntime gets it, so that what is wrong with it is said in words: not ONNX, cut
off, weights missing beside it, too new, extents left open, nothing in it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.latency.kernels import ITEM_BITS, UNDEFINED

if TYPE_CHECKING:
    import numpy as np
    import onnx

LARGEST_BYTES = 2**31 - 1
"""What a protobuf message may weigh."""

_SPELT = {"float": "float32", "double": "float64"}


def load(path: Path | str) -> onnx.ModelProto:
    """The whole model, weights in other files included.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is not ONNX, or cut off, or weights that it keeps in other files are missing.
        ModelError: It weighs more than 2 GB, or it is newer than the onnx package.
    """
    onnx = require("onnx", "latency")
    from google.protobuf.message import DecodeError

    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no model file {file}")
    try:
        model = onnx.load_model(str(file), load_external_data=False, format="protobuf")
    except (DecodeError, UnicodeDecodeError, ValueError, RuntimeError) as error:
        raise FileFormatError(f"{file} is not an ONNX model, or was cut off: {error}") from error
    if not model.ir_version or not model.HasField("graph") or not model.opset_import:
        raise FileFormatError(f"{file} is not an ONNX model: no version, graph or operator set is in it")
    check(model, str(file))
    _check_external(model, file)
    try:
        onnx.load_external_data_for_model(model, str(file.parent))
    except Exception as error:
        raise FileFormatError(f"weights beside {file} cannot be read: {error}") from error
    return model


def check(model: onnx.ModelProto, what: str) -> None:
    """Refuse what no runtime could take.

    Raises:
        FileFormatError: A node, a weight or an output lacks what it needs: the file was cut off.
        ModelError: There is nothing in it, it is newer than the onnx package, or a weight has no elements.
    """
    onnx = require("onnx", "latency")
    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > newest:
            raise ModelError(
                f"{what} is written in ONNX opset {entry.version}, and onnx {onnx.__version__} knows up to "
                f"{newest}; export it with an older opset"
            )
    if not model.graph.node:
        raise ModelError(f"{what} holds no operator")
    if not model.graph.output or any(not node.op_type for node in model.graph.node):
        raise FileFormatError(f"{what} was cut off: it lacks outputs, or a node's operator")
    for weight in model.graph.initializer:
        if 0 in weight.dims and len(weight.dims) > 1:
            raise ModelError(
                f"the weight `{weight.name}` of {what} has no elements: shape {tuple(weight.dims)}"
            )


def serialise(model: onnx.ModelProto, what: str) -> bytes:
    """The model as one message.

    Raises:
        ModelError: It weighs more than 2 GB, which one message cannot hold.
    """
    size = sum(_weight_bytes(weight) for weight in model.graph.initializer)
    if size > LARGEST_BYTES:
        raise ModelError(
            f"the weights of {what} take {size / 1e9:.2f} GB, and one ONNX file holds at most 2 GB; "
            f"models whose weights need files of their own at that size are not supported: use a smaller one"
        )
    try:
        return model.SerializeToString(deterministic=True)
    except ValueError as error:
        raise ModelError(f"{what} is too large for one ONNX file (2 GB): {error}") from error


def fix_inputs(model: onnx.ModelProto, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write the shapes of the inputs into the model.

    Args:
        model: Changed in place.
        shapes: Input -> shape, for inputs that leave extents open; others may be named too.

    Raises:
        InputError: A shape is missing or contradicts the model, or names no input.
        ModelError: An input has no elements, weighs more than 2 GB or is not a tensor.
    """
    inputs = true_inputs(model)
    unknown = sorted(set(shapes) - {value.name for value in inputs})
    if unknown:
        raise InputError(
            f"the model has no input {', '.join(unknown)}; it has: {', '.join(v.name for v in inputs)}"
        )
    for value in inputs:
        if value.type.WhichOneof("value") != "tensor_type":
            raise ModelError(f"the input `{value.name}` is no tensor; only tensors can be fed")
        kind = value.type.tensor_type
        declared = [
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in kind.shape.dim
        ]
        ranked, given = kind.HasField("shape"), shapes.get(value.name)
        if given is None and (not ranked or any(isinstance(extent, str) for extent in declared)):
            raise InputError(
                f"the input `{value.name}` leaves extents open: {declared if ranked else 'no shape at all'}; "
                f"say which to use with --shape {value.name}=1,3,224,224 (or shapes={{...}})"
            )
        shape = given if given is not None else tuple(int(extent) for extent in declared)
        clash = ranked and (
            len(shape) != len(declared)
            or any(isinstance(d, int) and d != s for d, s in zip(declared, shape, strict=True))
        )
        if clash:
            raise InputError(
                f"the input `{value.name}` is declared as {declared}; {list(shape)} does not fit that"
            )
        if any(extent < 1 for extent in shape):
            raise ModelError(f"the input `{value.name}` would have no elements: {list(shape)}")
        dtype = dtype_name(kind.elem_type)
        size = math.prod(shape) * ITEM_BITS[dtype] // 8
        if size > LARGEST_BYTES:
            raise ModelError(
                f"the input `{value.name}` of shape {list(shape)} takes {size / 1e9:.2f} GB; "
                f"at most 2 GB can be fed"
            )
        kind.shape.Clear()
        for extent in shape:
            kind.shape.dim.add().dim_value = extent


def true_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Inputs that a caller feeds: old files list their weights among the inputs as well."""
    weights = weight_names(model)
    return [value for value in model.graph.input if value.name not in weights]


def weight_names(model: onnx.ModelProto) -> set[str]:
    """Names of all initialisers."""
    return {weight.name for weight in model.graph.initializer} | {
        weight.values.name for weight in model.graph.sparse_initializer
    }


def dtype_name(element: int | str) -> str:
    """ONNX's name of a type in lower case, from its number or from onnxruntime's `tensor(float)`.

    Raises:
        ModelError: It is no tensor of numbers (text, a sequence, a map, nothing).
    """
    if isinstance(element, str):
        name = element.removeprefix("tensor(").removesuffix(")")
    else:
        name = require("onnx", "latency").TensorProto.DataType.Name(element).lower()
    name = _SPELT.get(name, name)
    if name not in ITEM_BITS or name == UNDEFINED:
        raise ModelError(f"a value is of the type {name!r}; only tensors of numbers are supported")
    return name


def element_type(dtype: str) -> int:
    """ONNX's number of a type."""
    spelt = {full: short for short, full in _SPELT.items()}.get(dtype, dtype)
    return require("onnx", "latency").TensorProto.DataType.Value(spelt.upper())


def numpy_type(dtype: str) -> np.dtype:
    """The numpy type that onnxruntime takes for one of ONNX's."""
    return require("onnx.helper", "latency").tensor_dtype_to_np_dtype(element_type(dtype))


def attribute_value(attribute: onnx.AttributeProto) -> Any:
    """An attribute in JSON's types, as `Kernel.attributes` keeps it."""
    onnx = require("onnx", "latency")
    value = onnx.helper.get_attribute_value(attribute)
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"bytes_sha256": hashlib.sha256(value).hexdigest()}
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, str | int | bool):
        return value
    if hasattr(value, "SerializeToString"):
        digest = hashlib.sha256(value.SerializeToString(deterministic=True)).hexdigest()
        if hasattr(value, "data_type") and hasattr(value, "dims"):
            return {"dtype": dtype_name(value.data_type), "shape": list(value.dims), "sha256": digest}
        return {"graph_sha256": digest}
    return [_plain(entry) for entry in value]


def _weight_bytes(weight: onnx.TensorProto) -> int:
    name = str(require("onnx", "latency").TensorProto.DataType.Name(weight.data_type)).lower()
    return math.prod(weight.dims) * ITEM_BITS.get(_SPELT.get(name, name), 8) // 8


def _check_external(model: onnx.ModelProto, file: Path) -> None:
    for weight in model.graph.initializer:
        if weight.data_location != weight.EXTERNAL:
            continue
        where: dict[str, Any] = {str(entry.key): entry.value for entry in weight.external_data}
        location = where.get("location", "")
        data = file.parent / location
        if not location or not data.is_file():
            raise FileFormatError(
                f"{file} keeps the weight `{weight.name}` in {data}, which is not there; "
                f"put it beside the model again"
            )
        end = int(where.get("offset", 0)) + int(where.get("length", 0) or _weight_bytes(weight))
        if data.stat().st_size < end:
            raise FileFormatError(
                f"{data} was cut off: `{weight.name}` ends at byte {end}, and it has {data.stat().st_size}"
            )
    size = sum(_weight_bytes(weight) for weight in model.graph.initializer)
    if size > LARGEST_BYTES:
        raise ModelError(
            f"the weights of {file} take {size / 1e9:.2f} GB; models of more than 2 GB are not supported"
        )
