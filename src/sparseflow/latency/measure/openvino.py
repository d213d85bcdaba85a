"""OpenVINO as the runtime of models and kernels on a CPU.

It reads the same ONNX files as onnxruntime, including the fused operators of onnxruntime's extended level.
With one thread it runs in the calling thread.

OpenVINO stores activations in layouts of its own. An isolated kernel converts its input and its output, which
a kernel inside a graph does not, so the time of these conversions is measured and subtracted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import ModelError, RunError

if TYPE_CHECKING:
    import numpy as np

_POLL_MS = 100
_PROFILED_RUNS = 15
_LOCATION = re.compile(r"Exception from |Check '|FrontEnd API failed|To facilitate|Summary:")
"""Lines of a message that contain only places in the source of OpenVINO, or advice for its developers."""


class OpenVINOModel:
    """A compiled model with inputs, and the methods of an onnxruntime session and binding that `Runner` uses.

    Args:
        serialized: Content of an ONNX file.
        feeds: Input -> value.
        threads: Threads of an inference; None leaves the choice to OpenVINO.
        is_kernel: Whether the model is an isolated kernel.
        description: Name of the model in messages.

    Raises:
        MissingExtraError: openvino is not installed.
        ModelError: OpenVINO does not support the model or the type of an input.
    """

    def __init__(
        self,
        serialized: bytes,
        feeds: Mapping[str, np.ndarray],
        *,
        threads: int | None,
        is_kernel: bool,
        description: str,
    ) -> None:
        openvino = require("openvino", "openvino")
        options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1, "PERF_COUNT": is_kernel}
        if threads is not None:
            # Pinning would override the affinity of the process, which a load shares.
            options |= {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
        self._description, self._is_kernel = description, is_kernel
        try:
            core = openvino.Core()
            compiled = core.compile_model(core.read_model(serialized), "CPU", options)
            self._request = compiled.create_infer_request()
            # The compiled model lacks inputs that it does not read.
            names = {name for port in compiled.inputs for name in port.get_names()}
            for name in names & feeds.keys():
                self._request.set_tensor(name, openvino.Tensor(feeds[name]))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ModelError(f"OpenVINO does not support {description}: {_format_error(error)}") from error

    def run_with_iobinding(self, binding: object = None, options: Any = None) -> None:
        """Run once; `options`, if not None, are `RunOptions` that can end the run.

        Raises:
            RunError: OpenVINO failed, or the run was ended.
        """
        try:
            if options is None:
                self._request.infer(share_outputs=True)  # without copies
                return
            self._request.start_async()
            while not self._request.wait_for(_POLL_MS):
                if options.terminate:
                    self._request.cancel()
                    raise RunError(f"OpenVINO was stopped while it ran {self._description}")
        except RuntimeError as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"OpenVINO failed to run {self._description}: {_format_error(error)}") from error

    def measure_kernel_share(self) -> float:
        """Return the share of a run that a kernel takes inside a graph, without conversions of layouts."""
        if not self._is_kernel:
            return 1.0
        runs = [self._profile() for _ in range(_PROFILED_RUNS)]
        # Of each node the fastest run, since other work interrupts slower ones.
        nodes = [(entries[0][0], min(time_s for _, time_s in entries)) for entries in zip(*runs, strict=True)]
        kernel_s = sum(time_s for node_type, time_s in nodes if node_type != "Reorder")
        # The clock of OpenVINO counts microseconds.
        return kernel_s / sum(time_s for _, time_s in nodes) if kernel_s else 1.0

    def _profile(self) -> list[tuple[str, float]]:
        """Run once and return type and seconds of each executed node."""
        self._request.infer(share_outputs=True)
        return [(node.node_type, node.real_time.total_seconds()) for node in self._request.profiling_info]

    def synchronize_outputs(self) -> None:
        """Do nothing: a run on a CPU is complete when it returns."""

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """Return copies of the outputs."""
        return [tensor.data.copy() for tensor in self._request.output_tensors]


def _format_error(error: Exception) -> str:
    """Return the lines of an error of OpenVINO that say what is wrong."""
    lines = (line.strip() for line in str(error).splitlines())
    text = " ".join(line for line in lines if line and not _LOCATION.match(line))
    return text[:400] or type(error).__name__
