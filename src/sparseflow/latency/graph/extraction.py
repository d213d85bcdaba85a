"""Kernels as standalone models, one node each, checked against the tensors inside the full graph.

::

    kernels/<name>.json   record of the kernel
    kernels/<name>.onnx   the node with its weights; run it with optimization disabled
    kernels/<name>.npz    values of inputs that select the computation inside the graph, such as indices

The name is `KernelSpec.file_stem`, such as `Conv_Add_Relu_1x64x56x56_55d0777aba49`.

The node keeps its operator, including a runtime's own, its attributes and the opsets of the graph. Outputs
are declared by name only, since ONNX lacks types for a runtime's own operators. Inputs of a node with
subgraphs are declared without shapes, which can contradict a branch that is not taken. A node that reads or
writes a sequence, an optional value or a map is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.core.files import parse_json, read_json, write_atomic, write_json
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, InputError, RunError, SparseFlowError
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.analysis import (
    GRAPH_FILE,
    INPUTS_FILE,
    KERNELS_FOLDER,
    Graph,
    Node,
    analyze,
    list_subgraphs,
)
from sparseflow.latency.graph.inputs import (
    ModelInputs,
    find_control,
    load_values,
    resolve_inputs,
    save_values,
    selects_computation,
)
from sparseflow.latency.graph.kernels import KernelSpec, parse_kernel
from sparseflow.latency.graph.optimization import expose_tensors

if TYPE_CHECKING:
    import numpy as np
    import onnx

METADATA_KEY = "sparseflow.kernel"
TOLERANCE = 1e-4
"""Maximum difference to the tensor inside the graph, relative to that tensor's largest magnitude."""

CHUNK_BYTES = 512 * 2**20
"""Maximum size of the graph tensors that are in memory at a time during the check."""

_POSITIVE_INPUT_OPS = {"Sqrt", "Log", "Pow"}
"""Operators that return NaN for negative inputs."""


