"""Validated reading of ONNX files, and helpers for ONNX types and attributes.

A file is checked before onnxruntime loads it, so that the error names the problem: not ONNX, truncated,
external weights missing or outside the model's directory, opset too new, no operators.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.latency.graph.kernels import DTYPE_BITS, OPAQUE_TYPES, UNDEFINED

if TYPE_CHECKING:
    import numpy as np
    import onnx

MAX_MODEL_BYTES = 2**31 - 1
"""Maximum size of a protobuf message."""

_DTYPE_NAMES = {"float": "float32", "double": "float64"}


def check_path(value: object) -> Path:
    """Check that a model is given as a path.

    Raises:
        InputError: It is something else, such as a module of torch.
    """
    if isinstance(value, str | os.PathLike):
        return Path(value)
    raise InputError(
        f"the model must be the path of an ONNX file, got {type(value).__name__}; only `predict` takes a "
        "module of torch, otherwise export it with torch.onnx.export"
    )


def load_model(path: Path | str) -> onnx.ModelProto:
    """Load a model, including external weights; sparse weights become dense, as onnxruntime stores them.

    Raises:
        InputError: The file does not exist, or `path` is not a path.
        FileFormatError: The file is not ONNX or is truncated, a name is not UTF-8, or external weights are
            missing or outside its directory.
        ModelError: The model exceeds 2 GB, or is newer than the onnx package.
    """
    onnx = require("onnx", "latency")
    from google.protobuf.message import DecodeError

    file = check_path(path)
    if not file.is_file():
        raise InputError(f"{file} does not exist")
    try:
        model = onnx.load_model(str(file), load_external_data=False, format="protobuf")
    except (DecodeError, UnicodeDecodeError, ValueError, RuntimeError) as error:
        raise FileFormatError(f"{file} is not an ONNX model, or is truncated: {error}") from error
    if not model.ir_version or not model.HasField("graph") or not model.opset_import:
        raise FileFormatError(f"{file} is not an ONNX model: it lacks a version, a graph or an opset")
    undecodable = _find_undecodable(model)
    if undecodable is not None:
        raise FileFormatError(f"{file} is damaged: the name {undecodable!r} is not UTF-8")
    check_model(model, str(file))
    _check_external_data(model, file)
    try:
        onnx.load_external_data_for_model(model, str(file.parent))
    except Exception as error:
        raise FileFormatError(f"cannot read the external weights of {file}: {error}") from error
    make_weights_dense(model, str(file))
    return model


def check_model(model: onnx.ModelProto, source: str) -> None:
    """Check that a model has operators, outputs and a supported opset.

    Raises:
        FileFormatError: A node or the outputs are incomplete: the file is truncated.
        ModelError: The model is empty or newer than the onnx package, or onnxruntime would crash.
    """
    onnx = require("onnx", "latency")
    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and entry.version > newest:
            raise ModelError(
                f"{source} uses ONNX opset {entry.version}; onnx {onnx.__version__} supports up to "
                f"{newest}: export it with an older opset"
            )
    if not model.graph.node:
        raise ModelError(f"{source} contains no operators")
    if not model.graph.output or any(not node.op_type for node in model.graph.node):
        raise FileFormatError(f"{source} is truncated: it lacks outputs, or the operator of a node")
    for node in model.graph.node:
        attends = node.domain == "com.microsoft" and node.op_type == "Attention"
        if attends and not "".join(node.input[2:3]):
            # onnxruntime 1.31 dereferences the missing bias and kills the process.
            raise ModelError(
                f"{source} contains an Attention of com.microsoft without a bias, on which onnxruntime "
                "crashes: add a bias of zeros"
            )


def check_weight_bytes(num_bytes: int, source: str) -> None:
    """Check that weights fit into one ONNX file.

    Raises:
        ModelError: The weights exceed 2 GB.
    """
    if num_bytes > MAX_MODEL_BYTES:
        raise ModelError(
            f"the weights of {source} have {num_bytes / 1e9:.2f} GB, the limit of an ONNX file is 2 GB; "
            "larger external weights are not supported"
        )


def make_weights_dense(model: onnx.ModelProto, source: str) -> None:
    """Replace the sparse weights of a model and its subgraphs by dense ones, in place.

    Raises:
        FileFormatError: An index is outside the shape of its weight.
        ModelError: The weights exceed 2 GB.
    """
    for graph in _iter_messages(model, "GraphProto"):
        for sparse in graph.sparse_initializer:
            weight = sparse.values
            dims = list(sparse.dims)
            size = math.prod(dims) * DTYPE_BITS[get_dtype_name(weight.data_type)] // 8
            check_weight_bytes(size + sum(map(_count_weight_bytes, graph.initializer)), source)
            graph.initializer.add().CopyFrom(_make_dense(sparse, dims, source))
        graph.ClearField("sparse_initializer")


def serialize(model: onnx.ModelProto, source: str) -> bytes:
    """Serialize a model to one message.

    Raises:
        ModelError: The model exceeds the 2 GB of one message.
    """
    check_weight_bytes(sum(map(_count_weight_bytes, model.graph.initializer)), source)
    try:
        return model.SerializeToString(deterministic=True)
    except ValueError as error:
        raise ModelError(f"{source} is too large for one ONNX file (2 GB): {error}") from error


def compute_sha256(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def list_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """List the inputs that a caller feeds, without the weights that old files list among them."""
    weights = list_weight_names(model)
    return [value for value in model.graph.input if value.name not in weights]


def list_weight_names(model: onnx.ModelProto) -> set[str]:
    """Return the names of all initializers."""
    return {weight.name for weight in model.graph.initializer} | {
        weight.values.name for weight in model.graph.sparse_initializer
    }


def get_dtype_name(element: int | str) -> str:
    """Return ONNX's lower-case name of an element type.

    Args:
        element: ONNX's number of the type, or onnxruntime's name, such as `tensor(float)`.

    Raises:
        ModelError: The type is unknown, or not that of a tensor: a sequence, a map or undefined.
    """
    if isinstance(element, str):
        name = element.removeprefix("tensor(").removesuffix(")")
        name = _DTYPE_NAMES.get(name, name)
    else:
        name = _get_type_name(element)
    if name not in DTYPE_BITS or name == UNDEFINED or name in OPAQUE_TYPES:
        raise ModelError(f"unsupported type {name!r}; only tensors are supported")
    return name


def get_value_type(name: str) -> str:
    """Return the type of a value that onnxruntime reports: of a tensor's elements, or an opaque type.

    Args:
        name: onnxruntime's name of the type, such as `tensor(float)` or `seq(tensor(float))`.

    Raises:
        ModelError: The type is unknown.
    """
    kind = name.partition("(")[0]
    kind = {"seq": "sequence"}.get(kind, kind)
    return kind if kind in OPAQUE_TYPES else get_dtype_name(name)


def get_element_type(dtype: str) -> int:
    """Return ONNX's number of an element type."""
    onnx_name = {full: short for short, full in _DTYPE_NAMES.items()}.get(dtype, dtype)
    return require("onnx", "latency").TensorProto.DataType.Value(onnx_name.upper())


