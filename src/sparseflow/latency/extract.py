"""Kernels as models of their own: one node an ONNX file, checked against the tensors inside the whole graph.

::

    kernels/<id>.json   the kernel's record
    kernels/<id>.onnx   the node, its weights inside; run it with optimisation disabled
    kernels/<id>.npz    values seen inside the graph, of inputs that are integers (indices must stay in range)

The node keeps its operator, the runtime's own ones included, its attributes and the operator sets that the
graph imports. Outputs are declared by name only: no ONNX tool knows the types of a runtime's own operators.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError, RunError, SparseFlowError
from sparseflow.latency import onnx_file, session
from sparseflow.latency.graph import GRAPH_FILE, KERNELS_FOLDER, Graph, Node, analyze
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.optimised import draw, expose, random_inputs

if TYPE_CHECKING:
    import numpy as np
    import onnx

METADATA_KEY = "sparseflow.kernel"
TOLERANCE = 1e-4
"""Largest difference to the tensor inside the graph, relative to that tensor's largest magnitude."""

CHUNK_BYTES = 512 * 2**20
"""Tensors of the graph that are held at a time while nodes are checked."""

_POSITIVE = {"Sqrt", "Log", "Pow"}
"""Operators that give NaN for a negative number."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """What became of one kernel.

    Attributes:
        kernel_id: Its id.
        op: Its canonical name.
        path: Its model; None where it could not be written.
        nodes: Nodes of the graph that run it.
        checked: Nodes whose output was compared with the tensor inside the graph.
        matched: Those within the tolerance.
        relative_error: Largest difference seen, relative to the tensor's largest magnitude; None where
            nothing was checked.
        problem: What went wrong, None where nothing did.
    """

    kernel_id: str
    op: str
    path: Path | None
    nodes: int
    checked: int = 0
    matched: int = 0
    relative_error: float | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """It is there, and every node that was checked matches."""
        return self.path is not None and self.problem is None and self.matched == self.checked

    def to_dict(self) -> dict[str, Any]:
        """The outcome in JSON's types."""
        return {**asdict(self), "path": None if self.path is None else str(self.path), "ok": self.ok}


def extract(
    target: Path | str | Graph,
    out: Path | str,
    *,
    provider: str | None = None,
    check: bool = True,
    only: Sequence[str] = (),
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    seed: int = 0,
    threads: int | None = None,
    progress: Progress | None = None,
) -> list[Extracted]:
    """Write every kernel of a graph as a model of its own.

    Args:
        target: A graph, its `graph.json` or folder, one kernel's record beside it, or an ONNX file, which is
            analysed into `out` first.
        out: Folder that gets `kernels/`.
        provider: Where to analyse an ONNX file and to run; by default a graph's own, or the CPU.
        check: Compare each node's output with the tensor inside the whole graph.
        only: Ids of kernels to extract; by default all.
        shapes: Input -> shape, for an ONNX file whose inputs leave extents open.
        seed: What the graph's inputs are drawn from.
        threads: Threads within an operator while checking.
        progress: Called with (kernel, nodes done, nodes in all).

    Raises:
        InputError: `target` or a kernel of `only` is not there.
        FileFormatError: A file is not what its name promises.
        ModelError, DeviceError: As `analyze`.
    """
    graph, model, wanted = _opened(target, Path(out), provider, only, shapes)
    place = session.provider_name(provider or graph.provider)
    chosen = [
        (index, node) for index, node in enumerate(graph.nodes) if not wanted or node.kernel_id in wanted
    ]
    folder = Path(out) / KERNELS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    weights = {weight.name: weight for weight in model.graph.initializer}
    results: dict[str, Extracted] = {}
    for index, node in chosen:
        found = results.get(node.kernel_id)
        if found is None:
            results[node.kernel_id] = _write(model, weights, index, node, folder)
        else:
            results[node.kernel_id] = replace(found, nodes=found.nodes + 1)
    feeds = random_inputs(model, seed)
    whole = _Whole(model, graph, place, feeds, threads)
    _record_integers(whole, chosen, folder)
    if check:
        done = 0
        for chunk in _chunks(chosen):
            for index, node, seen in whole.tensors(chunk):
                results[node.kernel_id] = _compared(
                    results[node.kernel_id], model, weights, index, node, seen, place, threads
                )
                done += 1
                if progress is not None:
                    progress(node.kernel_id, done, len(chosen))
    return list(results.values())


