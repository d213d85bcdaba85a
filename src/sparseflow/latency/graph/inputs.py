"""Inputs of a model: shapes, requested values, and random values of the others.

Floats are random. An integer often selects the computation, such as the target shape of a Reshape: its value
follows from the operator that reads it where possible, see `_RULES`, and is 0 or 1 otherwise. If onnxruntime
refuses these values, other ones are tried; a caller can set any value.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparseflow.core.extras import require
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError, ModelError, RunError
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.dimensions import BATCH, OPEN, Extents
from sparseflow.latency.graph.kernels import DTYPE_BITS, STRING, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnxruntime

Feeds = dict[str, "np.ndarray"]
Shape = tuple[int, ...]
Result = TypeVar("Result")

_MAX_SAMPLES = 1_000_003
"""Maximum number of random values per tensor. Prime, so that repetition matches no extent."""

_PASS_THROUGH_OPS = ("Identity", "Cast")
"""Operators whose consumer decides the values of their input."""


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """Shapes and values of a model's inputs.

    Attributes:
        specs: Name, type and shape of each input.
        values: Input -> value, of the type and shape of its spec; the other inputs are random.
        control: Input that selects the computation -> values to try, in order. The other inputs have random
            floats.
        declared: Whether the model declares all shapes.
    """

    specs: tuple[TensorSpec, ...]
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    control: Mapping[str, tuple[Shape | int | float, ...]] = field(default_factory=dict)
    declared: bool = True

    @property
    def free_control(self) -> tuple[str, ...]:
        """Names of the inputs that select the computation and have no value."""
        return tuple(name for name in self.control if name not in self.values)

    def iter_draws(self, seed: int, *, positive: bool = False) -> Iterator[Feeds]:
        """Yield values of all inputs: random ones, then, if an input selects the computation, others.

        Args:
            seed: Random seed.
            positive: Draw floats from [0.5, 1.5) instead of the standard normal distribution.
        """
        import numpy as np

        generator = np.random.default_rng(seed)
        # Drawn in any case, so that a requested value does not change the others.
        feeds = {spec.name: _sample_tensor(generator, spec, positive) for spec in self.specs} | dict(
            self.values
        )
        free = [spec for spec in self.specs if spec.name in self.free_control]
        for attempt in range(max((len(self.control[spec.name]) for spec in free), default=0)):
            options = {spec.name: self.control[spec.name] for spec in free if self.control[spec.name]}
            yield feeds | {
                spec.name: _fill(spec, options[spec.name][min(attempt, len(options[spec.name]) - 1)])
                for spec in free
                if spec.name in options
            }
        yield feeds
        for value in _FALLBACK_VALUES if free else ():
            yield feeds | {spec.name: _fill(spec, value) for spec in free}

    def find_feeds(self, run: Callable[[Feeds], Result], seed: int) -> tuple[Feeds, Result]:
        """Return the first draw with which `run` succeeds, and its result.

        Raises:
            RunError: onnxruntime refused all draws, or a run took too long.
        """
        problem: RunError | None = None
        for feeds in self.iter_draws(seed):
            try:
                return feeds, run(feeds)
            except session.RunTimeoutError:
                raise
            except RunError as error:
                problem = problem or error
        if problem is None or not self.free_control:
            raise problem or RunError("the model has no inputs to run it with")
        names = ", ".join(
            f"{spec.name} ({spec.dtype} {list(spec.shape)})"
            for spec in self.specs
            if spec.name in self.free_control
        )
        raise RunError(
            f"{problem}; pass values with --input NAME=VALUE|FILE.npy (or inputs={{...}}) for: {names}"
        ) from problem


@dataclass(frozen=True, kw_only=True)
class _Use:
    """The operator that reads an input that selects the computation.

    Attributes:
        op: Operator.
        attributes: Attributes in Python types.
        size: Elements of the input.
        data: Shape of the operator's first input; None if unknown.
        outputs: Shapes of its outputs; None if unknown.
    """

    op: str
    attributes: Mapping[str, Any]
    size: int
    data: Shape | None
    outputs: tuple[Shape | None, ...]

    @property
    def output(self) -> Shape | None:
        return self.outputs[0] if self.outputs else None

    def get_axis(self, default: int) -> int:
        return int(self.attributes.get("axis", default))

    def select(self, shape: Shape | None) -> Shape | None:
        """Return the extents of a shape that the input lists; None if it has another number."""
        axes = self.attributes.get("axes")
        if shape is not None and axes is not None and all(axis < len(shape) for axis in axes):
            shape = tuple(shape[axis] for axis in axes)
        return shape if shape is not None and len(shape) == self.size else None


def _follow_shape(use: _Use) -> Shape:
    """Return a target shape: that of the output, else of the data."""
    for shape in (use.select(use.output), use.select(use.data)):
        if shape is not None:
            return shape
    return (-1, *[1] * (use.size - 1)) if use.op == "Reshape" else (1,) * use.size


def _follow_grid(use: _Use) -> Shape:
    """Return the size of the image that a grid of shape [N, ..., rank] samples, with one channel."""
    grid = use.output
    return (grid[0], 1, *grid[1:-1]) if grid is not None and len(grid) == use.size else (1,) * use.size


def _follow_scales(use: _Use) -> tuple[float, ...]:
    """Return the ratios of the extents of output and data; otherwise 2 for all but the first two axes."""
    extents, sources = use.select(use.output), use.select(use.data)
    if extents is not None and sources is not None and all(sources):
        # The middle of the ratios that give the extent after rounding down.
        return tuple((e + 0.5 * (e != s)) / s for e, s in zip(extents, sources, strict=True))
    return (2.0,) * use.size if use.size <= 2 else (1.0, 1.0, *[2.0] * (use.size - 2))


def _list_unit_axes(use: _Use) -> Shape:
    units = [axis for axis, extent in enumerate(use.data or ()) if extent == 1]
    return tuple((units + list(range(use.size)))[: use.size])


def _list_axes(use: _Use) -> Shape:
    return tuple(range(use.size))


def _follow_ends(use: _Use) -> Shape:
    """Return the ends of slices that start at 0."""
    shape = use.output or (2**31 - 1,) * use.size
    return (*shape[: use.size], *[2**31 - 1] * (use.size - len(shape)))


def _follow_repeats(use: _Use) -> Shape:
    extents, sources = use.select(use.output), use.select(use.data)
    if extents is None or sources is None or not all(sources):
        return (1,) * use.size
    return tuple(max(e // s, 1) for e, s in zip(extents, sources, strict=True))


def _follow_pads(use: _Use) -> Shape:
    data, output = use.data or (), use.output or ()
    if len(data) != len(output) or 2 * len(data) != use.size:
        return (0,) * use.size
    added = [max(o - d, 0) for o, d in zip(output, data, strict=True)]
    return tuple(n // 2 for n in added) + tuple(n - n // 2 for n in added)


def _split_evenly(use: _Use) -> Shape:
    axis, data = use.get_axis(0), use.data
    extents = [None if shape is None else shape[axis] for shape in use.outputs if shape is None or shape]
    if len(extents) == use.size and None not in extents:
        return tuple(int(extent or 0) for extent in extents)
    extent = data[axis] if data else use.size
    return tuple(extent // use.size + (index < extent % use.size) for index in range(use.size))


def _count_top(use: _Use) -> Shape:
    output = use.output
    return (output[use.get_axis(-1)] if output else 1,) * use.size


def _follow_image(use: _Use) -> Shape:
    return use.output[2:] if use.output and len(use.output) == use.size + 2 else (1,) * use.size


def _follow_block(use: _Use) -> Shape:
    """Return one row of the block that Col2Im places into an image of the output's channels."""
    block = use.data[1] // use.output[1] if use.data and use.output else 1
    return (*[1] * (use.size - 1), block)