def get_numpy_dtype(dtype: str) -> np.dtype:
    """Return the NumPy dtype that onnxruntime accepts for an ONNX element type."""
    return require("onnx.helper", "latency").tensor_dtype_to_np_dtype(get_element_type(dtype))


def parse_attribute(attribute: onnx.AttributeProto) -> Any:
    """Convert an attribute to the JSON types of `KernelSpec.attributes`."""
    return _to_json_type(require("onnx.helper", "latency").get_attribute_value(attribute))


def _to_json_type(value: Any) -> Any:
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
            return {"dtype": get_dtype_name(value.data_type), "shape": list(value.dims), "sha256": digest}
        return {"graph_sha256": digest}
    return [_to_json_type(entry) for entry in value]


def _get_type_name(element: int) -> str:
    """Return ONNX's lower-case name of an element type, numeric or not."""
    try:
        name = str(require("onnx", "latency").TensorProto.DataType.Name(element)).lower()
    except ValueError as error:
        raise ModelError(
            f"unknown element type {element}; the file is damaged, or newer than onnx"
        ) from error
    return _DTYPE_NAMES.get(name, name)


def _make_dense(sparse: onnx.SparseTensorProto, dims: list[int], source: str) -> onnx.TensorProto:
    import numpy as np

    numpy_helper = require("onnx.numpy_helper", "latency")
    name = sparse.values.name
    try:
        values, indices = (numpy_helper.to_array(part) for part in (sparse.values, sparse.indices))
        dense = np.zeros(dims, dtype=values.dtype)
        if indices.ndim == 2:
            indices = np.ravel_multi_index(tuple(indices.T), tuple(dims))
        if indices.size and int(indices.min()) < 0:
            raise IndexError(f"{int(indices.min())} is negative")
        dense.reshape(-1)[indices] = values
    except (IndexError, ValueError, TypeError) as error:
        raise FileFormatError(
            f"{source} is damaged: the sparse weight `{name}` does not fit its shape {dims}: {error}"
        ) from error
    return numpy_helper.from_array(dense, name)


