"""What onnxruntime makes of a model for a provider, and the tensors in it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, ModelError
from sparseflow.latency import onnx_file, session
from sparseflow.latency.kernels import Tensor

if TYPE_CHECKING:
    import numpy as np
    import onnx


_DRAWN = 1_000_003
"""Values that are drawn for one tensor at most: a prime number."""


def optimise(
    path: Path | str,
    provider: str = "cpu",
    level: str = "all",
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> onnx.ModelProto:
    """What onnxruntime makes of a model for a provider.

    Raises:
        InputError, FileFormatError, ModelError, DeviceError: As `analyze`.
    """
    onnx = require("onnx", "latency")
    model = onnx_file.load(path)
    onnx_file.fix_inputs(model, shapes or {})
    content = onnx_file.serialise(model, str(path))
    with tempfile.TemporaryDirectory(prefix="sparseflow-") as folder:
        target = Path(folder) / "optimised.onnx"
        settings = {"optimized_model_filepath": str(target)}
        try:
            session.open_session(content, provider, level, settings=settings)
        except FileFormatError as error:
            if "serializ" not in str(error):
                raise
            # The model itself was read, so it is the result that cannot be written.
            raise ModelError(
                f"what onnxruntime makes of {path} at these shapes weighs more than 2 GB, since it works out "
                f"in advance all that does not depend on the inputs; give a smaller batch or image"
            ) from error
        optimised = onnx.load_model(str(target))
    onnx_file.check(optimised, f"the optimised graph of {path}")
    return optimised


def expose(model: onnx.ModelProto, tensors: list[str]) -> onnx.ModelProto:
    """A copy whose outputs are `tensors`, by name only: ONNX knows no types of a runtime's own."""
    onnx = require("onnx", "latency")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
    return copy


def written(model: onnx.ModelProto) -> list[str]:
    """Every tensor that a node writes, in order."""
    return [name for node in model.graph.node for name in node.output if name]


def describe_tensors(
    model: onnx.ModelProto, provider: str, *, always_run: bool = False, seed: int = 0
) -> dict[str, Tensor]:
    """Type and shape of every input, weight and result of an optimised model.

    Raises:
        ModelError: A result has no elements, or is no tensor.
        RunError: It had to be run, and failed.
    """
    known = {weight.name: _weight_tensor(weight) for weight in model.graph.initializer}
    names = written(model)
    opened = session.open_session(expose(model, names).SerializeToString(), provider, "disable")
    for value in opened.get_inputs():
        known[value.name] = Tensor(
            name=value.name, dtype=onnx_file.dtype_name(value.type), shape=tuple(value.shape)
        )
    types = {value.name: onnx_file.dtype_name(value.type) for value in opened.get_outputs()}
    shapes: dict[str, tuple[int, ...]] = {
        value.name: tuple(value.shape)
        for value in opened.get_outputs()
        if all(isinstance(extent, int) and extent >= 0 for extent in value.shape)
    }
    del opened
    # A scalar and a tensor of unknown rank look the same to a caller of onnxruntime.
    unsure = [name for name in names if always_run or not shapes.get(name)]
    if unsure:
        shapes.update(_observed_shapes(model, provider, unsure, random_inputs(model, seed)))
    for name in names:
        known[name] = Tensor(name=name, dtype=types[name], shape=shapes[name])
        if not known[name].elements:
            raise ModelError(
                f"the tensor `{name}` has no elements at these input shapes: {list(shapes[name])}; "
                f"give larger ones with --shape"
            )
    return known


def random_inputs(model: onnx.ModelProto, seed: int) -> dict[str, np.ndarray]:
    """Values for every input of a model: floats from a standard normal, integers and booleans 0 or 1."""
    import numpy as np

    generator = np.random.default_rng(seed)
    return {
        value.name: draw(
            generator,
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim),
            onnx_file.dtype_name(value.type.tensor_type.elem_type),
        )
        for value in onnx_file.true_inputs(model)
    }


def draw(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: str, *, positive: bool = False
) -> np.ndarray:
    """Random values of one of ONNX's types; with `positive`, floats from 0.5 to 1.5.

    A large tensor repeats those that were drawn, in step with none of its extents.
    """
    import numpy as np

    kind = onnx_file.numpy_type(dtype)
    count = math.prod(shape)
    drawn = min(count, _DRAWN)
    if dtype.startswith(("int", "uint", "bool")):
        values = generator.integers(0, 2, drawn)
    elif positive:
        values = generator.random(drawn, dtype=np.float32) + np.float32(0.5)
    else:
        values = generator.standard_normal(drawn, dtype=np.float32)
    return np.resize(values.astype(kind), shape)


def _observed_shapes(
    model: onnx.ModelProto, provider: str, names: list[str], feeds: Mapping[str, np.ndarray]
) -> dict[str, tuple[int, ...]]:
    """Shapes as they are in a run. Asking for shapes instead of tensors lets the runtime free what it can."""
    onnx = require("onnx", "latency")
    asking = expose(model, [f"sparseflow/shape/{index}" for index in range(len(names))])
    asking.graph.node.extend(
        onnx.helper.make_node("Shape", [name], [f"sparseflow/shape/{index}"])
        for index, name in enumerate(names)
    )
    opened = session.open_session(asking.SerializeToString(), provider, "disable")
    seen = session.run(opened, [value.name for value in asking.graph.output], feeds)
    return {name: tuple(int(extent) for extent in shape) for name, shape in zip(names, seen, strict=True)}


def _weight_tensor(weight: onnx.TensorProto) -> Tensor:
    return Tensor(name=weight.name, dtype=onnx_file.dtype_name(weight.data_type), shape=tuple(weight.dims))
