"""An ONNX graph as onnxruntime will run it: its nodes, their shapes and work, and what waits for what.

The graph is optimised for a provider first, and everything is then read from the result: which operators a
runtime fuses differs by provider, version and processor and is never assumed. Shapes come from onnxruntime's
own inference on that result; where it leaves one open, the model is run once and each shape recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from sparseflow.core.extras import require
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError, ModelError
from sparseflow.latency import onnx_file, session, work
from sparseflow.latency.kernels import UNDEFINED, Kernel, Tensor, canonical_name
from sparseflow.latency.optimised import describe_tensors, optimise
from sparseflow.latency.optimised import random_inputs as random_inputs

if TYPE_CHECKING:
    import onnx

FORMAT = "sparseflow.latency.graph"
VERSION = 1
GRAPH_FILE, OPTIMISED_FILE, KERNELS_FOLDER = "graph.json", "optimised.onnx", "kernels"

MOST_VALUES = 64
"""Integer constants of at most this many elements are part of a kernel: axes, pads, a target shape."""

_STEERING_FLOATS = {"Pow": (1,)}
"""Operator -> float inputs whose value decides what is computed: a square is not a power."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the optimised graph.

    Attributes:
        name: Unique within the graph.
        kernel: What it runs.
        inputs: Names of the nodes whose results it reads, in order of first use.
        reads: Names of the tensors it reads, `""` for an optional one that is left out; those that a subgraph
            of it captures stand at the end.
        writes: Names of the tensors it writes.
    """

    name: str
    kernel: Kernel
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def kernel_id(self) -> str:
        return self.kernel.id


@dataclass(frozen=True, kw_only=True)
class Graph:
    """An analysed model.

    Attributes:
        model_path: The model that was analysed.
        optimised_path: The optimised graph, weights included; None where it was not kept.
        provider: onnxruntime's name of the provider it was optimised for.
        level: How far: `"disable"`, `"basic"`, `"extended"` or `"all"`.
        ort_version: The onnxruntime that did it.
        opset_imports: Domain -> version.
        inputs: What a caller feeds; `name` is the model's own.
        outputs: What comes out.
        nodes: In the order in which onnxruntime runs them.
    """

    model_path: str
    optimised_path: str | None
    provider: str
    level: str
    ort_version: str
    opset_imports: Mapping[str, int]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    nodes: tuple[Node, ...]

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel once, in order of first use."""
        return tuple({node.kernel.id: node.kernel for node in self.nodes}.values())

    @property
    def edges(self) -> tuple[tuple[str, str], ...]:
        """(node, node that reads its result), each pair once."""
        return tuple((source, node.name) for node in self.nodes for source in node.inputs)

    @property
    def flops(self) -> float:
        return sum(node.kernel.flops for node in self.nodes)

    @property
    def bytes_moved(self) -> float:
        return sum(node.kernel.bytes_moved for node in self.nodes)

    def counts(self) -> dict[str, int]:
        """Canonical name -> nodes of it, the most frequent first."""
        found: dict[str, int] = {}
        for node in self.nodes:
            found[node.kernel.op] = found.get(node.kernel.op, 0) + 1
        return dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0])))

    def uses(self) -> dict[str, int]:
        """Kernel's id -> nodes that run it."""
        found: dict[str, int] = {}
        for node in self.nodes:
            found[node.kernel_id] = found.get(node.kernel_id, 0) + 1
        return found

    def to_dict(self) -> dict[str, Any]:
        """The graph in JSON's types."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "model_path": self.model_path,
            "optimised_path": self.optimised_path,
            "provider": self.provider,
            "level": self.level,
            "ort_version": self.ort_version,
            "opset_imports": dict(self.opset_imports),
            "inputs": [_tensor_dict(t) for t in self.inputs],
            "outputs": [_tensor_dict(t) for t in self.outputs],
            "nodes": [
                {
                    "name": node.name,
                    "kernel_id": node.kernel_id,
                    "inputs": list(node.inputs),
                    "reads": list(node.reads),
                    "writes": list(node.writes),
                }
                for node in self.nodes
            ],
            "kernels": [kernel.to_dict() for kernel in self.kernels],
        }

    @classmethod
    def from_dict(cls, record: Any) -> Graph:
        """Read back what `to_dict` gave.

        Raises:
            FileFormatError: It is no such record, of another version, or contradicts itself.
        """
        if not isinstance(record, Mapping) or record.get("format") != FORMAT:
            raise FileFormatError(
                "this is not the record of an analysed graph; make one with: latency analyze"
            )
        if record.get("version") != VERSION:
            raise FileFormatError(
                f"the record of the graph has version {record.get('version')}, and {VERSION} is read here; "
                f"analyse the model again"
            )
        try:
            read = _GraphRecord.model_validate(dict(record))
        except pydantic.ValidationError as error:
            raise FileFormatError(f"the record of the graph is damaged: {error}") from error
        kernels = {kernel.id: kernel for kernel in map(Kernel.from_dict, read.kernels)}
        nodes: list[Node] = []
        seen: set[str] = set()
        for entry in read.nodes:
            if entry.kernel_id not in kernels or entry.name in seen or not seen.issuperset(entry.inputs):
                raise FileFormatError(
                    f"the record of the graph contradicts itself at the node `{entry.name}`: its kernel is "
                    f"not listed, its name occurs twice or it reads from a node behind it"
                )
            seen.add(entry.name)
            nodes.append(
                Node(
                    name=entry.name,
                    kernel=kernels[entry.kernel_id],
                    inputs=tuple(entry.inputs),
                    reads=tuple(entry.reads),
                    writes=tuple(entry.writes),
                )
            )
        return cls(
            model_path=read.model_path,
            optimised_path=read.optimised_path,
            provider=read.provider,
            level=read.level,
            ort_version=read.ort_version,
            opset_imports=read.opset_imports,
            inputs=tuple(t.tensor() for t in read.inputs),
            outputs=tuple(t.tensor() for t in read.outputs),
            nodes=tuple(nodes),
        )

    def save(self, folder: Path | str) -> Path:
        """Write `graph.json` and one file a kernel under `kernels/`; gives the first one's path."""
        root = Path(folder)
        (root / KERNELS_FOLDER).mkdir(parents=True, exist_ok=True)
        for kernel in self.kernels:
            _write_json(root / KERNELS_FOLDER / f"{kernel.id}.json", kernel.to_dict())
        record = self.to_dict()
        if self.optimised_path is not None and Path(self.optimised_path).parent == root:
            # A folder that is moved takes its optimised graph along.
            record["optimised_path"] = Path(self.optimised_path).name
        path = root / GRAPH_FILE
        _write_json(path, record)
        return path

    @classmethod
    def load(cls, path: Path | str) -> Graph:
        """Read a `graph.json`, or the one in a folder.

        Raises:
            InputError: There is no such file.
            FileFormatError: It is no such record, of another version, or contradicts itself.
        """
        file = Path(path)
        file = file / GRAPH_FILE if file.is_dir() else file
        if not file.is_file():
            raise InputError(
                f"there is no graph {file}; make one with: latency analyze MODEL.onnx --out FOLDER"
            )
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise FileFormatError(f"{file} is not JSON: {error}") from error
        if isinstance(record, dict) and isinstance(record.get("optimised_path"), str):
            record["optimised_path"] = str(file.parent / record["optimised_path"])
        try:
            return cls.from_dict(record)
        except FileFormatError as error:
            raise FileFormatError(f"{file}: {error}") from error


