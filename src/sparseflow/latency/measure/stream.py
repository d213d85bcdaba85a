"""Device and host time of a kernel within a stream of kernels.

A GPU executes kernels asynchronously while the host issues more. The latency of an isolated kernel is mostly
the call, the launch and the wait for completion. Therefore one graph is run with a *blocking kernel*, a
matrix product that keeps the device busy for some milliseconds, followed by copies of the kernel's node. The
host issues all copies while the blocking kernel runs; the device then executes them without gaps::

    device = (run until the device has finished  -  run of the blocking kernel only) / copies
    host   = (call without waiting for the device  -  call of the blocking kernel only) / copies
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
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.extraction import is_kernel_model
from sparseflow.latency.measure.runner import bind_io, copy_to_device

if TYPE_CHECKING:
    import onnx

MIN_COPIES = 4
"""Minimum number of copies; with fewer, the variance of the blocking kernel dominates."""

NUM_RUN_PAIRS = 12
"""Number of alternating runs with and without copies."""

NUM_ISSUE_PAIRS = 6
"""Number of alternating calls that do not wait for the device."""

_MIN_BLOCKER_MS = 2.0
_MIN_MATRIX_SIZE, _MAX_MATRIX_SIZE = 256, 16384
_MAX_ISSUE_SHARE = 0.8
"""Maximum share of the blocking kernel's time in which the host must have issued everything."""

_MAX_COPIES_MS = 20.0
"""Target limit for one execution of all copies."""

_MAX_SETUP_MS = 500.0
"""Target limit for the setup in the first run of all copies."""

_FLOAT = 1
_OPERAND, _PRODUCT = "sparseflow_operand", "sparseflow_product"


@dataclass(frozen=True, kw_only=True)
class StreamTiming:
    """Times of one kernel in a stream.

    Attributes:
        copies: Number of copies behind the blocking kernel.
        device_ms: Device time of one copy.
        host_ms: Host time to issue one copy.
        overtaken: Whether the device finished the blocking kernel before the host had issued all copies, for
            example because the kernel synchronizes; then the two times are not separated.
        run_ms: Runs with the copies, until the device has finished.
        blocker_ms: Runs of the blocking kernel only, alternating with `run_ms`.
        issue_ms: Calls with the copies that do not wait for the device.
        blocker_issue_ms: Calls of the blocking kernel only, alternating with `issue_ms`.
    """

    copies: int
    device_ms: float
    host_ms: float
    overtaken: bool
    run_ms: tuple[float, ...]
    blocker_ms: tuple[float, ...]
    issue_ms: tuple[float, ...]
    blocker_issue_ms: tuple[float, ...]

    def to_row(self) -> dict[str, Any]:
        """Convert to columns of a collection's row, including every sample."""
        samples = {
            "stream_ns": self.run_ms,
            "plug_ns": self.blocker_ms,
            "issue_ns": self.issue_ms,
            "plug_issue_ns": self.blocker_issue_ms,
        }
        return {
            "copies": self.copies,
            "device_ms": self.device_ms,
            "host_ms": self.host_ms,
            "overtaken": self.overtaken,
            **{name: [round(value * 1e6) for value in values] for name, values in samples.items()},
        }


class BlockingKernel:
    """A matrix product that keeps a device busy while the host issues other kernels.

    Args:
        provider: `"cpu"` or `"cuda"`. A CPU executes synchronously, so that the times are not meaningful
            there.
        gpu: Index of the GPU.
        threads: Threads within an operator.
        conv_search: `cudnn_conv_algo_search` of the CUDA provider.

    Raises:
        DeviceError: The provider is not available.
        RunError: The device's memory cannot hold the operands.
    """

    def __init__(
        self, provider: str, *, gpu: int = 0, threads: int | None = None, conv_search: str = "EXHAUSTIVE"
    ) -> None:
        import numpy as np

        self._provider, self._threads = provider, threads
        self._options = session.make_provider_options(provider, gpu, cudnn_conv_algo_search=conv_search)
        self._memory_device = session.get_memory_device(provider, gpu)
        generator = np.random.default_rng(0)
        size = _MIN_MATRIX_SIZE
        while True:
            values = generator.random((size, size), dtype=np.float32)
            with session.translate_run_errors(f"the blocking kernel on {self._memory_device[0]}"):
                self._operand = copy_to_device(values, *self._memory_device, _FLOAT)
            self.size = size
            self.session = self.open_session(self.make_model([]), {})
            self.session.measure_run_ms()
            if (
                size * 3 // 2 > _MAX_MATRIX_SIZE
                or min(self.session.measure_run_ms() for _ in range(5)) >= _MIN_BLOCKER_MS
            ):
                break
            size = size * 3 // 2

    def make_model(
        self, nodes: list[onnx.NodeProto], base_model: onnx.ModelProto | None = None
    ) -> onnx.ModelProto:
        """Build a model of the blocking kernel followed by other nodes.

        Args:
            nodes: Nodes to run behind it, in any order.
            base_model: Model that provides their inputs, weights and opsets.
        """
        onnx = require("onnx", "latency")
        stream_model = onnx.ModelProto(ir_version=8, producer_name="sparseflow")
        if base_model is None:
            stream_model.opset_import.append(onnx.helper.make_opsetid("", 17))
            stream_model.graph.name = "plug"
        else:
            stream_model.CopyFrom(base_model)
            del stream_model.graph.node[:]
        stream_model.graph.node.extend(nodes)
        # Of the nodes without inputs from other nodes, onnxruntime executes the last one first.
        stream_model.graph.node.append(
            onnx.helper.make_node("MatMul", [_OPERAND, _OPERAND], [_PRODUCT], name="plug")
        )
        stream_model.graph.input.append(
            onnx.helper.make_tensor_value_info(_OPERAND, _FLOAT, (self.size, self.size))
        )
        if base_model is None:
            stream_model.graph.output.append(onnx.ValueInfoProto(name=_PRODUCT))
        return stream_model

    def open_session(self, model: onnx.ModelProto, inputs: Mapping[str, Any]) -> BoundSession:
        """Open a session of a model with the blocking kernel and bind its inputs."""
        runtime_session = session.open_session(
            onnx_file.serialize(model, model.graph.name),
            self._provider,
            "disable",
            threads=self._threads,
            provider_options=self._options,
        )
        return BoundSession(runtime_session, {**inputs, _OPERAND: self._operand}, self._memory_device)


