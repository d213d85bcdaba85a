"""What a kernel costs inside a stream of kernels: the device's time, and the host's that issues it.

A GPU works off what the host issues, and the two run at the same time. A kernel that is run alone tells
little of what it costs there: most of that is the call, the launch and the wait for its end. Instead one
graph is run that holds a *plug*, a product of matrices that keeps the device busy for some milliseconds, and
behind it copies of the kernel's node. The host issues all of them while the plug runs; then the device works
them off without a gap:

    device = (run until the device is done  -  that of the plug alone) / copies
    host   = (call, not waiting for the device  -  that of the plug alone) / copies
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError
from sparseflow.latency import onnx_file, session
from sparseflow.latency.extract import is_kernel
from sparseflow.latency.runner import bind, on_device, told

if TYPE_CHECKING:
    import onnx

FEWEST = 4
"""Copies at least: with fewer the scatter of the plug would show."""

PAIRS = 12
"""Runs with copies and runs without, in turn."""

ISSUES = 6
"""Likewise those that do not wait for the device."""

_PLUG_MS = 2.0
_SMALLEST_PLUG, _LARGEST_PLUG = 256, 16384
_OVERTAKEN = 0.8
"""The host must have issued everything in this part of the plug's time."""

_LONGEST_MS = 20.0
"""What the copies together should take at most, once."""

_SETUP_MS = 500.0
"""What their first run should take at most beside that."""

_FLOAT = 1
_OPERAND, _PRODUCT = "sparseflow_operand", "sparseflow_product"


@dataclass(frozen=True, kw_only=True)
class Streamed:
    """What one kernel costs in a stream.

    Attributes:
        copies: Nodes that were issued behind the plug.
        device_ms: The device's time for one, milliseconds; 0 where it is nothing to the device.
        host_ms: The host's time to issue one, milliseconds.
        overtaken: Whether the device was done with the plug before the host had issued them, as with a kernel
            that waits for the device itself: then the two times are not told apart.
        run_ms: Runs with the copies, until the device was done.
        plug_ms: Runs of the plug alone, each after one of those.
        issue_ms: Calls with the copies that did not wait for the device.
        plug_issue_ms: Likewise the plug alone.
    """

    copies: int
    device_ms: float
    host_ms: float
    overtaken: bool
    run_ms: tuple[float, ...]
    plug_ms: tuple[float, ...]
    issue_ms: tuple[float, ...]
    plug_issue_ms: tuple[float, ...]

    def to_row(self) -> dict[str, Any]:
        """Columns of a collection's row, every sample among them."""
        samples = {
            "stream_ns": self.run_ms,
            "plug_ns": self.plug_ms,
            "issue_ns": self.issue_ms,
            "plug_issue_ns": self.plug_issue_ms,
        }
        return {
            "copies": self.copies,
            "device_ms": self.device_ms,
            "host_ms": self.host_ms,
            "overtaken": self.overtaken,
            **{name: [round(value * 1e6) for value in values] for name, values in samples.items()},
        }


class Plug:
    """Work that keeps a device busy while the host issues what comes behind it.

    Args:
        provider: `"cpu"` or `"cuda"`; on a CPU, which works when it is called, the figures mean little.
        gpu: Number of the GPU.
        threads: Threads within an operator.
        conv_search: `cudnn_conv_algo_search` of the CUDA provider.

    Raises:
        DeviceError: The provider is not there.
        RunError: The device's memory does not hold the operands.
    """

    def __init__(
        self, provider: str, *, gpu: int = 0, threads: int | None = None, conv_search: str = "EXHAUSTIVE"
    ) -> None:
        import numpy as np

        self._provider, self._threads = provider, threads
        self._options = session.options_of(provider, gpu, cudnn_conv_algo_search=conv_search)
        self._place = session.place_of(provider, gpu)
        generator = np.random.default_rng(0)
        size = _SMALLEST_PLUG
        while True:
            values = generator.random((size, size), dtype=np.float32)
            with told(Path("the plug"), self._place[0]):
                self._operand = on_device(values, *self._place, _FLOAT)
            self.size = size
            self.alone = self.opened(self.model([]), {})
            self.alone.run_ms()
            if size * 3 // 2 > _LARGEST_PLUG or min(self.alone.run_ms() for _ in range(5)) >= _PLUG_MS:
                break
            size = size * 3 // 2

    def model(self, nodes: list[onnx.NodeProto], like: onnx.ModelProto | None = None) -> onnx.ModelProto:
        """The plug with nodes behind it.

        Args:
            nodes: What runs behind it, in any order.
            like: Whose inputs, weights and operator sets they use.
        """
        onnx = require("onnx", "latency")
        made = onnx.ModelProto(ir_version=8, producer_name="sparseflow")
        if like is None:
            made.opset_import.append(onnx.helper.make_opsetid("", 17))
            made.graph.name = "plug"
        else:
            made.CopyFrom(like)
            del made.graph.node[:]
        made.graph.node.extend(nodes)
        # onnxruntime begins with the last of the nodes that depend on nothing.
        made.graph.node.append(onnx.helper.make_node("MatMul", [_OPERAND, _OPERAND], [_PRODUCT], name="plug"))
        made.graph.input.append(onnx.helper.make_tensor_value_info(_OPERAND, _FLOAT, (self.size, self.size)))
        if like is None:
            made.graph.output.append(onnx.ValueInfoProto(name=_PRODUCT))
        return made

    def opened(self, model: onnx.ModelProto, inputs: Mapping[str, Any]) -> Bound:
        """A session of a model that holds the plug, bound to its inputs."""
        opened = session.open_session(
            onnx_file.serialise(model, model.graph.name),
            self._provider,
            "disable",
            threads=self._threads,
            provider_options=self._options,
        )
        return Bound(opened, {**inputs, _OPERAND: self._operand}, self._place)


