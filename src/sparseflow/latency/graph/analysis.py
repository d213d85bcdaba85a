"""The graph that onnxruntime executes for an ONNX model: nodes, shapes, work and dependencies.

The model is optimized for a provider first, since fusion differs by provider, version and processor. Shapes
come from onnxruntime's shape inference on the optimized graph; for tensors without an inferred shape, the
model is run once. Such shapes can depend on the values of inputs, see `inputs`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import Field, computed_field, model_validator

from sparseflow.core.artifact import Artifact
from sparseflow.core.config import StrictModel
from sparseflow.core.extras import require
from sparseflow.core.files import write_atomic, write_json
from sparseflow.errors import ModelError
from sparseflow.latency.graph import onnx_file, session, work
from sparseflow.latency.graph.control_flow import Values, find_bodies, find_captured_tensors, list_subgraphs
from sparseflow.latency.graph.inputs import ModelInputs, resolve_inputs, save_values
from sparseflow.latency.graph.kernels import (
    UNDEFINED,
    Body,
    KernelSpec,
    TensorSpec,
    get_canonical_name,
    parse_kernel,
)
from sparseflow.latency.graph.optimization import describe_tensors, optimize

if TYPE_CHECKING:
    import onnx

GRAPH_FILE, OPTIMIZED_FILE, INPUTS_FILE = "graph.json", "optimized.onnx", "inputs.npz"
KERNELS_FOLDER = "kernels"

MAX_VALUE_ELEMENTS = 64
"""Maximum size of an integer constant whose values belong to a kernel: axes, pads, a target shape."""

_VALUE_FLOAT_INPUTS = {"Pow": (1,)}
"""Operator -> positions of float inputs whose value selects the computation, such as the exponent of Pow."""


class Node(StrictModel):
    """One node of an optimized graph.

    Attributes:
        name: Unique name within the graph.
        kernel: Kernel of the node.
        inputs: Names of the nodes whose outputs it reads, in order of first use.
        reads: Names of the tensors it reads, `""` for an omitted optional one; tensors captured by its
            subgraphs come last.
        writes: Names of the tensors it writes.
    """

    name: str
    # A file contains each kernel once, see `Graph.kernels`.
    kernel: KernelSpec = Field(exclude=True)
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @computed_field
    @property
    def kernel_id(self) -> str:
        return self.kernel.id


class Graph(Artifact):
    """An analyzed model.

    Attributes:
        model_path: The analyzed model.
        optimized_path: The optimized graph with weights; None if it was not saved.
        provider: onnxruntime's name of the provider.
        level: Optimization level: `"disable"`, `"basic"`, `"extended"` or `"all"`.
        ort_version: Version of onnxruntime.
        opset_imports: Domain -> version.
        inputs: Inputs by the model's own names.
        outputs: Outputs by the model's own names.
        nodes: Nodes in execution order.
    """

    FORMAT: ClassVar[str] = "sparseflow.latency.graph"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "run `sparseflow latency analyze` again"

    model_path: str
    optimized_path: str | None
    provider: str
    level: str
    ort_version: str
    opset_imports: Mapping[str, int]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: tuple[Node, ...]

    @computed_field
    @cached_property
    def kernels(self) -> tuple[KernelSpec, ...]:
        """Distinct kernels, in order of first use."""
        return tuple({node.kernel.id: node.kernel for node in self.nodes}.values())

    @model_validator(mode="before")
    @classmethod
    def _resolve_kernel_ids(cls, record: Any) -> Any:
        """Replace the kernel ids of a file's nodes by its kernels."""
        if "kernels" not in record:
            return record
        content = dict(record)
        try:
            kernels = {kernel["id"]: parse_kernel(kernel, kernel["id"]) for kernel in content.pop("kernels")}
            nodes = [dict(node) for node in content["nodes"]]
            content["nodes"] = [node | {"kernel": kernels[node.pop("kernel_id")]} for node in nodes]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a node or kernel is invalid, or a kernel is unknown: {error!r}") from error
        return content

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        names: set[str] = set()
        for node in self.nodes:
            if node.name in names or not names.issuperset(node.inputs):
                raise ValueError(f"node {node.name!r} has a duplicate name, or reads from a later node")
            names.add(node.name)
        return self

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """Distinct pairs (node, node that reads its output)."""
        return tuple((source, node.name) for node in self.nodes for source in node.inputs)

    @property
    def flops(self) -> float:
        return sum(node.kernel.flops for node in self.nodes)

    @property
    def bytes_moved(self) -> float:
        return sum(node.kernel.bytes_moved for node in self.nodes)

    def count_ops(self) -> dict[str, int]:
        """Return canonical name -> number of nodes, most frequent first."""
        counts = Counter(node.kernel.op for node in self.nodes)
        return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))

    def count_kernel_uses(self) -> dict[str, int]:
        """Return kernel id -> number of nodes that run it."""
        return Counter(node.kernel_id for node in self.nodes)

    def save(self, path: Path | str, *, indent: int | None = 1, rescue: bool = True) -> Path:
        """Write `graph.json` into the directory `path`, and one file per kernel into its `kernels/`.

        Args:
            path: Directory; it is created if it is missing.
            indent, rescue: As in `write_json`.

        Returns:
            Path of `graph.json`.
        """
        root = Path(path)
        (root / KERNELS_FOLDER).mkdir(parents=True, exist_ok=True)
        for kernel in self.kernels:
            file = root / KERNELS_FOLDER / f"{kernel.file_stem}.json"
            write_json(file, kernel.model_dump(mode="json"), indent=indent, rescue=rescue)
        record = self.to_dict()
        if self.optimized_path is not None and Path(self.optimized_path).parent == root:
            # Relative, so that the directory can be moved.
            record["optimized_path"] = Path(self.optimized_path).name
        write_json(root / GRAPH_FILE, record, indent=indent, rescue=rescue)
        return root / GRAPH_FILE

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a `graph.json`, or the one in a directory.

        Raises:
            InputError: The file does not exist.
            FileFormatError: The file is foreign, damaged, or of another version.
        """
        file = Path(path)
        file = file / GRAPH_FILE if file.is_dir() else file
        graph = super().load(file)
        if graph.optimized_path is None:
            return graph
        return graph.model_copy(update={"optimized_path": str(file.parent / graph.optimized_path)})


def analyze(
    path: Path | str,
    provider: str = "CPUExecutionProvider",
    level: str = "all",
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    out_dir: Path | str | None = None,
) -> Graph:
    """Optimize a model for a provider and describe every node of the result.

    Args:
        path: ONNX file.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name, or `"openvino"` for the graph that represents its
            runs, see `session.select_graph`.
        level: Optimization level: `"disable"`, `"basic"`, `"extended"` or `"all"`.
        shapes: Input -> shape, for inputs with open dimensions.
        inputs: Input -> value, as `inputs.read_value` takes it; the other inputs are random.
        out_dir: Directory for `graph.json`, `kernels/`, the optimized graph and the values of inputs that
            select the computation; None saves nothing.

    Raises:
        InputError: The file, provider or level does not exist, an open dimension has no shape, or a value
            does not fit.
        FileFormatError: The file is not ONNX or is truncated, or weights are missing.
        ModelError: The model is too new, too large or empty, or onnxruntime refuses it.
        DeviceError: The provider is not available.
        RunError: A run for the shapes failed.
    """
    model_path = onnx_file.check_path(path)
    provider, level = session.select_graph(provider, level)
    model, model_inputs = optimize(model_path, provider, level, shapes=shapes, values=inputs)
    tensors, feeds = describe_tensors(model, model_inputs, provider)
    optimized_path: Path | None = None
    if out_dir is not None:
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        optimized_path = Path(out_dir) / OPTIMIZED_FILE
        write_atomic(optimized_path, onnx_file.serialize(model, str(model_path)))
        # Shapes depend on the values of a run.
        used = {name: value for name, value in feeds.items() if name in model_inputs.control}
        save_values(Path(out_dir) / INPUTS_FILE, used | dict(model_inputs.values))
    graph = Graph(
        model_path=str(model_path),
        optimized_path=None if optimized_path is None else str(optimized_path),
        provider=provider,
        level=level,
        ort_version=require("onnxruntime", "latency").__version__,
        opset_imports={entry.domain: entry.version for entry in model.opset_import},
        inputs=tuple(tensors[value.name] for value in onnx_file.list_inputs(model)),
        outputs=tuple(tensors[value.name] for value in model.graph.output),
        nodes=tuple(iter_nodes(model, tensors, _find_bodies(model, model_inputs, tensors, provider))),
    )
    if out_dir is not None:
        graph.save(out_dir)
    return graph


def iter_nodes(
    model: onnx.ModelProto,
    tensors: Mapping[str, TensorSpec],
    bodies: Mapping[int, tuple[Body, ...]] = MappingProxyType({}),
) -> Iterator[Node]:
    """Yield every node of an optimized model, in order.

    Args:
        model: Optimized model.
        tensors: Its inputs, weights and intermediate tensors.
        bodies: Index of a node -> its subgraphs.
    """
    onnx = require("onnx", "latency")
    weights = {weight.name: weight for weight in model.graph.initializer}
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    producers: dict[str, str] = {}
    names: set[str] = set()
    for index, node in enumerate(model.graph.node):
        name = node.name or f"{node.op_type}_{index}"
        name = name if name not in names else f"{name}#{index}"
        names.add(name)
        own_reads = _strip_trailing_empty(node.input)
        captured = find_captured_tensors(list_subgraphs(node))
        reads = (*own_reads, *captured)
        inputs = tuple(
            _make_tensor(
                tensors, tensor, f"input_{reads.index(tensor)}" if position < len(own_reads) else tensor
            )
            for position, tensor in enumerate(reads)
        )
        outputs = tuple(
            _make_tensor(tensors, tensor, f"output_{position}")
            for position, tensor in enumerate(_strip_trailing_empty(node.output))
        )
        attributes = {a.name: onnx_file.parse_attribute(a) for a in node.attribute}
        node_bodies = bodies.get(index, ())
        if any(tensor.opaque for tensor in (*inputs, *outputs)):
            flops, flops_known = 0.0, False
        else:
            flops, flops_known = work.count_flops(node.op_type, attributes, inputs, outputs, node_bodies)
        kernel = KernelSpec(
            op=get_canonical_name(node.op_type, node.domain, attributes, inputs),
            node_op=node.op_type,
            domain=node.domain,
            opset=_get_since_version(onnx, node, opsets),
            attributes=attributes,
            inputs=inputs,
            outputs=outputs,
            constants=tuple(position for position, tensor in enumerate(reads) if tensor in weights),
            values={
                position: values
                for position, tensor in enumerate(reads)
                if tensor in weights
                and (values := _read_constant_value(onnx, node.op_type, position, weights[tensor]))
                is not None
            },
            bodies=node_bodies,
            flops=flops,
            bytes_moved=work.count_bytes_moved(node.op_type, inputs, outputs, node_bodies),
            flops_known=flops_known,
        )
        yield Node(
            name=name,
            kernel=kernel,
            inputs=tuple(dict.fromkeys(producers[tensor] for tensor in reads if tensor in producers)),
            reads=reads,
            writes=tuple(tensor for tensor in node.output if tensor),
        )
        producers.update({tensor: name for tensor in node.output if tensor})


def _find_bodies(
    model: onnx.ModelProto, inputs: ModelInputs, tensors: Mapping[str, TensorSpec], provider: str
) -> dict[int, tuple[Body, ...]]:
    """Return index of a node -> its subgraphs."""

    def describe(body: onnx.ModelProto, values: Values) -> tuple[KernelSpec, ...]:
        inputs = resolve_inputs(body, values=values)
        inner, _ = describe_tensors(body, inputs, provider)
        return tuple(
            node.kernel for node in iter_nodes(body, inner, _find_bodies(body, inputs, inner, provider))
        )

    return find_bodies(model, inputs, tensors, provider, describe)


def _read_constant_value(
    onnx: Any, node_op: str, position: int, weight: onnx.TensorProto
) -> tuple[int, ...] | None:  # fmt: skip
    """Return the value of a small constant that selects the computation, or None."""
    dtype = onnx_file.get_dtype_name(weight.data_type)
    elements = math.prod(weight.dims)
    if dtype in ("int32", "int64") and elements <= MAX_VALUE_ELEMENTS:
        return tuple(int(value) for value in onnx.numpy_helper.to_array(weight).ravel())
    if position in _VALUE_FLOAT_INPUTS.get(node_op, ()) and elements == 1:
        # In thousandths, since kernel values are integers.
        return (round(float(onnx.numpy_helper.to_array(weight).ravel()[0]) * 1000),)
    return None


def _get_since_version(onnx: Any, node: onnx.NodeProto, opsets: Mapping[str, int]) -> int:
    """Return the version of the operator's last change, so that models of different opsets share kernels."""
    version = opsets.get(node.domain, opsets.get("ai.onnx", 1) if not node.domain else 1)
    try:
        return int(onnx.defs.get_schema(node.op_type, version, node.domain).since_version)
    except Exception:  # onnx has no schemas of a runtime's own operators
        return int(version)


def _make_tensor(tensors: Mapping[str, TensorSpec], tensor: str, name: str) -> TensorSpec:
    if not tensor:
        return TensorSpec(name=name, dtype=UNDEFINED, shape=())
    if tensor not in tensors:
        raise ModelError(f"the tensor `{tensor}` is read but not written by any node")
    return TensorSpec(name=name, dtype=tensors[tensor].dtype, shape=tensors[tensor].shape)


def _strip_trailing_empty(names: Any) -> tuple[str, ...]:
    listed = list(names)
    while listed and not listed[-1]:
        listed.pop()
    return tuple(listed)
