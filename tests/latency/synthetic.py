"""A synthetic device whose latencies follow a known rule, and its collections. No kernel is executed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sparseflow.latency.graph import work
from sparseflow.latency.graph.analysis import Graph, Node, analyze
from sparseflow.latency.graph.extraction import extract, read_kernel
from sparseflow.latency.graph.kernels import KernelSpec, TensorSpec
from sparseflow.latency.measure.collection import collect
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.plan import Target
from sparseflow.latency.model.composition import VIEW_OPS
from tests.latency.onnx_models import convnet, save

LAUNCH_MS = 0.01
FLOPS_PER_S = 1e8
BYTES_PER_S = 2e7
"""Low enough that the small kernels of the tests take longer than their launch."""

COST_MS = 0.005
"""Difference between the isolated latency of a kernel and that inside a graph."""

NOISE = 0.01


def make_kernel(
    node_op: str,
    inputs: Sequence[tuple[int, ...]],
    output: tuple[int, ...],
    *,
    constants: tuple[int, ...] = (),
    values: Mapping[int, tuple[int, ...]] | None = None,
    dtype: str = "float32",
    domain: str = "",
    **attributes: Any,
) -> KernelSpec:
    """Build a kernel of these shapes, with its work counted by the rules of its operator."""
    read = tuple(TensorSpec(name=f"input_{n}", dtype=dtype, shape=shape) for n, shape in enumerate(inputs))
    written = (TensorSpec(name="output_0", dtype=dtype, shape=output),)
    flops, known = work.count_flops(node_op, attributes, read, written)
    return KernelSpec(
        op=node_op, node_op=node_op, domain=domain, attributes=attributes, inputs=read, outputs=written,
        constants=constants, values=values or {}, flops=flops, flops_known=known,
        bytes_moved=work.count_bytes_moved(node_op, read, written),
    )  # fmt: skip


def make_matmul(rows: int, depth: int, columns: int) -> KernelSpec:
    """Build a matrix product with weights."""
    return make_kernel("MatMul", [(rows, depth), (depth, columns)], (rows, columns), constants=(1,))


def make_graph(nodes: Mapping[str, tuple[KernelSpec, Sequence[str]]]) -> Graph:
    """Build a graph from name -> (kernel, names of the nodes that it reads)."""
    return Graph(
        model_path="made-up.onnx", optimized_path=None, provider="CPUExecutionProvider", level="all",
        ort_version="1.0", opset_imports={"": 17}, inputs=(), outputs=(),
        nodes=tuple(
            Node(
                name=name,
                kernel=kernel,
                inputs=tuple(before),
                reads=tuple([*before, *(tensor.name for tensor in kernel.inputs)][: len(kernel.inputs)]),
                writes=(name,),
            )
            for name, (kernel, before) in nodes.items()
        ),
    )  # fmt: skip


def rest_ms(kernel: KernelSpec) -> float:
    """Return the isolated idle latency of a kernel."""
    return LAUNCH_MS + 1e3 * (kernel.flops / FLOPS_PER_S + kernel.bytes_moved / BYTES_PER_S)


def slowdown(load: float) -> float:
    """Return the slowdown; while the load is active, everything takes twice as long."""
    return 1.0 / (1.0 - load / 2.0)


@cache
def item_ms(path: str, model: bool, provider: str, shapes: tuple[Any, ...] = ()) -> float:
    """Return the idle latency of a file with a kernel or model, whose inputs have these shapes."""
    if not model:
        return rest_ms(read_kernel(path))
    graph = analyze(path, provider, shapes=dict(shapes))
    return sum(rest_ms(node.kernel) - COST_MS for node in graph.nodes)


class SyntheticBench:
    """Instruments of the synthetic device, with deterministic noise.

    Override `pace` for a machine with drift, `fails` for failing targets.
    """

    def __init__(self, config: CollectionConfig, device: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.device = {
            "kind": "cpu", "name": "Made Up", "cores": 2, "flags": ["avx2"], "compute_capability": None,
        } | dict(device or {})  # fmt: skip
        self.measured = 0
        self._random = random.Random(0)
        self._level = 0.0

    def pace(self, number: int) -> float:
        """Return the relative latency at the measurement with this number; 1 is normal."""
        return 1.0

    def fails(self, target: Target, level: float) -> bool:
        """Return whether a target fails at this level."""
        return False

    def environment(self) -> dict[str, Any]:
        return {"device_key": "made-up", "device": self.device, "onnxruntime": "1.0"}

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        self._level = level
        yield {"stress_alone": level, "before_others": level, "before_busy": level}

    def measure(self, target: Target) -> dict[str, Any]:
        number, self.measured = self.measured, self.measured + 1
        times = {"start_s": float(number), "end_s": number + 0.5}
        if self.fails(target, self._level):
            return times | {"error": "RunError: it fails"}
        shapes = tuple(target.shapes.items())
        idle_ms = item_ms(target.path, target.flops is None, self.config.provider, shapes)
        mean = idle_ms * slowdown(self._level) * self.pace(number)
        samples = [mean * self._random.gauss(1.0, NOISE) for _ in range(20)]
        ordered = sorted(samples)
        return times | {
            "error": None, "stress_achieved": self._level, "latency_ms": sum(samples) / len(samples),
            "p50_ms": ordered[10], "p95_ms": ordered[18],
            "samples_ns": [round(1e6 * value) for value in samples],
        }  # fmt: skip


def make_networks(folder: Path, count: int = 3) -> tuple[list[Path], list[Path]]:
    """Build networks of several widths at two sizes: (models, kernel directories)."""
    models, kernels = [], []
    for number in range(count):
        for size in (8, 12):
            name = f"net{number}_b1_{size}"
            built = convnet(width=4 * (number + 1), size=size, seed=number)
            models.append(save(built, folder / "models", f"{name}.onnx"))
            kernels.append(folder / "graphs" / name)
            extract(models[-1], kernels[-1], check=False, threads=1)
    return models, kernels


def make_collection(
    folder: Path,
    models: list[Path],
    kernels: list[Path],
    *,
    out: str = "collection",
    bench: type[SyntheticBench] = SyntheticBench,
    device: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """Collect on the synthetic device and return the directory."""
    defaults: dict[str, Any] = {"levels": [0.0, 0.4, 0.8], "rounds": 2}
    config = CollectionConfig(kernels=kernels, models=models, **(defaults | settings))
    collect(config, folder / out, instruments=bench(config, device))
    return folder / out


# Streams: a device that executes what a host issues.

DEVICE_FLOPS_PER_S = 2e10
DEVICE_BYTES_PER_S = 2e9
DEVICE_LAUNCH_MS = 0.002
"""Small enough that the host is sometimes ahead of the device and sometimes behind."""

HOST_MS = 0.006
HOST_INPUT_MS = 0.001
"""Host time per node in a stream, and per input."""

ISSUE_SCALE = 1.2
CALL_MS = 0.02
"""Additional host time per node inside a graph, and per call."""

STREAM_COPIES, STREAM_PAIRS, STREAM_ISSUES = 8, 12, 6
PLUG_MS = 2.0


def device_ms(kernel: KernelSpec) -> float:
    """Return the device time of a kernel in a stream; for a view, that of a copy."""
    return DEVICE_LAUNCH_MS + 1e3 * (
        kernel.flops / DEVICE_FLOPS_PER_S + kernel.bytes_moved / DEVICE_BYTES_PER_S
    )


def host_ms(kernel: KernelSpec) -> float:
    """Return the host time of a kernel in a stream."""
    return HOST_MS + HOST_INPUT_MS * len(kernel.inputs)


def compute_end_ms(host: Sequence[float], device: Sequence[float]) -> float:
    """Return the time at which a device has executed everything that a host issues."""
    issued = device_done_ms = 0.0
    for issue, works in zip(host, device, strict=True):
        issued += issue
        device_done_ms = max(device_done_ms, issued) + works
    return device_done_ms


def queued_ms(graph: Graph) -> float:
    """Return the latency of a graph as a queue of host and device."""
    return CALL_MS + compute_end_ms(
        [ISSUE_SCALE * host_ms(node.kernel) for node in graph.nodes],
        [0.0 if node.kernel.node_op in VIEW_OPS else device_ms(node.kernel) for node in graph.nodes],
    )


@cache
def streamed_item_ms(path: str, model: bool, provider: str) -> float:
    """Return the isolated idle latency of a file with a kernel or model."""
    if not model:
        kernel = read_kernel(path)
        return CALL_MS + host_ms(kernel) + device_ms(kernel)
    return queued_ms(analyze(path, provider))


class StreamedBench(SyntheticBench):
    """Instruments of a device with a host; idle kernels are measured in a stream as well.

    Override `in_stream` for kernels with other or no times.
    """

    def in_stream(self, kernel: KernelSpec) -> tuple[float, float] | None:
        """Return device and host time of a kernel; None if it is measured in isolation only."""
        return device_ms(kernel), host_ms(kernel)

    def measure(self, target: Target) -> dict[str, Any]:
        row = super().measure(target)
        if row["error"] is not None:
            return row
        key = (target.path, target.flops is None, self.config.provider)
        scale = streamed_item_ms(*key) / item_ms(*key)
        row |= {name: scale * row[name] for name in ("latency_ms", "p50_ms", "p95_ms")}
        row["samples_ns"] = [round(scale * value) for value in row["samples_ns"]]
        timing = None if target.flops is None or self._level else self.in_stream(read_kernel(target.path))
        return row if timing is None else row | self._streamed(*timing)

    def _streamed(self, device: float, host: float) -> dict[str, Any]:
        device, host = (ms * self._random.gauss(1.0, NOISE) for ms in (device, host))
        samples = {
            "stream_ns": (STREAM_PAIRS, PLUG_MS + STREAM_COPIES * device),
            "plug_ns": (STREAM_PAIRS, PLUG_MS),
            "issue_ns": (STREAM_ISSUES, CALL_MS + STREAM_COPIES * host),
            "plug_issue_ns": (STREAM_ISSUES, CALL_MS),
        }
        return {
            "copies": STREAM_COPIES, "device_ms": device, "host_ms": host,
            **{name: count * [round(1e6 * ms)] for name, (count, ms) in samples.items()},
        }  # fmt: skip