def one_node(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], index: int, node: Node
) -> onnx.ModelProto:
    """One node of an optimised graph as a model.

    Args:
        model: The optimised graph.
        weights: Its initialisers by name.
        index: Where the node stands in it.
        node: The same node as analysed.
    """
    onnx = require("onnx", "latency")
    kernel = node.kernel
    alone = onnx.ModelProto(ir_version=model.ir_version, producer_name="sparseflow")
    alone.opset_import.extend(model.opset_import)
    alone.graph.name = kernel.id
    copy = alone.graph.node.add()
    copy.CopyFrom(model.graph.node[index])
    copy.name, copy.doc_string = kernel.op, ""
    own = len(copy.input)
    while own and not copy.input[own - 1]:
        own -= 1
    del copy.input[:], copy.output[:]
    copy.input.extend(t.name if t.present else "" for t in kernel.inputs[:own])
    copy.output.extend(t.name if t.present else "" for t in kernel.outputs)
    declared: set[str] = set()
    for position, (tensor, name) in enumerate(zip(kernel.inputs, node.reads, strict=True)):
        if not tensor.present or tensor.name in declared:
            continue
        declared.add(tensor.name)
        if position in kernel.constants:
            weight = alone.graph.initializer.add()
            weight.CopyFrom(weights[name])
            weight.name = tensor.name
        else:
            alone.graph.input.append(
                onnx.helper.make_tensor_value_info(
                    tensor.name, onnx_file.element_type(tensor.dtype), tensor.shape
                )
            )
    alone.graph.output.extend(onnx.ValueInfoProto(name=t.name) for t in kernel.outputs if t.present)
    entry = alone.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, json.dumps(kernel.to_dict(), sort_keys=True)
    return alone


def is_kernel(model: onnx.ModelProto) -> bool:
    """Whether a model is one that `extract` wrote."""
    return any(entry.key == METADATA_KEY for entry in model.metadata_props)


def read_kernel(path: Path | str) -> Kernel:
    """The kernel that an extracted model holds.

    Raises:
        InputError: There is no such file.
        FileFormatError: It is not an extracted kernel.
    """
    model = onnx_file.load(path)
    for entry in model.metadata_props:
        if entry.key == METADATA_KEY:
            try:
                return Kernel.from_dict(json.loads(entry.value))
            except ValueError as error:
                raise FileFormatError(f"{path} holds a damaged kernel record: {error}") from error
    raise FileFormatError(f"{path} was not made by `latency extract`: it holds no kernel record")