@dataclass(frozen=True, kw_only=True)
class ExtractionResult:
    """Outcome of one kernel's extraction.

    Attributes:
        kernel_id: Id of the kernel.
        op: Canonical name of the kernel.
        path: Extracted model; None if it could not be written.
        nodes: Number of graph nodes that run the kernel.
        checked: Number of nodes that were compared with the tensor inside the graph.
        matched: Number of nodes within the tolerance.
        relative_error: Largest difference relative to the tensor's largest magnitude; None without a check.
        problem: Error message; None on success.
        skipped: Why no model can have the node alone; None if one can.
    """

    kernel_id: str
    op: str
    path: Path | None
    nodes: int
    checked: int = 0
    matched: int = 0
    relative_error: float | None = None
    problem: str | None = None
    skipped: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the kernel is skipped, or the model exists and every checked node matches."""
        exists = self.path is not None or self.skipped is not None
        return exists and self.problem is None and self.matched == self.checked

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**vars(self), "path": None if self.path is None else str(self.path), "ok": self.ok}


def extract(
    target: Path | str | Graph,
    out_dir: Path | str,
    *,
    provider: str | None = None,
    check: bool = True,
    kernel_ids: Sequence[str] = (),
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[ExtractionResult]:
    """Write every kernel of a graph as a standalone model.

    Args:
        target: A graph, its `graph.json` or directory, one kernel's record in it, or an ONNX file, which is
            analyzed into `out_dir` first.
        out_dir: Directory for `kernels/`.
        provider: Provider for the analysis of an ONNX file and for runs; by default the graph's, or the CPU.
        check: Compare each node's output with the tensor inside the full graph.
        kernel_ids: Ids of the kernels to extract; by default all.
        shapes: Input -> shape, for an ONNX file with open dimensions.
        inputs: Input -> value, for an ONNX file, as `inputs.read_value` takes it.
        seed: Random seed of the graph's other inputs.
        threads: Threads within an operator during the check.
        progress: Receives the kernel id and the fraction done.

    Raises:
        InputError: `target` or a kernel of `kernel_ids` does not exist, or shapes or values are given for an
            analyzed graph.
        FileFormatError: A file is of the wrong format.
        ModelError, DeviceError: As `analyze`.
    """
    graph, model, selected_ids = _open_target(target, Path(out_dir), provider, kernel_ids, shapes, inputs)
    provider_name, _ = session.select_graph(provider or graph.provider, graph.level)
    selected = [
        (index, node)
        for index, node in enumerate(graph.nodes)
        if not selected_ids or node.kernel_id in selected_ids
    ]
    kernel_dir = Path(out_dir) / KERNELS_FOLDER
    kernel_dir.mkdir(parents=True, exist_ok=True)
    graph_runner = _GraphRunner(model, graph, provider_name, seed, threads)
    results: dict[str, ExtractionResult] = {}
    for index, node in selected:
        result = results.get(node.kernel_id)
        if result is None:
            results[node.kernel_id] = _write_kernel(graph_runner, index, node, kernel_dir)
        else:
            results[node.kernel_id] = replace(result, nodes=result.nodes + 1)
    selected = [(index, node) for index, node in selected if results[node.kernel_id].skipped is None]
    _save_control_inputs(graph_runner, selected, kernel_dir)
    if check:
        num_checked = 0
        for chunk in _split_into_chunks(selected):
            for index, node, tensors in graph_runner.iter_node_tensors(chunk):
                result = results[node.kernel_id]
                results[node.kernel_id] = _compare_node(result, graph_runner, index, node, tensors)
                num_checked += 1
                if progress is not None:
                    progress(node.kernel_id, num_checked / len(selected))
    return list(results.values())


def make_kernel_model(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], index: int, node: Node
) -> onnx.ModelProto:
    """Build a model of one node of an optimized graph.

    Args:
        model: The optimized graph.
        weights: Initializers by name.
        index: Index of the node in the graph.
        node: The analyzed node.
    """
    onnx = require("onnx", "latency")
    kernel = node.kernel
    kernel_model = onnx.ModelProto(ir_version=model.ir_version, producer_name="sparseflow")
    kernel_model.opset_import.extend(model.opset_import)
    kernel_model.graph.name = kernel.id
    node_proto = kernel_model.graph.node.add()
    node_proto.CopyFrom(model.graph.node[index])
    node_proto.name, node_proto.doc_string = kernel.op, ""
    num_inputs = len(node_proto.input)
    while num_inputs and not node_proto.input[num_inputs - 1]:
        num_inputs -= 1
    del node_proto.input[:], node_proto.output[:]
    node_proto.input.extend(t.name if t.present else "" for t in kernel.inputs[:num_inputs])
    node_proto.output.extend(t.name if t.present else "" for t in kernel.outputs)
    declared: set[str] = set()
    for position, (tensor, name) in enumerate(zip(kernel.inputs, node.reads, strict=True)):
        if not tensor.present or tensor.name in declared:
            continue
        declared.add(tensor.name)
        if position in kernel.constants:
            weight = kernel_model.graph.initializer.add()
            weight.CopyFrom(weights[name])
            weight.name = tensor.name
        else:
            shape = None if list_subgraphs(node_proto) else tensor.shape
            kernel_model.graph.input.append(
                onnx.helper.make_tensor_value_info(
                    tensor.name, onnx_file.get_element_type(tensor.dtype), shape
                )
            )
    kernel_model.graph.output.extend(onnx.ValueInfoProto(name=t.name) for t in kernel.outputs if t.present)
    entry = kernel_model.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, json.dumps(kernel.model_dump(mode="json"), sort_keys=True)
    return kernel_model


def is_kernel_model(model: onnx.ModelProto) -> bool:
    """Return whether `extract` wrote the model."""
    return any(entry.key == METADATA_KEY for entry in model.metadata_props)


def read_kernel(path: Path | str, model: onnx.ModelProto | None = None) -> KernelSpec:
    """Read the kernel of an extracted model.

    Args:
        path: File of the model.
        model: Content of the file, if it was loaded before.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not an extracted kernel.
    """
    model = onnx_file.load_model(path) if model is None else model
    record = next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), None)
    if record is None:
        raise FileFormatError(f"{path} is not a kernel from `latency extract`: it lacks the kernel record")
    try:
        return parse_kernel(parse_json(record), path)
    except ValueError as error:
        raise FileFormatError(f"{path} contains a damaged kernel record: {error}") from error


def make_dummy_inputs(path: Path | str, seed: int = 0) -> dict[str, np.ndarray]:
    """Create inputs for an extracted kernel: recorded values, random ones for the rest.

    Args:
        path: Model of the kernel.
        seed: Random seed.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not an extracted kernel, or the recorded values do not fit it.
    """
    model = onnx_file.load_model(path)
    positive = any(node.op_type in _POSITIVE_INPUT_OPS for node in model.graph.node)
    return next(read_inputs(path, model).iter_draws(seed, positive=positive))


def read_inputs(
    path: Path | str,
    model: onnx.ModelProto,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    values: Mapping[str, Any] | None = None,
) -> ModelInputs:
    """Return the inputs of a model or of an extracted kernel, which has recorded shapes and values.

    Args:
        path: File of the model.
        model: Content of the file.
        shapes: Input -> shape, for inputs with open dimensions.
        values: Input -> value, as `inputs.read_value` takes it.

    Raises:
        InputError, ModelError: As `inputs.resolve_inputs`.
        FileFormatError: The record of the kernel is damaged, or the recorded values do not fit it.
    """
    if not is_kernel_model(model):
        return resolve_inputs(model, shapes, values)
    tensors = {tensor.name: tensor for tensor in read_kernel(path, model).inputs}
    infos = onnx_file.list_inputs(model)
    if any(info.name not in tensors for info in infos):
        raise FileFormatError(f"the inputs of {path} are not those of its kernel; extract the kernel again")
    recorded = resolve_inputs(model, {info.name: tensors[info.name].shape for info in infos})
    return replace(recorded, values=load_values(Path(path).with_suffix(".npz"), recorded.specs), control={})


class _GraphRunner:
    """Runs a graph and single nodes of it, and fetches intermediate tensors."""

    def __init__(
        self, model: onnx.ModelProto, graph: Graph, provider: str, seed: int, threads: int | None
    ) -> None:
        self.model = model
        self.weights = {weight.name: weight for weight in model.graph.initializer}
        self._provider, self._threads = provider, threads
        specs = {spec.name: spec for spec in graph.inputs}
        recorded = load_values(Path(graph.optimized_path or "").with_name(INPUTS_FILE), graph.inputs)
        self._inputs = ModelInputs(specs=graph.inputs, values=recorded, control=find_control(model, specs))
        self._outputs = [value.name for value in model.graph.output]
        self._seed = seed
        self._written = {name for node in graph.nodes for name in node.writes}
        self._max_node_bytes = max((n.kernel.bytes_moved for n in graph.nodes), default=0.0)

    def run(
        self, model: onnx.ModelProto, outputs: Sequence[str], feeds: Mapping[str, np.ndarray]
    ) -> list[np.ndarray]:
        """Run a model without optimization and return the outputs."""
        # With TF32 in one of them, two convolutions differ by more than the tolerance.
        options = session.make_provider_options(self._provider, use_tf32="0")
        runtime_session = session.open_session(
            model.SerializeToString(),
            self._provider,
            "disable",
            threads=self._threads,
            provider_options=options,
        )
        return session.run(runtime_session, outputs, feeds)

    @cached_property
    def _feeds(self) -> dict[str, np.ndarray]:
        """Values of the graph's inputs with which it runs."""
        if not self._inputs.free_control:
            return next(self._inputs.iter_draws(self._seed))
        return self._inputs.find_feeds(lambda feeds: self.run(self.model, self._outputs, feeds), self._seed)[
            0
        ]

    def fetch(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Run the graph once and return the named tensors; graph inputs are returned as fed."""
        unique_names = list(dict.fromkeys(names))
        written = [name for name in unique_names if name in self._written]
        tensors = {name: self._feeds[name] for name in unique_names if name in self._feeds}
        if written:
            values = self.run(expose_tensors(self.model, written), written, self._feeds)
            tensors.update(zip(written, values, strict=True))
        return tensors

    def iter_node_tensors(
        self, chunk: list[tuple[int, Node]]
    ) -> Iterator[tuple[int, Node, dict[str, np.ndarray] | str]]:
        """Yield each node of a chunk with the tensors that it reads and writes, or with an error message."""
        required_bytes = (
            sum(_count_activation_bytes(node.kernel) for _, node in chunk) + 2 * self._max_node_bytes
        )
        free_bytes = _read_free_bytes()
        problem, tensors = None, {}
        if free_bytes is not None and required_bytes > free_bytes:
            problem = (
                f"the check requires about {required_bytes / 1e9:.1f} GB of memory, "
                f"{free_bytes / 1e9:.1f} GB are free"
            )
        else:
            try:
                tensors = self.fetch([name for _, node in chunk for name in _list_node_tensors(node)])
            except (RunError, MemoryError) as error:
                problem = str(error) or "memory ran out"
        for index, node in chunk:
            if problem is not None:
                yield index, node, problem
            else:
                yield index, node, {name: tensors[name] for name in _list_node_tensors(node)}


def compute_relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest expected magnitude; infinity if shapes differ."""
    import numpy as np

    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if expected.dtype.kind not in "fcV":
        return 0.0 if np.array_equal(actual, expected) else float("inf")
    dtype = np.complex128 if expected.dtype.kind == "c" else np.float64
    actual_values, expected_values = actual.astype(dtype), expected.astype(dtype)
    finite = np.isfinite(expected_values)
    if (
        not np.array_equal(actual_values[~finite], expected_values[~finite], equal_nan=True)
        or not np.isfinite(actual_values[finite]).all()
    ):
        return float("inf")
    scale = float(np.abs(expected_values[finite]).max(initial=0.0))
    difference = float(np.abs(actual_values[finite] - expected_values[finite]).max(initial=0.0))
    return difference / scale if scale else difference


def _open_target(
    target: Path | str | Graph,
    out_dir: Path,
    provider: str | None,
    kernel_ids: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]] | None,
    inputs: Mapping[str, Any] | None,
) -> tuple[Graph, onnx.ModelProto, set[str]]:
    selected_ids = set(kernel_ids)
    is_model = not isinstance(target, Graph) and onnx_file.check_path(target).suffix == ".onnx"
    if not is_model and (shapes or inputs):
        raise InputError(
            "the graph was analyzed with fixed shapes and values; analyze the model again for other ones"
        )
    if isinstance(target, Graph):
        graph = target
    else:
        path = onnx_file.check_path(target)
        if is_model:
            graph = analyze(path, provider or "cpu", shapes=shapes, inputs=inputs, out_dir=out_dir)
        elif path.suffix == ".json" and path.parent.name == KERNELS_FOLDER and path.is_file():
            graph = Graph.load(path.parent.parent / GRAPH_FILE)
            selected_ids |= {parse_kernel(read_json(path), path).id}
        else:
            graph = Graph.load(path)
    missing = sorted(selected_ids - {kernel.id for kernel in graph.kernels})
    if missing:
        raise InputError(f"the graph has no kernel {', '.join(missing)}; `latency analyze --json` lists them")
    if graph.optimized_path is None:
        raise InputError(
            "the graph was analyzed without an output directory, so its weights were not saved; analyze "
            "with `out_dir`"
        )
    model = onnx_file.load_model(graph.optimized_path)
    same_nodes = [node.op_type for node in model.graph.node] == [node.kernel.node_op for node in graph.nodes]
    if not same_nodes:
        raise FileFormatError(
            f"{graph.optimized_path} is not the analyzed graph; analyze {graph.model_path} again"
        )
    return graph, model, selected_ids