def _count_weight_bytes(weight: onnx.TensorProto) -> int:
    return math.prod(weight.dims) * DTYPE_BITS.get(_get_type_name(weight.data_type), 8) // 8


def _find_undecodable(message: Any) -> bytes | None:
    """Return a text of a message that is not UTF-8, which protobuf returns as bytes; None without one."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING:
            texts = [value] if isinstance(value, str | bytes) else value
            undecodable = next((text for text in texts if isinstance(text, bytes)), None)
        elif field.type == field.TYPE_MESSAGE:
            parts = [value] if hasattr(value, "ListFields") else value
            undecodable = next(filter(None, map(_find_undecodable, parts)), None)
        else:
            continue
        if undecodable is not None:
            return undecodable
    return None


def _iter_messages(message: Any, kind: str) -> Iterator[Any]:
    """Yield every part of a message of one kind, such as `TensorProto`, also of subgraphs and functions."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for part in [value] if hasattr(value, "ListFields") else value:
                if part.DESCRIPTOR.name == kind:
                    yield part
                yield from _iter_messages(part, kind)


def _check_external_data(model: onnx.ModelProto, file: Path) -> None:
    folder = file.parent.resolve()
    for weight in _iter_messages(model, "TensorProto"):
        if weight.data_location != weight.EXTERNAL:
            continue
        fields = {entry.key: entry.value for entry in weight.external_data}
        location = fields.get("location", "")
        data = file.parent / location
        if "\0" in location or not data.resolve().is_relative_to(folder):
            raise FileFormatError(
                f"{file} stores the weight `{weight.name}` at {location!r}, which is or links to a file "
                "outside the directory of the model; copy that file into it"
            )
        if not location or not data.is_file():
            raise FileFormatError(
                f"{data}, which contains the weight `{weight.name}` of {file}, does not exist; restore it"
            )
        offset, length = (
            _parse_size(fields.get(name, "0"), weight.name, file) for name in ("offset", "length")
        )
        end = offset + (length or _count_weight_bytes(weight))
        if data.stat().st_size < end:
            raise FileFormatError(
                f"{data} is truncated: `{weight.name}` ends at byte {end}, the size is {data.stat().st_size}"
            )
    check_weight_bytes(sum(map(_count_weight_bytes, model.graph.initializer)), str(file))


def _parse_size(text: str, weight_name: str, file: Path) -> int:
    """Parse the offset or the length of an external weight."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise FileFormatError(
            f"{file} is damaged: the offset or length of the weight `{weight_name}` is {text[:40]!r}, "
            "expected a number of bytes"
        )
    return int(text)