def dummy_inputs(path: Path | str, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs for an extracted kernel: integers as seen inside the graph, the rest drawn from a seed.

    Args:
        path: The kernel's model, or any ONNX file of static shapes.
        seed: Drawn from.

    Raises:
        InputError: There is no such file, or it leaves extents open.
        FileFormatError: It is not ONNX, or the recorded values beside it do not fit it.
    """
    import numpy as np

    file = Path(path)
    model = onnx_file.load(file)
    onnx_file.fix_inputs(model, {})
    positive = any(node.op_type in _POSITIVE for node in model.graph.node)
    generator = np.random.default_rng(seed)
    feeds = {}
    for value in onnx_file.true_inputs(model):
        kind = value.type.tensor_type
        shape = tuple(dim.dim_value for dim in kind.shape.dim)
        feeds[value.name] = draw(generator, shape, onnx_file.dtype_name(kind.elem_type), positive=positive)
    recorded = file.with_suffix(".npz")
    if recorded.is_file():
        try:
            with np.load(recorded, allow_pickle=False) as stored:
                values = {name: stored[name] for name in stored.files}
        except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise FileFormatError(f"{recorded} is damaged: {error}; extract the kernel again") from error
        for name, value in values.items():
            if name not in feeds or value.shape != feeds[name].shape or value.dtype != feeds[name].dtype:
                raise FileFormatError(f"`{name}` in {recorded} does not fit {file}; extract the kernel again")
        feeds.update(values)
    return feeds


class _Whole:
    """The whole graph, from which tensors are taken while it runs."""

    def __init__(
        self,
        model: onnx.ModelProto,
        graph: Graph,
        provider: str,
        feeds: Mapping[str, np.ndarray],
        threads: int | None,
    ) -> None:
        self._model, self._feeds, self._provider, self._threads = model, feeds, provider, threads
        self._made = {name for node in graph.nodes for name in node.writes}
        self._largest = max((n.kernel.bytes_moved for n in graph.nodes), default=0.0)

    def take(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Tensors of the graph as they are in one run; an input of the graph is what was fed."""
        listed = list(dict.fromkeys(names))
        made = [name for name in listed if name in self._made]
        seen = {name: self._feeds[name] for name in listed if name in self._feeds}
        if made:
            opened = _session(expose(self._model, made).SerializeToString(), self._provider, self._threads)
            seen.update(zip(made, session.run(opened, made, self._feeds), strict=True))
        return seen

    def tensors(
        self, chunk: list[tuple[int, Node]]
    ) -> Iterator[tuple[int, Node, dict[str, np.ndarray] | str]]:
        """Each node of a chunk with the tensors around it, or with why there are none."""
        needed = sum(_activation_bytes(node.kernel) for _, node in chunk) + 2 * self._largest
        free = _free_bytes()
        problem, seen = None, {}
        if free is not None and needed > free:
            problem = (
                f"checking it takes about {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free"
            )
        else:
            try:
                seen = self.take([name for _, node in chunk for name in _around(node)])
            except (RunError, MemoryError) as error:
                problem = str(error) or "memory ran out"
        for index, node in chunk:
            if problem is not None:
                yield index, node, problem
            else:
                yield index, node, {name: seen[name] for name in _around(node)}


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference over the largest magnitude expected; infinite where the two cannot agree."""
    import numpy as np

    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if expected.dtype.kind not in "fcV":
        return 0.0 if np.array_equal(found, expected) else float("inf")
    kind = np.complex128 if expected.dtype.kind == "c" else np.float64
    a, b = found.astype(kind), expected.astype(kind)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or not np.isfinite(a[finite]).all():
        return float("inf")
    scale = float(np.abs(b[finite]).max(initial=0.0))
    difference = float(np.abs(a[finite] - b[finite]).max(initial=0.0))
    return difference / scale if scale else difference


def _opened(
    target: Path | str | Graph,
    out: Path,
    provider: str | None,
    only: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]] | None,
) -> tuple[Graph, onnx.ModelProto, set[str]]:
    wanted = set(only)
    if isinstance(target, Graph):
        graph = target
    else:
        path = Path(target)
        if path.suffix == ".onnx":
            graph = analyze(path, provider or "cpu", shapes=shapes, out=out)
        elif path.suffix == ".json" and path.parent.name == KERNELS_FOLDER and path.is_file():
            graph = Graph.load(path.parent.parent / GRAPH_FILE)
            wanted |= {path.stem}
        else:
            graph = Graph.load(path)
    absent = sorted(wanted - {kernel.id for kernel in graph.kernels})
    if absent:
        raise InputError(f"the graph has no kernel {', '.join(absent)}; `latency analyze --json` lists them")
    if graph.optimised_path is None:
        raise InputError(
            "the graph was analysed without a folder, so its weights were not kept; analyse with out="
        )
    model = onnx_file.load(graph.optimised_path)
    stands = [node.op_type for node in model.graph.node] == [node.kernel.node_op for node in graph.nodes]
    if not stands:
        raise FileFormatError(
            f"{graph.optimised_path} is not the graph that was analysed; analyse {graph.model_path} again"
        )
    return graph, model, wanted


def _write(
    model: onnx.ModelProto, weights: Mapping[str, onnx.TensorProto], index: int, node: Node, folder: Path
) -> Extracted:
    kernel = node.kernel
    path = folder / f"{kernel.id}.onnx"
    try:
        content = onnx_file.serialise(one_node(model, weights, index, node), kernel.id)
    except SparseFlowError as error:
        return Extracted(kernel_id=kernel.id, op=kernel.op, path=None, nodes=1, problem=str(error))
    write_atomic(path, content)
    write_atomic(path.with_suffix(".json"), json.dumps(kernel.to_dict(), indent=1) + "\n")
    return Extracted(kernel_id=kernel.id, op=kernel.op, path=path, nodes=1)


def _record_integers(whole: _Whole, chosen: list[tuple[int, Node]], folder: Path) -> None:
    """Keep what integer inputs were inside the graph, for each kernel at the first node that runs it."""
    import numpy as np

    first = {node.kernel_id: node for _, node in reversed(chosen)}
    wanted = {
        identity: [
            (tensor.name, name)
            for position, (tensor, name) in enumerate(zip(node.kernel.inputs, node.reads, strict=True))
            if position not in node.kernel.constants and tensor.dtype.startswith(("int", "uint", "bool"))
        ]
        for identity, node in first.items()
    }
    names = [name for pairs in wanted.values() for _, name in pairs]
    seen = whole.take(names) if names else {}
    for identity, pairs in wanted.items():
        path = folder / f"{identity}.npz"
        if pairs:
            content = io.BytesIO()
            named: Any = {name: seen[source] for name, source in pairs}
            np.savez_compressed(content, **named)
            write_atomic(path, content.getvalue())
        else:
            path.unlink(missing_ok=True)


def _compared(
    result: Extracted,
    model: onnx.ModelProto,
    weights: Mapping[str, onnx.TensorProto],
    index: int,
    node: Node,
    seen: Mapping[str, np.ndarray] | str,
    provider: str,
    threads: int | None,
) -> Extracted:
    if result.path is None:
        return result
    if isinstance(seen, str):
        return replace(result, problem=result.problem or seen)
    kernel = node.kernel
    feeds = {
        tensor.name: seen[name]
        for position, (tensor, name) in enumerate(zip(kernel.inputs, node.reads, strict=True))
        if tensor.present and position not in kernel.constants
    }
    outputs = [tensor.name for tensor in kernel.outputs if tensor.present]
    try:
        opened = _session(one_node(model, weights, index, node).SerializeToString(), provider, threads)
        found = session.run(opened, outputs, feeds)
    except SparseFlowError as error:
        return replace(result, checked=result.checked + 1, problem=f"node `{node.name}`: {error}")
    worst = max(
        (relative_error(value, seen[name]) for value, name in zip(found, node.writes, strict=True)),
        default=0.0,
    )
    matches = worst <= TOLERANCE
    return replace(
        result,
        checked=result.checked + 1,
        matched=result.matched + matches,
        relative_error=max(worst, result.relative_error or 0.0),
        problem=result.problem
        if matches
        else f"node `{node.name}` differs from the tensor inside the graph by {worst:.2e} of its scale",
    )


def _session(content: bytes, provider: str, threads: int | None) -> Any:
    # Two convolutions of one tensor differ by more than the tolerance where one of them rounds to TF32.
    options = {"use_tf32": "0"} if session.short_name(provider) == "cuda" else None
    return session.open_session(content, provider, "disable", threads=threads, provider_options=options)


def _around(node: Node) -> list[str]:
    """Tensors that a node reads, without weights, and writes."""
    reads = [
        name for position, name in enumerate(node.reads) if name and position not in node.kernel.constants
    ]
    return [*reads, *node.writes]


def _chunks(chosen: list[tuple[int, Node]]) -> Iterator[list[tuple[int, Node]]]:
    chunk: list[tuple[int, Node]] = []
    held = 0
    for index, node in chosen:
        size = _activation_bytes(node.kernel)
        if chunk and held + size > CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
        chunk.append((index, node))
        held += size
    if chunk:
        yield chunk


def _activation_bytes(kernel: Kernel) -> int:
    return sum(t.bytes for t in (*kernel.inputs, *kernel.outputs)) - kernel.constant_bytes


def _free_bytes() -> float | None:
    """Memory that can still be had, bytes; None where the system does not say."""
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
        return free  # no limit ("max"), or no control groups
    return free