def _write_kernel(graph_runner: _GraphRunner, index: int, node: Node, folder: Path) -> ExtractionResult:
    kernel = node.kernel
    path = folder / f"{kernel.file_stem}.onnx"
    if kernel.opaque_tensors:
        reason = f"{', '.join(kernel.opaque_tensors)} of `{node.name}` is not a tensor"
        return ExtractionResult(kernel_id=kernel.id, op=kernel.op, path=None, nodes=1, skipped=reason)
    try:
        kernel_model = make_kernel_model(graph_runner.model, graph_runner.weights, index, node)
        content = onnx_file.serialize(kernel_model, kernel.id)
    except SparseFlowError as error:
        return ExtractionResult(kernel_id=kernel.id, op=kernel.op, path=None, nodes=1, problem=str(error))
    write_atomic(path, content)
    write_json(path.with_suffix(".json"), kernel.model_dump(mode="json"), indent=1)
    return ExtractionResult(kernel_id=kernel.id, op=kernel.op, path=path, nodes=1)


def _save_control_inputs(graph_runner: _GraphRunner, selected: list[tuple[int, Node]], folder: Path) -> None:
    """Save the inputs that select the computation of each kernel's first node, as inside the graph."""
    first_nodes = {node.kernel.file_stem: node for _, node in reversed(selected)}
    sources = {
        stem: [
            (tensor.name, name)
            for position, (tensor, name) in enumerate(zip(node.kernel.inputs, node.reads, strict=True))
            if tensor.present
            and position not in node.kernel.constants
            and selects_computation(node.kernel.node_op, position, tensor.dtype)
        ]
        for stem, node in first_nodes.items()
    }
    names = [name for pairs in sources.values() for _, name in pairs]
    tensors = graph_runner.fetch(names) if names else {}
    for stem, pairs in sources.items():
        save_values(folder / f"{stem}.npz", {name: tensors[source] for name, source in pairs})