class BoundSession:
    """A session with inputs and outputs on the device.

    Args:
        runtime_session: Session of onnxruntime.
        inputs: Name -> tensor on the device.
        memory_device: Type and index of the device.
    """

    def __init__(
        self, runtime_session: Any, inputs: Mapping[str, Any], memory_device: tuple[str, int]
    ) -> None:
        ort = require("onnxruntime", "latency")
        self._session, self._inputs = runtime_session, dict(inputs)
        self._binding = bind_io(runtime_session, self._inputs, *memory_device)
        self._async_options = ort.RunOptions()
        self._async_options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def measure_run_ms(self) -> float:
        """Run once until the device has finished; return milliseconds."""
        start_ns = time.perf_counter_ns()
        self._session.run_with_iobinding(self._binding)
        self._binding.synchronize_outputs()
        return (time.perf_counter_ns() - start_ns) / 1e6

    def measure_issue_ms(self) -> float:
        """Run once until the call returns without waiting for the device; return milliseconds."""
        start_ns = time.perf_counter_ns()
        self._session.run_with_iobinding(self._binding, self._async_options)
        elapsed_ms = (time.perf_counter_ns() - start_ns) / 1e6
        self._binding.synchronize_outputs()
        return elapsed_ms


def copy_node(model: onnx.ModelProto, num_copies: int) -> list[onnx.NodeProto]:
    """Copy a kernel model's node several times, with the same inputs and distinct outputs."""
    node = model.graph.node[0]
    nodes = []
    for index in range(num_copies):
        copy = type(node)()
        copy.CopyFrom(node)
        copy.name = f"copy_{index}"
        del copy.output[:]
        copy.output.extend(_name_copy(name, index) for name in node.output)
        nodes.append(copy)
    return nodes


def measure_stream(
    path: Path | str,
    blocker: BlockingKernel,
    *,
    inputs: Mapping[str, Any],
    copies: int,
    isolated_ms: float,
    setup_ms: float = 0.0,
) -> StreamTiming:
    """Measure one kernel in a stream.

    Args:
        path: Extracted kernel.
        blocker: Blocking kernel.
        inputs: Name -> tensor on the device, for every input.
        copies: Number of copies; reduced to at least `MIN_COPIES` if they would take too long.
        isolated_ms: Latency of an isolated run.
        setup_ms: Additional time of the first run, such as cuDNN's search; every copy has its own.

    Raises:
        InputError, FileFormatError: The file is missing or not an extracted kernel.
        ModelError, RunError: onnxruntime cannot run the copies.
    """
    file = Path(path)
    model = onnx_file.load_model(file)
    if not is_kernel_model(model):
        raise FileFormatError(f"{file} is not a kernel from `latency extract`: it lacks the kernel record")
    max_copies = min(_MAX_COPIES_MS / max(isolated_ms, 1e-6), _MAX_SETUP_MS / max(setup_ms, 1e-6))
    num_copies = max(min(copies, int(max_copies)), MIN_COPIES)
    with session.translate_run_errors(f"{file} on the device"):
        while True:
            stream = _open_stream(blocker, model, inputs, num_copies)
            warmup_runs = [
                (stream.measure_run_ms(), stream.measure_issue_ms(), blocker.session.measure_run_ms())
                for _ in range(3)
            ]
            overtaken = min(w[1] for w in warmup_runs) >= _MAX_ISSUE_SHARE * min(w[2] for w in warmup_runs)
            if num_copies <= MIN_COPIES or not overtaken:
                break
            num_copies = max(num_copies // 2, MIN_COPIES)
        runs = [(stream.measure_run_ms(), blocker.session.measure_run_ms()) for _ in range(NUM_RUN_PAIRS)]
        issues = [
            (stream.measure_issue_ms(), blocker.session.measure_issue_ms()) for _ in range(NUM_ISSUE_PAIRS)
        ]
    return StreamTiming(
        copies=num_copies,
        device_ms=max(statistics.median(a - b for a, b in runs) / num_copies, 0.0),
        # Disturbances only increase the host's time.
        host_ms=max((min(a for a, _ in issues) - min(b for _, b in issues)) / num_copies, 0.0),
        overtaken=overtaken,
        run_ms=tuple(a for a, _ in runs),
        blocker_ms=tuple(b for _, b in runs),
        issue_ms=tuple(a for a, _ in issues),
        blocker_issue_ms=tuple(b for _, b in issues),
    )


def _open_stream(
    blocker: BlockingKernel, model: onnx.ModelProto, inputs: Mapping[str, Any], num_copies: int
) -> BoundSession:
    stream_model = blocker.make_model(copy_node(model, num_copies), model)
    names = [output.name for output in stream_model.graph.output]
    del stream_model.graph.output[:]
    # Memory of the other outputs is freed immediately, as inside a graph.
    stream_model.graph.output.extend(type(model.graph.output[0])(name=_name_copy(name, 0)) for name in names)
    return blocker.open_session(stream_model, inputs)


def _name_copy(name: str, index: int) -> str:
    return f"{name}__{index}" if name else ""
