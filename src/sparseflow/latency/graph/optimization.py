"""Graph optimization by onnxruntime, and the tensors of the optimized graph."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, ModelError, OutputError
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.inputs import ModelInputs, open_session, resolve_inputs
from sparseflow.latency.graph.kernels import OPAQUE_TYPES, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import onnx


def optimize(
    path: Path | str,
    provider: str = "cpu",
    level: str = "all",
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    values: Mapping[str, Any] | None = None,
) -> tuple[onnx.ModelProto, ModelInputs]:
    """Return the graph that onnxruntime creates from a model for a provider, and the inputs of both.

    Raises:
        InputError, FileFormatError, ModelError, DeviceError: As `analyze`.
        OutputError: The temporary directory is full.
    """
    onnx = require("onnx", "latency")
    model = onnx_file.load_model(path)
    inputs = resolve_inputs(model, shapes, values)
    with tempfile.TemporaryDirectory(prefix="sparseflow-") as folder:
        target = Path(folder) / "optimized.onnx"
        settings = {"optimized_model_filepath": str(target)}
        try:
            open_session(model, inputs, str(path), provider, level, settings=settings)
        except FileFormatError as error:
            if "serializ" not in str(error):
                raise
            # The model was read, so the result cannot be written.
            try:
                target.write_bytes(onnx_file.serialize(model, str(path)))
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
            names = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in inputs.specs)
            raise ModelError(f"{path} with the inputs {names or 'none'}: {error}") from error
        optimized = onnx.load_model(str(target))
    onnx_file.check_model(optimized, f"the optimized graph of {path}")
    onnx_file.make_weights_dense(optimized, str(path))
    # Old models list weights as inputs, which stay listed where the optimizer removes the weights.
    names = {spec.name for spec in inputs.specs}
    obsolete = [value for value in onnx_file.list_inputs(optimized) if value.name not in names]
    for value in obsolete:
        optimized.graph.input.remove(value)
    return optimized, inputs


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


def describe_tensors(
    model: onnx.ModelProto, inputs: ModelInputs, provider: str
) -> tuple[dict[str, TensorSpec], dict[str, np.ndarray]]:
    """Return type and shape of every input, weight and intermediate tensor of an optimized model.

    Args:
        model: The optimized model.
        inputs: Its inputs.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name.

    Returns:
        Tensor -> spec, and the values of the inputs in the run for shapes; without a run none.

    Raises:
        ModelError: The type of a value is unknown.
        RunError: Shapes need a run, and it failed.
    """
    tensors = {weight.name: _describe_weight(weight) for weight in model.graph.initializer}
    tensors |= {spec.name: spec for spec in inputs.specs}
    names = list_written_tensors(model)
    inference_session = session.open_session(
        expose_tensors(model, names).SerializeToString(), provider, "disable"
    )
    outputs = inference_session.get_outputs()
    types = {value.name: onnx_file.get_value_type(value.type) for value in outputs}
    shapes: dict[str, tuple[int, ...]] = {
        value.name: () if types[value.name] in OPAQUE_TYPES else tuple(value.shape)
        for value in outputs
        if types[value.name] in OPAQUE_TYPES
        or all(isinstance(extent, int) and extent >= 0 for extent in value.shape)
    }
    del inference_session
    # onnxruntime reports the same shape for a scalar and a tensor of unknown rank.
    unknown = [name for name in names if not shapes.get(name) and types[name] not in OPAQUE_TYPES]
    feeds: dict[str, np.ndarray] = {}
    if unknown:
        feeds, observed = observe_shapes(model, inputs, provider, unknown)
        shapes.update(observed)
    tensors |= {name: TensorSpec(name=name, dtype=types[name], shape=shapes[name]) for name in names}
    return tensors, feeds


def observe_shapes(
    model: onnx.ModelProto, inputs: ModelInputs, provider: str, names: list[str]
) -> tuple[dict[str, np.ndarray], dict[str, tuple[int, ...]]]:
    """Return the values of the inputs in a run, and the shapes of tensors; only shapes are fetched, to save
    memory.
    """
    onnx = require("onnx", "latency")
    shape_model = expose_tensors(model, [f"sparseflow/shape/{index}" for index in range(len(names))])
    shape_model.graph.node.extend(
        onnx.helper.make_node("Shape", [name], [f"sparseflow/shape/{index}"])
        for index, name in enumerate(names)
    )
    shape_session = session.open_session(shape_model.SerializeToString(), provider, "disable")
    outputs = [value.name for value in shape_model.graph.output]
    feeds, observed_shapes = inputs.find_feeds(
        lambda feeds: session.run(shape_session, outputs, feeds), seed=0
    )
    return feeds, {
        name: tuple(int(extent) for extent in shape)
        for name, shape in zip(names, observed_shapes, strict=True)
    }


def _describe_weight(weight: onnx.TensorProto) -> TensorSpec:
    return TensorSpec(
        name=weight.name, dtype=onnx_file.get_dtype_name(weight.data_type), shape=tuple(weight.dims)
    )
