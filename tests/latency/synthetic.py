"""A made-up device whose latencies follow a known rule, and collections of it: no kernel is run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from sparseflow.latency import work
from sparseflow.latency.campaign import Config, Item
from sparseflow.latency.collect import collect
from sparseflow.latency.compose import VIEWS
from sparseflow.latency.extract import extract, read_kernel
from sparseflow.latency.graph import Graph, Node, analyze
from sparseflow.latency.kernels import Kernel, Tensor
from tests.latency.onnx_models import convnet, save

LAUNCH_MS = 0.01
FLOPS_PER_S = 1e8
BYTES_PER_S = 2e7
"""So slow that the small kernels of the tests take longer than their launch."""

COST_MS = 0.005
"""What a kernel takes less inside a graph than alone."""

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
) -> Kernel:
    """A kernel of these shapes, its work counted by the rules for its operator."""
    read = tuple(Tensor(name=f"input_{n}", dtype=dtype, shape=shape) for n, shape in enumerate(inputs))
    written = (Tensor(name="output_0", dtype=dtype, shape=output),)
    flops, known = work.flops(node_op, attributes, read, written)
    return Kernel(
        op=node_op, node_op=node_op, domain=domain, attributes=attributes, inputs=read, outputs=written,
        constants=constants, values=values or {}, flops=flops, flops_known=known,
        bytes_moved=work.bytes_moved(node_op, read, written),
    )  # fmt: skip


def make_matmul(rows: int, depth: int, columns: int) -> Kernel:
    """A product with weights."""
    return make_kernel("MatMul", [(rows, depth), (depth, columns)], (rows, columns), constants=(1,))


def make_graph(nodes: Mapping[str, tuple[Kernel, Sequence[str]]]) -> Graph:
    """A graph of name -> (kernel, names of the nodes that it reads from)."""
    return Graph(
        model_path="made-up.onnx", optimised_path=None, provider="CPUExecutionProvider", level="all",
        ort_version="1.0", opset_imports={"": 17}, inputs=(), outputs=(),
        nodes=tuple(
            Node(name=name, kernel=kernel, inputs=tuple(before), reads=tuple(before), writes=(name,))
            for name, (kernel, before) in nodes.items()
        ),
    )  # fmt: skip


def rest_ms(kernel: Kernel) -> float:
    """What a kernel takes alone at rest."""
    return LAUNCH_MS + 1e3 * (kernel.flops / FLOPS_PER_S + kernel.bytes_moved / BYTES_PER_S)


def slowdown(load: float) -> float:
    """While the load works, everything takes twice as long."""
    return 1.0 / (1.0 - load / 2.0)


@cache
def item_ms(path: str, model: bool, provider: str) -> float:
    """What a kernel's or a model's file takes at rest."""
    if not model:
        return rest_ms(read_kernel(path))
    return sum(rest_ms(node.kernel) - COST_MS for node in analyze(path, provider).nodes)


class SyntheticBench:
    """Instruments of the made-up device. Runs nothing; samples have noise from a fixed seed.

    Override `pace` for a machine that drifts, `fails` for items that cannot run.
    """

    def __init__(self, config: Config, device: Mapping[str, Any] | None = None) -> None:
        self.config = config
        self.device = {
            "kind": "cpu", "name": "Made Up", "cores": 2, "flags": ["avx2"], "compute_capability": None,
        } | dict(device or {})  # fmt: skip
        self.measured = 0
        self._random = random.Random(0)
        self._level = 0.0

    def pace(self, number: int) -> float:
        """How slow the machine is at its measurement of this number, 1 being usual."""
        return 1.0

    def fails(self, item: Item, level: float) -> bool:
        """Whether an item cannot be run beside a load of this level."""
        return False

    def environment(self) -> dict[str, Any]:
        return {"device_key": "made-up", "device": self.device, "onnxruntime": "1.0"}

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        self._level = level
        yield {"stress_alone": level, "before_others": level, "before_busy": level}

    def measure(self, item: Item) -> dict[str, Any]:
        number, self.measured = self.measured, self.measured + 1
        times = {"start_s": float(number), "end_s": number + 0.5}
        if self.fails(item, self._level):
            return times | {"error": "RunError: it fails"}
        rest = item_ms(item.path, item.flops is None, self.config.provider)
        mean = rest * slowdown(self._level) * self.pace(number)
        samples = [mean * self._random.gauss(1.0, NOISE) for _ in range(20)]
        ordered = sorted(samples)
        return times | {
            "error": None, "stress_achieved": self._level, "latency_ms": sum(samples) / len(samples),
            "p50_ms": ordered[10], "p95_ms": ordered[18],
            "samples_ns": [round(1e6 * value) for value in samples],
        }  # fmt: skip


def networks(folder: Path, count: int = 3) -> tuple[list[Path], list[Path]]:
    """Small networks of several widths, each at two sizes; gives (models, folders of their kernels)."""
    models, kernels = [], []
    for number in range(count):
        for size in (8, 12):
            name = f"net{number}_b1_{size}"
            built = convnet(width=4 * (number + 1), size=size, seed=number)
            models.append(save(built, folder / "models", f"{name}.onnx"))
            kernels.append(folder / "graphs" / name)
            extract(models[-1], kernels[-1], check=False, threads=1)
    return models, kernels


def collection(
    folder: Path,
    models: list[Path],
    kernels: list[Path],
    *,
    out: str = "collection",
    bench: type[SyntheticBench] = SyntheticBench,
    device: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A whole collection on the made-up device; gives its folder."""
    given: dict[str, Any] = {"levels": [0.0, 0.4, 0.8], "rounds": 2}
    config = Config(kernels=kernels, models=models, **(given | settings))
    collect(config, folder / out, instruments=bench(config, device))
    return folder / out