def _compare_node(
    result: ExtractionResult,
    graph_runner: _GraphRunner,
    index: int,
    node: Node,
    tensors: Mapping[str, np.ndarray] | str,
) -> ExtractionResult:
    if result.path is None:
        return result
    if isinstance(tensors, str):
        return replace(result, problem=result.problem or tensors)
    kernel = node.kernel
    feeds = {
        tensor.name: tensors[name]
        for position, (tensor, name) in enumerate(zip(kernel.inputs, node.reads, strict=True))
        if tensor.present and position not in kernel.constants
    }
    outputs = [tensor.name for tensor in kernel.outputs if tensor.present]
    try:
        kernel_model = make_kernel_model(graph_runner.model, graph_runner.weights, index, node)
        actual = graph_runner.run(kernel_model, outputs, feeds)
        max_error = max(
            (
                compute_relative_error(value, tensors[name])
                for value, name in zip(actual, node.writes, strict=True)
            ),
            default=0.0,
        )
    except SparseFlowError as error:
        return replace(result, checked=result.checked + 1, problem=f"node `{node.name}`: {error}")
    except MemoryError:
        # Unchecked, as a node whose tensors do not fit in memory.
        return replace(result, problem=result.problem or f"node `{node.name}`: the check ran out of memory")
    matches = max_error <= TOLERANCE
    return replace(
        result,
        checked=result.checked + 1,
        matched=result.matched + matches,
        relative_error=max(max_error, result.relative_error or 0.0),
        problem=result.problem
        if matches
        else f"node `{node.name}` differs from the tensor inside the graph by {max_error:.2e} of its scale",
    )


def _list_node_tensors(node: Node) -> list[str]:
    """List the tensors that a node reads, without weights, and writes."""
    reads = [
        name for position, name in enumerate(node.reads) if name and position not in node.kernel.constants
    ]
    return [*reads, *node.writes]


def _split_into_chunks(selected: list[tuple[int, Node]]) -> Iterator[list[tuple[int, Node]]]:
    chunk: list[tuple[int, Node]] = []
    chunk_bytes = 0
    for index, node in selected:
        size = _count_activation_bytes(node.kernel)
        if chunk and chunk_bytes + size > CHUNK_BYTES:
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append((index, node))
        chunk_bytes += size
    if chunk:
        yield chunk


def _count_activation_bytes(kernel: KernelSpec) -> int:
    return sum(t.bytes for t in (*kernel.inputs, *kernel.outputs)) - kernel.constant_bytes


def _read_free_bytes() -> float | None:
    """Return the available memory in bytes; None if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        limit = float((group / "memory.max").read_text())
        free = min(free, limit - float((group / "memory.current").read_text()))
    except (OSError, ValueError):
        return free  # no limit ("max"), or no cgroups
    return free