class Bound:
    """A session whose inputs and outputs lie on the device.

    Args:
        opened: The session.
        inputs: Name -> tensor on the device.
        place: Kind and number of the device.
    """

    def __init__(self, opened: Any, inputs: Mapping[str, Any], place: tuple[str, int]) -> None:
        ort = require("onnxruntime", "latency")
        self._session, self._inputs = opened, dict(inputs)
        self._binding = bind(opened, self._inputs, *place)
        self._at_once = ort.RunOptions()
        self._at_once.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run_ms(self) -> float:
        """One run, until the device is done, milliseconds."""
        begin = time.perf_counter_ns()
        self._session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()
        return (time.perf_counter_ns() - begin) / 1e6

    def issue_ms(self) -> float:
        """One run, until the call returns without waiting for the device, milliseconds."""
        begin = time.perf_counter_ns()
        self._session.run_with_iobinding(self._binding, self._at_once)
        passed = (time.perf_counter_ns() - begin) / 1e6
        self._binding.synchronize_outputs()
        return passed


def copied(model: onnx.ModelProto, copies: int) -> list[onnx.NodeProto]:
    """Nodes that do what a kernel's one node does, from the same inputs to outputs of their own."""
    node = model.graph.node[0]
    made = []
    for number in range(copies):
        copy = type(node)()
        copy.CopyFrom(node)
        copy.name = f"copy_{number}"
        del copy.output[:]
        copy.output.extend(_copy_of(name, number) for name in node.output)
        made.append(copy)
    return made


def measure(
    path: Path | str,
    plug: Plug,
    *,
    inputs: Mapping[str, Any],
    copies: int,
    alone_ms: float,
    setup_ms: float = 0.0,
) -> Streamed:
    """Measure one kernel in a stream.

    Args:
        path: A kernel as `latency extract` writes it.
        plug: What runs before it.
        inputs: Name -> tensor on the device, for every input of it.
        copies: Nodes to issue; fewer where they would take long, `FEWEST` at least.
        alone_ms: What it takes alone.
        setup_ms: What its first run takes beside that, such as cuDNN's search; each copy has its own.

    Raises:
        InputError, FileFormatError: There is no such kernel.
        ModelError, RunError: onnxruntime does not take the copies.
    """
    file = Path(path)
    model = onnx_file.load(file)
    if not is_kernel(model):
        raise FileFormatError(f"{file} was not made by `latency extract`: it holds no kernel record")
    most = min(_LONGEST_MS / max(alone_ms, 1e-6), _SETUP_MS / max(setup_ms, 1e-6))
    count = max(min(copies, int(most)), FEWEST)
    with told(file, "the device"):
        while True:
            stream = _stream(plug, model, inputs, count)
            warm = [(stream.run_ms(), stream.issue_ms(), plug.alone.run_ms()) for _ in range(3)]
            overtaken = min(w[1] for w in warm) >= _OVERTAKEN * min(w[2] for w in warm)
            if count <= FEWEST or not overtaken:
                break
            count = max(count // 2, FEWEST)
        runs = [(stream.run_ms(), plug.alone.run_ms()) for _ in range(PAIRS)]
        issues = [(stream.issue_ms(), plug.alone.issue_ms()) for _ in range(ISSUES)]
    return Streamed(
        copies=count,
        device_ms=max(statistics.median(a - b for a, b in runs) / count, 0.0),
        # Whatever disturbs a host only makes it slower.
        host_ms=max((min(a for a, _ in issues) - min(b for _, b in issues)) / count, 0.0),
        overtaken=overtaken,
        run_ms=tuple(a for a, _ in runs),
        plug_ms=tuple(b for _, b in runs),
        issue_ms=tuple(a for a, _ in issues),
        plug_issue_ms=tuple(b for _, b in issues),
    )


def _stream(plug: Plug, model: onnx.ModelProto, inputs: Mapping[str, Any], copies: int) -> Bound:
    made = plug.model(copied(model, copies), model)
    names = [output.name for output in made.graph.output]
    del made.graph.output[:]
    # The others' memory is free again at once, as inside a graph.
    made.graph.output.extend(type(model.graph.output[0])(name=_copy_of(name, 0)) for name in names)
    return plug.opened(made, inputs)


def _copy_of(name: str, number: int) -> str:
    return f"{name}__{number}" if name else ""