# In a stream: a device beside a host that issues what it works off.

DEVICE_FLOPS_PER_S = 2e10
DEVICE_BYTES_PER_S = 2e9
DEVICE_LAUNCH_MS = 0.002
"""So fast that a host is sometimes ahead of the device and sometimes behind."""

HOST_MS = 0.006
HOST_INPUT_MS = 0.001
"""What the host takes for a node in a stream, and for each of its inputs."""

ISSUE_SCALE = 1.2
CALL_MS = 0.02
"""Inside a graph the host takes longer for a node, and a call costs it something."""

STREAM_COPIES, STREAM_PAIRS, STREAM_ISSUES = 8, 12, 6
PLUG_MS = 2.0


def device_ms(kernel: Kernel) -> float:
    """What a kernel takes the device in a stream; of a view, what a copy takes."""
    return DEVICE_LAUNCH_MS + 1e3 * (
        kernel.flops / DEVICE_FLOPS_PER_S + kernel.bytes_moved / DEVICE_BYTES_PER_S
    )


def host_ms(kernel: Kernel) -> float:
    """What a kernel takes the host in a stream."""
    return HOST_MS + HOST_INPUT_MS * len(kernel.inputs)


def done_ms(host: Sequence[float], device: Sequence[float]) -> float:
    """When a device is done that works off, one after the other, what a host issues."""
    issued = done = 0.0
    for issue, works in zip(host, device, strict=True):
        issued += issue
        done = max(done, issued) + works
    return done


def queued_ms(graph: Graph) -> float:
    """What a graph takes as a queue of host and device."""
    return CALL_MS + done_ms(
        [ISSUE_SCALE * host_ms(node.kernel) for node in graph.nodes],
        [0.0 if node.kernel.node_op in VIEWS else device_ms(node.kernel) for node in graph.nodes],
    )


@cache
def streamed_item_ms(path: str, model: bool, provider: str) -> float:
    """What a kernel's or a model's file takes at rest, run alone on that device."""
    if not model:
        kernel = read_kernel(path)
        return CALL_MS + host_ms(kernel) + device_ms(kernel)
    return queued_ms(analyze(path, provider))


class StreamedBench(SyntheticBench):
    """Instruments of a device beside a host. At rest, kernels are measured in a stream as well.

    Override `in_stream` for kernels that are not, or whose times are others.
    """

    def in_stream(self, kernel: Kernel) -> tuple[float, float] | None:
        """The device's time for a kernel and the host's; None for one that is only run alone."""
        return device_ms(kernel), host_ms(kernel)

    def measure(self, item: Item) -> dict[str, Any]:
        row = super().measure(item)
        if row["error"] is not None:
            return row
        key = (item.path, item.flops is None, self.config.provider)
        scale = streamed_item_ms(*key) / item_ms(*key)
        row |= {name: scale * row[name] for name in ("latency_ms", "p50_ms", "p95_ms")}
        row["samples_ns"] = [round(scale * value) for value in row["samples_ns"]]
        found = None if item.flops is None or self._level else self.in_stream(read_kernel(item.path))
        return row if found is None else row | self._streamed(*found)

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
