"""Graph optimization by onnxruntime, and the tensors of the optimized graph."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, ModelError, OutputError
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.kernels import TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import onnx


_MAX_SAMPLES = 1_000_003
"""Maximum number of random values per tensor. Prime, so that repetition matches no extent."""


def optimize(
    path: Path | str,
    provider: str = "cpu",
    level: str = "all",
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> onnx.ModelProto:
    """Return the graph that onnxruntime creates from a model for a provider.

    Raises:
        InputError, FileFormatError, ModelError, DeviceError: As `analyze`.
        OutputError: The temporary directory is full.
    """
    onnx = require("onnx", "latency")
    model = onnx_file.load_model(path)
    onnx_file.set_input_shapes(model, shapes or {})
    serialized = onnx_file.serialize(model, str(path))
    with tempfile.TemporaryDirectory(prefix="sparseflow-") as folder:
        target = Path(folder) / "optimized.onnx"
        settings = {"optimized_model_filepath": str(target)}
        try:
            session.open_session(serialized, provider, level, settings=settings)
        except FileFormatError as error:
            if "serializ" not in str(error):
                raise
            # The model was read, so the result cannot be written.
            try:
                target.write_bytes(serialized)
            except OSError as full:
                raise OutputError(
                    f"cannot write the optimized graph of {path} to {folder}: {full.strerror}; free some "
                    "space or set TMPDIR to another directory"
                ) from error
            raise ModelError(
                f"the optimized graph of {path} exceeds 2 GB at these shapes, since it includes everything "
                "that does not depend on the inputs; use a smaller batch or image size"
            ) from error
        except ModelError as error:
            inputs = ", ".join(
                f"{value.name} {[dim.dim_value for dim in value.type.tensor_type.shape.dim]}"
                for value in onnx_file.list_inputs(model)
            )
            raise ModelError(f"{path} with the inputs {inputs or 'none'}: {error}") from error
        optimized = onnx.load_model(str(target))
    onnx_file.check_model(optimized, f"the optimized graph of {path}")
    return optimized


def expose_tensors(model: onnx.ModelProto, tensors: list[str]) -> onnx.ModelProto:
    """Return a copy whose outputs are `tensors`, declared by name only, without types."""
    onnx = require("onnx", "latency")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
    return copy


def list_written_tensors(model: onnx.ModelProto) -> list[str]:
    """List the tensors that nodes write, in order."""
    return [name for node in model.graph.node for name in node.output if name]


def describe_tensors(model: onnx.ModelProto, provider: str) -> dict[str, TensorSpec]:
    """Return type and shape of every input, weight and intermediate tensor of an optimized model.

    Raises:
        ModelError: A tensor has no elements, or a value is not a tensor.
        RunError: Shapes need a run, and it failed.
    """
    tensors = {weight.name: _describe_weight(weight) for weight in model.graph.initializer}
    names = list_written_tensors(model)
    inference_session = session.open_session(
        expose_tensors(model, names).SerializeToString(), provider, "disable"
    )
    for value in inference_session.get_inputs():
        tensors[value.name] = TensorSpec(
            name=value.name, dtype=onnx_file.get_dtype_name(value.type), shape=tuple(value.shape)
        )
    types = {value.name: onnx_file.get_dtype_name(value.type) for value in inference_session.get_outputs()}
    shapes: dict[str, tuple[int, ...]] = {
        value.name: tuple(value.shape)
        for value in inference_session.get_outputs()
        if all(isinstance(extent, int) and extent >= 0 for extent in value.shape)
    }
    del inference_session
    # onnxruntime reports the same shape for a scalar and a tensor of unknown rank.
    unknown = [name for name in names if not shapes.get(name)]
    if unknown:
        shapes.update(observe_shapes(model, provider, unknown))
    for name in names:
        tensors[name] = TensorSpec(name=name, dtype=types[name], shape=shapes[name])
        if not tensors[name].elements:
            raise ModelError(
                f"the tensor `{name}` has no elements for random inputs of these shapes: "
                f"{list(shapes[name])}; tensors without elements are not supported, larger shapes can help"
            )
    return tensors


def make_random_inputs(model: onnx.ModelProto, seed: int, *, positive: bool = False) -> dict[str, np.ndarray]:
    """Sample all inputs of a model: integers and booleans 0 or 1; floats from the standard normal
    distribution, or from [0.5, 1.5) with `positive`.
    """
    import numpy as np

    generator = np.random.default_rng(seed)
    return {
        value.name: _sample_tensor(
            generator,
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim),
            onnx_file.get_dtype_name(value.type.tensor_type.elem_type),
            positive,
        )
        for value in onnx_file.list_inputs(model)
    }


def _sample_tensor(
    generator: np.random.Generator, shape: tuple[int, ...], dtype: str, positive: bool
) -> np.ndarray:
    """Sample a tensor of an ONNX element type; a large one repeats its first `_MAX_SAMPLES` values."""
    import numpy as np

    numpy_dtype = onnx_file.get_numpy_dtype(dtype)
    num_elements = math.prod(shape)
    num_samples = min(num_elements, _MAX_SAMPLES)
    if dtype.startswith(("int", "uint", "bool")):
        values = generator.integers(0, 2, num_samples)
    elif positive:
        values = generator.random(num_samples, dtype=np.float32) + np.float32(0.5)
    else:
        values = generator.standard_normal(num_samples, dtype=np.float32)
    return np.resize(values.astype(numpy_dtype), shape)


def observe_shapes(model: onnx.ModelProto, provider: str, names: list[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors in a run on random inputs; only shapes are fetched, to save memory."""
    onnx = require("onnx", "latency")
    shape_model = expose_tensors(model, [f"sparseflow/shape/{index}" for index in range(len(names))])
    shape_model.graph.node.extend(
        onnx.helper.make_node("Shape", [name], [f"sparseflow/shape/{index}"])
        for index, name in enumerate(names)
    )
    shape_session = session.open_session(shape_model.SerializeToString(), provider, "disable")
    outputs = [value.name for value in shape_model.graph.output]
    observed_shapes = session.run(shape_session, outputs, make_random_inputs(model, seed=0))
    return {
        name: tuple(int(extent) for extent in shape)
        for name, shape in zip(names, observed_shapes, strict=True)
    }


def _describe_weight(weight: onnx.TensorProto) -> TensorSpec:
    return TensorSpec(
        name=weight.name, dtype=onnx_file.get_dtype_name(weight.data_type), shape=tuple(weight.dims)
    )
