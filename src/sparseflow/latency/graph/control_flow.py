"""Subgraphs of If, Loop and Scan: their kernels, and how often a node runs them.

A subgraph is analyzed as a model whose inputs have the shapes of the node's inputs; tensors that a loop
carries have their shape in the first iteration. The branch of an If and the trip count of a Loop are those of
a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import InputError, ModelError, RunError
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.inputs import Feeds, ModelInputs
from sparseflow.latency.graph.kernels import Body, KernelSpec, TensorSpec
from sparseflow.latency.graph.optimization import expose_tensors
from sparseflow.latency.graph.work import CONTROL_FLOW_OPS

if TYPE_CHECKING:
    import numpy as np
    import onnx

THEN_BRANCH = "then_branch"

_ITERATION, _TRIPS = "sparseflow/iteration", "sparseflow/trips"
_FIRST_SCAN_VERSION = 9
"""Opset since which Scan has no batch axis; earlier ones are not analyzed."""

Values = Mapping[str, "np.ndarray"]
DescribeKernels = Callable[["onnx.ModelProto", Values], tuple[KernelSpec, ...]]


def find_bodies(
    model: onnx.ModelProto,
    inputs: ModelInputs,
    tensors: Mapping[str, TensorSpec],
    provider: str,
    describe: DescribeKernels,
) -> dict[int, tuple[Body, ...]]:
    """Return index -> subgraphs, for every If, Loop and Scan whose subgraphs can be analyzed.

    Args:
        model: Optimized model.
        inputs: Its inputs.
        tensors: Its inputs, weights and intermediate tensors.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name.
        describe: Returns the kernels of a subgraph, given as a model with the values of some inputs.
    """
    nodes = {
        index: node
        for index, node in enumerate(model.graph.node)
        if node.op_type in CONTROL_FLOW_OPS and not node.domain
    }
    if not nodes:
        return {}
    try:
        observed = _observe_values(model, inputs, nodes, provider)
    except (InputError, RunError):
        observed = {}
    bodies = {}
    for index in nodes:
        try:
            bodies[index] = tuple(_describe_bodies(model, index, tensors, observed, describe))
        except (InputError, ModelError, RunError, KeyError):
            # The shapes or the trip count cannot be determined, so the work is unknown.
            continue
    return bodies


def find_captured_tensors(graphs: Sequence[onnx.GraphProto]) -> tuple[str, ...]:
    """Return the outer tensors that subgraphs read."""
    captured: dict[str, None] = {}

    def collect_reads(graph: onnx.GraphProto, outer: set[str]) -> None:
        inside = outer | {value.name for value in graph.input} | {w.name for w in graph.initializer}
        for child in graph.node:
            captured.update(dict.fromkeys(name for name in child.input if name and name not in inside))
            for sub in list_subgraphs(child):
                collect_reads(sub, inside)
            inside |= set(child.output)
        captured.update(dict.fromkeys(v.name for v in graph.output if v.name not in inside))

    for graph in graphs:
        collect_reads(graph, set())
    return tuple(captured)


def list_subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """List the subgraphs of a node."""
    return [a.g for a in node.attribute if a.HasField("g")] + [g for a in node.attribute for g in a.graphs]


def _observe_values(
    model: onnx.ModelProto, inputs: ModelInputs, nodes: Mapping[int, onnx.NodeProto], provider: str
) -> dict[str, np.ndarray]:
    """Run a model, and return the conditions, the trip counts and the integers that its subgraphs read.

    The trip count of the Loop at an index has the name `_TRIPS/index`.
    """
    onnx = require("onnx", "latency")
    import numpy as np

    weights = {weight.name: weight for weight in model.graph.initializer}
    written = {name for node in model.graph.node for name in node.output if name}
    reads = {
        n for node in nodes.values() for n in (*node.input, *find_captured_tensors(list_subgraphs(node)))
    }
    observed = {name: onnx.numpy_helper.to_array(weights[name]) for name in reads & weights.keys()}
    instrumented = expose_tensors(model, [])
    names = sorted(reads & written)
    for index in nodes:
        if model.graph.node[index].op_type == "Loop":
            _append_trip_count(onnx, instrumented, index)
            names.append(f"{_TRIPS}/{index}")
    feeds = next(inputs.iter_draws(seed=0))
    if names:
        instrumented.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        runtime_session = session.open_session(instrumented.SerializeToString(), provider, "disable")

        def run(feeds: Feeds) -> list[np.ndarray]:
            return session.run(runtime_session, names, feeds)

        feeds, results = inputs.find_feeds(run, seed=0)
        observed |= zip(names, results, strict=True)
    observed |= {name: feeds[name] for name in reads & feeds.keys()}
    return {
        name: value
        for name, value in observed.items()
        if isinstance(value, np.ndarray) and value.dtype.kind in "iub"
    }


def _append_trip_count(onnx: Any, model: onnx.ModelProto, index: int) -> None:
    """Let a Loop collect its iterations, and add a node that writes their number."""
    node = model.graph.node[index]
    (body,) = list_subgraphs(node)
    node.output.extend([""] * (len(body.output) - 1 - len(node.output)))
    body.node.append(onnx.helper.make_node("Identity", [body.input[0].name], [_ITERATION]))
    body.output.append(onnx.helper.make_tensor_value_info(_ITERATION, onnx.TensorProto.INT64, ()))
    node.output.append(f"{_ITERATION}/{index}")
    model.graph.node.append(onnx.helper.make_node("Size", [node.output[-1]], [f"{_TRIPS}/{index}"]))


def _describe_bodies(
    model: onnx.ModelProto,
    index: int,
    tensors: Mapping[str, TensorSpec],
    observed: Values,
    describe: DescribeKernels,
) -> list[Body]:
    """Describe the subgraphs of a node.

    Raises:
        InputError, RunError: A subgraph that the run executes cannot be analyzed.
        KeyError: A condition or a trip count was not observed.
    """
    onnx = require("onnx", "latency")
    node = model.graph.node[index]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    reads = [tensors[name] for name in node.input if name]
    if node.op_type == "If":
        condition = bool(observed[node.input[0]].item())
        bodies = []
        for name in (THEN_BRANCH, "else_branch"):
            is_executed = condition == (name == THEN_BRANCH)
            try:
                kernels = _describe_graph(model, attributes[name], [], tensors, observed, describe)
            except (InputError, ModelError, RunError):
                # A branch that is not executed may be invalid at these shapes.
                if is_executed:
                    raise
                continue
            bodies.append(Body(name=name, trips=float(is_executed), kernels=kernels))
        return bodies
    graph = attributes["body"]
    if node.op_type == "Loop":
        trips = int(observed[f"{_TRIPS}/{index}"])
        carried = [tensors[name] for name in node.input[2:]]
        inputs = [("int64", ()), ("bool", ()), *((t.dtype, t.shape) for t in carried)]
        first = {graph.input[0].name: _make_array(0, "int64"), graph.input[1].name: _make_array(1, "bool")}
        pairs = zip(graph.input[2:], node.input[2:], strict=True)
    else:
        opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
        if opset < _FIRST_SCAN_VERSION:
            raise InputError(f"a Scan of opset {opset} is not supported")
        num_scanned = attributes["num_scan_inputs"]
        num_states = len(reads) - num_scanned
        axes = attributes.get("scan_input_axes", [0] * num_scanned)
        trips = reads[num_states].shape[axes[0]]
        inputs = [(t.dtype, t.shape) for t in reads[:num_states]]
        for tensor, axis in zip(reads[num_states:], axes, strict=True):
            shape = list(tensor.shape)
            del shape[axis]
            inputs.append((tensor.dtype, tuple(shape)))
        first, pairs = {}, zip(graph.input[:num_states], node.input, strict=False)
    values = {**observed, **first}
    values |= {value.name: observed[name] for value, name in pairs if name in observed}
    kernels = _describe_graph(model, graph, inputs, tensors, values, describe)
    return [Body(name="body", trips=float(trips), kernels=kernels)]


def _describe_graph(
    model: onnx.ModelProto,
    graph: onnx.GraphProto,
    inputs: Sequence[tuple[str, tuple[int, ...]]],
    tensors: Mapping[str, TensorSpec],
    values: Values,
    describe: DescribeKernels,
) -> tuple[KernelSpec, ...]:
    """Describe a subgraph as a model with its own inputs, of these types and shapes, and captured ones."""
    onnx = require("onnx", "latency")
    if not graph.node:
        return ()
    weights = {weight.name: weight for weight in model.graph.initializer}
    names = {value.name: tensor for value, tensor in zip(graph.input, inputs, strict=True)}
    captured = find_captured_tensors([graph])
    names |= {n: (tensors[n].dtype, tensors[n].shape) for n in captured if n not in weights}
    body = onnx.ModelProto(ir_version=model.ir_version, producer_name="sparseflow")
    body.opset_import.extend(model.opset_import)
    body.functions.extend(model.functions)
    body.graph.CopyFrom(graph)
    del body.graph.input[:]
    body.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, onnx_file.get_element_type(dtype), shape)
        for name, (dtype, shape) in names.items()
    )
    body.graph.initializer.extend(weights[name] for name in captured if name in weights)
    return describe(body, {name: values[name] for name in names if name in values})


def _make_array(value: int, dtype: str) -> np.ndarray:
    import numpy as np

    return np.array(value, dtype=dtype)