def analyze(
    path: Path | str,
    provider: str = "CPUExecutionProvider",
    level: str = "all",
    *,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    out: Path | str | None = None,
    always_run: bool = False,
    seed: int = 0,
) -> Graph:
    """Optimise a model for a provider and read every node of the result.

    Args:
        path: The ONNX file.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name.
        level: What onnxruntime may optimise: `"disable"`, `"basic"`, `"extended"` or `"all"`.
        shapes: Input -> shape, for inputs that leave extents open.
        out: Folder that gets `graph.json`, `kernels/` and the optimised graph; None keeps nothing.
        always_run: Run the model once for its shapes even where onnxruntime infers them all.
        seed: What random inputs of that run are drawn from.

    Raises:
        InputError: There is no such file, provider or level, or an extent is open and not given.
        FileFormatError: The file is not ONNX, cut off, or its weights are missing.
        ModelError: It is too new, too large, empty, or onnxruntime refuses it.
        DeviceError: The provider is not there.
        RunError: It had to be run, and failed.
    """
    source = Path(path)
    model = optimise(source, provider, level, shapes=shapes)
    known = describe_tensors(model, provider, always_run=always_run, seed=seed)
    optimised: Path | None = None
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        optimised = Path(out) / OPTIMISED_FILE
        write_atomic(optimised, onnx_file.serialise(model, str(source)))
    graph = Graph(
        model_path=str(source),
        optimised_path=None if optimised is None else str(optimised),
        provider=session.provider_name(provider),
        level=level,
        ort_version=require("onnxruntime", "latency").__version__,
        opset_imports={entry.domain: entry.version for entry in model.opset_import},
        inputs=tuple(known[value.name] for value in onnx_file.true_inputs(model)),
        outputs=tuple(known[value.name] for value in model.graph.output),
        nodes=tuple(read_nodes(model, known)),
    )
    if out is not None:
        graph.save(out)
    return graph