def _ones(use: _Use) -> Shape:
    return (1,) * use.size


_RULES: Mapping[tuple[str, int], Callable[[_Use], Sequence[int | float]]] = {
    **dict.fromkeys(
        [("Reshape", 1), ("Expand", 1), ("ConstantOfShape", 0), ("MaxUnpool", 2), ("CenterCropPad", 1),
         ("Resize", 3)],
        _follow_shape,
    ),
    ("AffineGrid", 1): _follow_grid,
    ("Resize", 1): lambda use: (0.0,) * (use.size // 2) + (1.0,) * (use.size - use.size // 2),
    **dict.fromkeys([("Resize", 2), ("Upsample", 1)], _follow_scales),
    ("Squeeze", 1): _list_unit_axes,
    **dict.fromkeys([("Unsqueeze", 1), ("Slice", 3), ("Pad", 3)], _list_axes),
    ("Slice", 1): lambda use: (0,) * use.size,
    ("Slice", 2): _follow_ends,
    ("Tile", 1): _follow_repeats,
    ("Pad", 1): _follow_pads,
    ("Split", 1): _split_evenly,
    ("TopK", 1): _count_top,
    ("Col2Im", 1): _follow_image,
    ("Col2Im", 2): _follow_block,
    **dict.fromkeys(
        [("Slice", 4), ("SplitToSequence", 1), ("Div", 1), ("Mod", 1), ("Loop", 0), ("Loop", 1),
         ("Range", 2)],
        _ones,
    ),
    ("NonMaxSuppression", 2): lambda use: (100,) * use.size,
    **dict.fromkeys([("NonMaxSuppression", 3), ("NonMaxSuppression", 4), ("Dropout", 1)],
                    lambda use: (0.5,) * use.size),
}  # fmt: skip
"""(operator, position of an input) -> values of that input."""

_FLOAT_RULES = {
    ("Resize", 1), ("Resize", 2), ("Upsample", 1), ("Dropout", 1), ("NonMaxSuppression", 3),
    ("NonMaxSuppression", 4),
}  # fmt: skip
"""Rules of inputs whose elements are floats."""

_FALLBACK_VALUES = (1, 2, 0)
"""Values of inputs that select the computation, if onnxruntime refuses the others."""


def selects_computation(op: str, position: int, dtype: str) -> bool:
    """Return whether the values of an operator's input select what it computes: integers and texts."""
    return dtype.startswith(("int", "uint", "bool", STRING)) or (op, position) in _FLOAT_RULES


def resolve_inputs(
    model: onnx.ModelProto,
    shapes: Mapping[str, Shape] | None = None,
    values: Mapping[str, Any] | None = None,
) -> ModelInputs:
    """Determine shapes and values of a model's inputs.

    Args:
        model: The model.
        shapes: Input -> shape. Required for inputs with open dimensions and no value.
        values: Input -> value, see `read_value`. One number fills the input.

    Raises:
        InputError: A shape is missing or contradicts the model, a value does not fit, or an input does not
            exist.
        ModelError: An input exceeds 2 GB or is not a tensor.
        FileFormatError: The file of a value is not an array.
    """
    shapes = {name: tuple(shape) for name, shape in (shapes or {}).items()}
    values = dict(values or {})
    infos = onnx_file.list_inputs(model)
    unknown = sorted({*shapes, *values} - {info.name for info in infos})
    if unknown:
        raise InputError(
            f"the model has no input {', '.join(unknown)}; its inputs are: "
            f"{', '.join(info.name for info in infos)}"
        )
    specs, fitted, declared = [], {}, True
    for info in infos:
        value = read_value(values[info.name]) if info.name in values else None
        spec, is_declared = _resolve_spec(info, shapes.get(info.name), value)
        specs.append(spec)
        declared = declared and is_declared
        if value is not None:
            fitted[info.name] = _fit_value(value, spec)
    control = find_control(model, {spec.name: spec for spec in specs})
    return ModelInputs(specs=tuple(specs), values=fitted, control=control, declared=declared)


def fix_shapes(model: onnx.ModelProto, specs: Sequence[TensorSpec]) -> None:
    """Declare the shapes of a model's inputs, in place."""
    by_name = {spec.name: spec for spec in specs}
    for info in onnx_file.list_inputs(model):
        tensor_type = info.type.tensor_type
        tensor_type.shape.Clear()
        for extent in by_name[info.name].shape:
            tensor_type.shape.dim.add().dim_value = extent


def is_open(info: onnx.ValueInfoProto) -> bool:
    """Return whether an input has open dimensions or an unknown rank."""
    has_rank = info.type.tensor_type.HasField("shape")
    return not has_rank or any(isinstance(extent, str) for extent in _list_extents(info))


def open_session(
    model: onnx.ModelProto, inputs: ModelInputs, source: str, provider: str, level: str, **options: Any
) -> onnxruntime.InferenceSession:
    """Open a session of a model with the shapes of its inputs declared, which it keeps.

    onnxruntime refuses some models with declared shapes, since a branch that is not taken contradicts them;
    these keep their open dimensions.

    Args:
        model: The model; its inputs are modified.
        inputs: Shapes.
        source: Name of the model in messages.
        provider: As `session.open_session`.
        level: As `session.open_session`.
        options: More arguments of `session.open_session`.

    Raises:
        DeviceError, ModelError, FileFormatError, InputError: As `session.open_session`.
    """
    infos = onnx_file.list_inputs(model)
    original_types = [type(info.type).FromString(info.type.SerializeToString()) for info in infos]
    fix_shapes(model, inputs.specs)
    try:
        return session.open_session(onnx_file.serialize(model, source), provider, level, **options)
    except ModelError:
        if inputs.declared:
            raise
        for info, original in zip(infos, original_types, strict=True):
            info.type.CopyFrom(original)
        try:
            return session.open_session(onnx_file.serialize(model, source), provider, level, **options)
        except ModelError:
            fix_shapes(model, inputs.specs)
        raise


def read_value(value: Any) -> np.ndarray:
    """Convert the value of an input to an array.

    Args:
        value: An array, a number, a list, the path of a `.npy` file, or a text such as `"0.5"`, `"1,64"`,
            `"[[1, 2], [3, 4]]"` or `"true"`; a text of another form is an element of a tensor of text.

    Raises:
        InputError: The value is not an array, or the file does not exist.
        FileFormatError: The file is not an array of NumPy.
    """
    import numpy as np

    if isinstance(value, str | Path) and str(value).endswith(".npy"):
        if not Path(value).is_file():
            raise InputError(f"{value} does not exist")
        try:
            return np.asarray(np.load(value, allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise FileFormatError(f"{value} is not an array of NumPy: {error}") from error
    if isinstance(value, str):
        try:
            elements = json.loads(f"[{value}]")
        except (ValueError, RecursionError):
            elements = value.split(",")
        value = elements[0] if len(elements) == 1 else elements
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InputError(f"the value {value!r} is not an array: {error}") from error
    if array.dtype == object and all(isinstance(element, str) for element in array.flat):
        array = array.astype(np.str_)
    # Kind V has types that NumPy lacks, such as bfloat16.
    if array.dtype.kind not in "biufcUV" or array.dtype.names is not None:
        raise InputError(
            f"the value {value!r} must be a number, a list of equal rows, text or the path of a .npy file"
        )
    return array


def save_values(path: Path, values: Mapping[str, np.ndarray]) -> None:
    """Save arrays as `.npz`; without arrays the file is deleted."""
    import numpy as np

    if not values:
        path.unlink(missing_ok=True)
        return
    content = io.BytesIO()
    # An array of objects, as onnxruntime returns text, needs pickle.
    named: Any = {
        name: value.astype(np.str_) if value.dtype == object else value for name, value in values.items()
    }
    np.savez_compressed(content, **named)
    write_atomic(path, content.getvalue())


def load_values(path: Path, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """Load the arrays that `save_values` saved; none if the file does not exist.

    Raises:
        FileFormatError: The file is damaged, or an array does not fit its spec.
    """
    import numpy as np

    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as stored:
            values = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise FileFormatError(f"{path} is damaged: {error}; create it again") from error
    by_name = {spec.name: spec for spec in specs}
    for name, value in values.items():
        spec = by_name.get(name)
        dtype = None if spec is None else onnx_file.get_numpy_dtype(spec.dtype)
        if spec is not None and spec.dtype == STRING and value.dtype.kind == "U":
            values[name] = value = value.astype(object)
        elif dtype is not None and value.dtype.kind == "V" and value.dtype.itemsize == dtype.itemsize:
            values[name] = value = value.view(dtype)  # NumPy does not save the name of such a type.
        if spec is None or value.dtype != dtype or value.shape != spec.shape:
            raise FileFormatError(f"`{name}` in {path} does not fit the model; create it again")
    return values


def list_extents(model: onnx.ModelProto) -> dict[str, Extents]:
    """Return input -> extents of a model, for `dimensions.resolve_shapes`.

    An open dimension without a name is the batch if it comes first.
    """
    inputs = {info.name: _list_extents(info) for info in onnx_file.list_inputs(model)}
    return {
        name: (BATCH, *extents[1:]) if extents[:1] == [OPEN] else tuple(extents)
        for name, extents in inputs.items()
    }


def _list_extents(info: onnx.ValueInfoProto) -> list[int | str]:
    """List the declared extents of an input; the name of an open dimension, or `OPEN`."""
    # Some exporters write -1 for an open dimension.
    return [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or OPEN
        for dim in info.type.tensor_type.shape.dim
    ]


def _resolve_spec(
    info: onnx.ValueInfoProto, requested: Shape | None, value: np.ndarray | None
) -> tuple[TensorSpec, bool]:
    """Return the spec of an input, and whether the model declares its shape."""
    if info.type.WhichOneof("value") != "tensor_type":
        raise ModelError(f"the input `{info.name}` is not a tensor; only tensors are supported")
    tensor_type = info.type.tensor_type
    declared, has_rank = _list_extents(info), tensor_type.HasField("shape")
    is_declared = not is_open(info)
    shape = requested
    if shape is None and is_declared:
        shape = tuple(int(extent) for extent in declared)
    if shape is None and value is not None and (not has_rank or value.ndim == len(declared)):
        shape = value.shape
    if shape is None:
        example = ",".join(str(extent) if isinstance(extent, int) else "1" for extent in declared)
        raise InputError(
            f"the input `{info.name}` has open dimensions: "
            f"{declared if has_rank else 'unknown rank'}; set them with --shape "
            f"{info.name}={example or '1,3,224,224'} (or shapes={{...}})"
        )
    conflicts = has_rank and (
        len(shape) != len(declared)
        or any(isinstance(d, int) and d != s for d, s in zip(declared, shape, strict=True))
    )
    if conflicts:
        raise InputError(
            f"the input `{info.name}` is declared as {declared}; the shape {list(shape)} does not fit"
        )
    if any(extent < 0 for extent in shape):
        raise InputError(f"the shape of the input `{info.name}` has a negative extent: {list(shape)}")
    dtype = onnx_file.get_dtype_name(tensor_type.elem_type)
    size = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if size > onnx_file.MAX_MODEL_BYTES:
        raise ModelError(
            f"the input `{info.name}` of shape {list(shape)} has {size / 1e9:.2f} GB, the limit is 2 GB"
        )
    return TensorSpec(name=info.name, dtype=dtype, shape=shape), is_declared


def _fit_value(value: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """Convert a value to type and shape of an input; one number fills the input."""
    import numpy as np

    if value.shape != spec.shape:
        if value.size == 1:
            value = np.full(spec.shape, value.reshape(()))
        elif value.size == spec.elements:
            value = value.reshape(spec.shape)
        else:
            raise InputError(
                f"the value of the input `{spec.name}` has the shape {list(value.shape)}, expected "
                f"{list(spec.shape)} or one number"
            )
    if spec.dtype == STRING:
        return value.astype(np.str_).astype(object)
    dtype = onnx_file.get_numpy_dtype(spec.dtype)
    is_text = value.dtype.kind == "U"
    with np.errstate(all="ignore"):
        converted = None if is_text else value.astype(dtype)
    exact = spec.dtype.startswith(("int", "uint", "bool"))
    if converted is None or (exact and not np.array_equal(converted.astype(value.dtype), value)):
        text = np.array2string(value, threshold=8)
        raise InputError(f"the value {text} of the input `{spec.name}` must be of type {spec.dtype}")
    return converted


def _sample_tensor(generator: np.random.Generator, spec: TensorSpec, positive: bool) -> np.ndarray:
    """Sample a tensor: integers, booleans and texts 0 or 1, floats from the standard normal distribution,
    or from [0.5, 1.5) with `positive`. A large tensor repeats its first `_MAX_SAMPLES` values.
    """
    import numpy as np

    num_samples = min(spec.elements, _MAX_SAMPLES)
    if spec.dtype.startswith(("int", "uint", "bool", STRING)):
        values = generator.integers(0, 2, num_samples)
    elif positive:
        values = generator.random(num_samples, dtype=np.float32) + np.float32(0.5)
    else:
        values = generator.standard_normal(num_samples, dtype=np.float32)
    if spec.dtype == STRING:
        return np.resize(values.astype(np.str_).astype(object), spec.shape)
    return np.resize(values.astype(onnx_file.get_numpy_dtype(spec.dtype)), spec.shape)


def _fill(spec: TensorSpec, value: Shape | int | float) -> np.ndarray:
    """Return a tensor of one number, or of listed elements."""
    import numpy as np

    if spec.dtype == STRING:
        return np.full(spec.shape, str(value), dtype=object)
    return np.resize(np.asarray(value).astype(onnx_file.get_numpy_dtype(spec.dtype)), spec.shape)


def find_control(
    model: onnx.ModelProto, specs: Mapping[str, TensorSpec]
) -> dict[str, tuple[Shape | int | float, ...]]:
    """Return input that selects the computation -> values that follow from the operators that read it."""
    helper = require("onnx.helper", "latency")
    graph = model.graph
    shapes: dict[str, Shape | None] = {
        info.name: _read_shape(info) for info in (*graph.value_info, *graph.output)
    }
    shapes |= {weight.name: tuple(weight.dims) for weight in graph.initializer}
    shapes |= {name: spec.shape for name, spec in specs.items()}
    control: dict[str, list[Any]] = {
        name: [] for name, spec in specs.items() if selects_computation("", 0, spec.dtype)
    }
    aliases = {name: name for name in specs}
    constants = _list_small_constants(graph)
    for node in graph.node:
        if node.op_type == "Equal":
            # One of the branches is for inputs of this value, such as a sampling rate.
            for tensor, other in (node.input, reversed(node.input)):
                name = aliases.get(tensor, "")
                if name in control and other in constants:
                    control[name].append(constants[other])
        for position, tensor in enumerate(node.input):
            spec = specs.get(aliases.get(tensor, ""))
            if spec is None:
                continue
            if node.op_type in _PASS_THROUGH_OPS:
                aliases[node.output[0]] = spec.name
            rule = _RULES.get((node.op_type, position))
            if rule is None or node.domain or not selects_computation(node.op_type, position, spec.dtype):
                continue
            use = _Use(
                op=node.op_type,
                attributes={a.name: helper.get_attribute_value(a) for a in node.attribute},
                size=spec.elements,
                data=shapes.get(node.input[0]),
                outputs=tuple(shapes.get(name) for name in node.output),
            )
            try:
                control.setdefault(spec.name, []).append(tuple(rule(use)))
            except IndexError:  # the shapes are not those of the operator
                continue
    return {name: tuple(options) for name, options in control.items()}


def _list_small_constants(graph: onnx.GraphProto) -> dict[str, Shape]:
    """Return constant of one integer -> its value."""
    to_array = require("onnx.numpy_helper", "latency").to_array
    tensors = {weight.name: weight for weight in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            tensors[node.output[0]] = node.attribute[0].t
    return {
        name: (int(to_array(tensor).item()),)
        for name, tensor in tensors.items()
        if math.prod(tensor.dims) == 1 and onnx_file.get_dtype_name(tensor.data_type) in ("int32", "int64")
    }


def _read_shape(info: onnx.ValueInfoProto) -> Shape | None:
    """Return the declared shape of a tensor; None if a dimension is open."""
    tensor_type = info.type.tensor_type
    if not tensor_type.HasField("shape"):
        return None
    extents = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor_type.shape.dim)
    return None if any(extent < 0 for extent in extents) else extents