def read_nodes(model: onnx.ModelProto, known: Mapping[str, Tensor]) -> Iterator[Node]:
    """Every node of an optimised model, in the order in which it stands there."""
    onnx = require("onnx", "latency")
    weights = {weight.name: weight for weight in model.graph.initializer}
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    makers: dict[str, str] = {}
    taken: set[str] = set()
    for index, node in enumerate(model.graph.node):
        name = node.name or f"{node.op_type}_{index}"
        name = name if name not in taken else f"{name}#{index}"
        taken.add(name)
        own = _without_trailing_gaps(node.input)
        captured = captures(node)
        reads = (*own, *captured)
        inputs = tuple(
            _placed(known, tensor, f"input_{reads.index(tensor)}" if position < len(own) else tensor)
            for position, tensor in enumerate(reads)
        )
        outputs = tuple(
            _placed(known, tensor, f"output_{position}")
            for position, tensor in enumerate(_without_trailing_gaps(node.output))
        )
        attributes = {a.name: onnx_file.attribute_value(a) for a in node.attribute}
        count, known_rule = work.flops(node.op_type, attributes, inputs, outputs)
        kernel = Kernel(
            op=canonical_name(node.op_type, node.domain, attributes, inputs),
            node_op=node.op_type,
            domain=node.domain,
            opset=_last_changed(onnx, node, opsets),
            attributes=attributes,
            inputs=inputs,
            outputs=outputs,
            constants=tuple(position for position, tensor in enumerate(reads) if tensor in weights),
            values={
                position: values
                for position, tensor in enumerate(reads)
                if tensor in weights
                and (values := _steering(onnx, node.op_type, position, weights[tensor])) is not None
            },
            flops=count,
            bytes_moved=work.bytes_moved(node.op_type, inputs, outputs),
            flops_known=known_rule,
        )
        yield Node(
            name=name,
            kernel=kernel,
            inputs=tuple(dict.fromkeys(makers[tensor] for tensor in reads if tensor in makers)),
            reads=reads,
            writes=tuple(tensor for tensor in node.output if tensor),
        )
        makers.update({tensor: name for tensor in node.output if tensor})


def captures(node: onnx.NodeProto) -> tuple[str, ...]:
    """Outer tensors that the subgraphs of a node (If, Loop, Scan) read."""
    found: dict[str, None] = {}

    def walk(graph: onnx.GraphProto, outer: set[str]) -> None:
        inside = outer | {value.name for value in graph.input} | {w.name for w in graph.initializer}
        for inner in graph.node:
            found.update(dict.fromkeys(name for name in inner.input if name and name not in inside))
            for sub in _subgraphs(inner):
                walk(sub, inside)
            inside |= set(inner.output)
        found.update(dict.fromkeys(v.name for v in graph.output if v.name not in inside))

    for graph in _subgraphs(node):
        walk(graph, set())
    return tuple(found)


def _steering(
    onnx: Any, node_op: str, position: int, weight: onnx.TensorProto
) -> tuple[int, ...] | None:  # fmt: skip
    """The value of a small constant that decides what is computed, or None."""
    dtype = onnx_file.dtype_name(weight.data_type)
    elements = 1
    for extent in weight.dims:
        elements *= extent
    if dtype in ("int32", "int64") and elements <= MOST_VALUES:
        return tuple(int(value) for value in onnx.numpy_helper.to_array(weight).ravel())
    if position in _STEERING_FLOATS.get(node_op, ()) and elements == 1:
        # As thousandths, since a kernel keeps integers.
        return (round(float(onnx.numpy_helper.to_array(weight).ravel()[0]) * 1000),)
    return None


def _last_changed(onnx: Any, node: onnx.NodeProto, opsets: Mapping[str, int]) -> int:
    """Version in which the operator last changed: two models of different opsets share what did not."""
    imported = opsets.get(node.domain, opsets.get("ai.onnx", 1) if not node.domain else 1)
    try:
        return int(onnx.defs.get_schema(node.op_type, imported, node.domain).since_version)
    except Exception:  # onnx keeps no schema of a runtime's own operators
        return int(imported)


def _placed(known: Mapping[str, Tensor], tensor: str, name: str) -> Tensor:
    if not tensor:
        return Tensor(name=name, dtype=UNDEFINED, shape=())
    if tensor not in known:
        raise ModelError(f"the tensor `{tensor}` is read, and nothing in the graph writes it")
    return Tensor(name=name, dtype=known[tensor].dtype, shape=known[tensor].shape)


def _without_trailing_gaps(names: Any) -> tuple[str, ...]:
    listed = list(names)
    while listed and not listed[-1]:
        listed.pop()
    return tuple(listed)


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [a.g for a in node.attribute if a.HasField("g")] + [g for a in node.attribute for g in a.graphs]


def _tensor_dict(tensor: Tensor) -> dict[str, Any]:
    return {**asdict(tensor), "shape": list(tensor.shape)}


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


class _Record(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class _TensorRecord(_Record):
    name: str
    dtype: str
    shape: list[int]

    def tensor(self) -> Tensor:
        try:
            return Tensor(name=self.name, dtype=self.dtype, shape=tuple(self.shape))
        except InputError as error:
            raise FileFormatError(str(error)) from error


class _NodeRecord(_Record):
    name: str
    kernel_id: str
    inputs: list[str]
    reads: list[str]
    writes: list[str]


class _GraphRecord(_Record):
    format: str
    version: int
    model_path: str
    optimised_path: str | None
    provider: str
    level: str
    ort_version: str
    opset_imports: dict[str, int]
    inputs: list[_TensorRecord]
    outputs: list[_TensorRecord]
    nodes: list[_NodeRecord]
    kernels: list[dict[str, Any]]
