"""Latency of one ONNX model on one device.

Inputs and outputs are bound to the device's memory (IOBinding), so that samples contain the model but no
copies from or to the host. A sample is the wall time from the call until the device has finished. The CPU
time of the calling thread is recorded as well: on a CPU, its ratio to the wall time shows how much of it was
waiting.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.checks import check_at_least, check_one_of
from sparseflow.core.extras import require
from sparseflow.core.metrics import quantile
from sparseflow.latency.graph import onnx_file, session
from sparseflow.latency.graph.extraction import is_kernel_model, make_dummy_inputs, read_inputs
from sparseflow.latency.graph.inputs import fix_shapes, open_session
from sparseflow.latency.measure.openvino import OpenVINOModel

if TYPE_CHECKING:
    import numpy as np

    from sparseflow.latency.graph.inputs import ModelInputs

CONV_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Latency samples of one model. Timestamps are POSIX times in seconds.

    Attributes:
        model: File of the model.
        kernel: Whether it is an extracted kernel.
        provider: Name of the provider, see `session.PROVIDERS`.
        level: Graph optimization level.
        threads: Threads within an operator; None is onnxruntime's choice.
        conv_search: `cudnn_conv_algo_search` of the CUDA provider, None on other providers.
        warmup: Runs before the first sample.
        warmup_ms: Total time of these runs.
        start_s: Start of the first sample.
        end_s: End of the last sample.
        latency_ms: Wall time per run of each sample, in order.
        cpu_ms: CPU time of the calling thread over all samples.
        calls_per_sample: Runs per sample.
        ort_version: Version of onnxruntime, followed by that of OpenVINO if it ran the model.
    """

    model: str
    kernel: bool
    provider: str
    level: str
    threads: int | None
    conv_search: str | None
    warmup: int
    warmup_ms: float
    start_s: float
    end_s: float
    latency_ms: tuple[float, ...]
    cpu_ms: float
    calls_per_sample: int
    ort_version: str

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.latency_ms)

    @property
    def cpu_ratio(self) -> float:
        """CPU time of the calling thread over wall time; below 1 it waited for a CPU or a GPU."""
        return self.cpu_ms / (sum(self.latency_ms) * self.calls_per_sample)

    def quantile_ms(self, q: float) -> float:
        """Return the `q`-quantile in milliseconds, 0 <= q <= 1."""
        return quantile(self.latency_ms, q)

    def summarize(self) -> dict[str, float]:
        """Return mean, quantiles, minimum and maximum of the samples."""
        return {
            "mean_ms": self.mean_ms,
            **{f"p{q}_ms": self.quantile_ms(q / 100) for q in (50, 95, 99)},
            "min_ms": min(self.latency_ms),
            "max_ms": max(self.latency_ms),
        }

    def to_columns(self) -> dict[str, Any]:
        """Convert to columns of a collection's row, with every sample in `samples_ns`."""
        summary = self.summarize()
        return {
            "latency_ms": summary.pop("mean_ms"),
            **summary,
            "cpu_ratio": round(self.cpu_ratio, 4),
            "loops": len(self.latency_ms),
            "calls_per_sample": self.calls_per_sample,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "provider": self.provider,
            "graph_level": self.level,
            "threads": self.threads,
            "conv_search": self.conv_search,
            "ort_version": self.ort_version,
            "samples_ns": [round(value * 1e6) for value in self.latency_ms],
        }

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types, summary statistics first."""
        counts = {"loops": len(self.latency_ms), "cpu_ratio": self.cpu_ratio}
        return {**self.summarize(), **counts, **vars(self), "latency_ms": list(self.latency_ms)}


class Runner:
    """A model that is loaded, with inputs and outputs bound, ready to be timed.

    Args:
        path: ONNX file: a model, or an extracted kernel.
        provider: `"cpu"`, `"cuda"` or onnxruntime's name, or `"openvino"`, which optimizes by itself.
        level: Graph optimization level: `"disable"`, `"basic"`, `"extended"` or `"all"`. By default
            `"disable"` for an extracted kernel, which comes from an optimized graph, and `"all"` for a model.
        threads: Threads within an operator; None leaves the choice to onnxruntime.
        shapes: Input -> shape, for inputs with open dimensions.
        inputs: Input -> value of a model, as `inputs.read_value` takes it; the other inputs are random.
        conv_search: Algorithm search of cuDNN convolutions, one of `CONV_SEARCHES`; it changes results.
        gpu: Index of the GPU.
        seed: Random seed of the inputs.

    Raises:
        InputError: A file, a shape or an argument is invalid.
        FileFormatError, ModelError: The file is not a model that can be run.
        DeviceError: The provider is not available, or onnxruntime fell back to another one.
    """

    def __init__(
        self,
        path: Path | str,
        provider: str = "cpu",
        *,
        level: str | None = None,
        threads: int | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        inputs: Mapping[str, Any] | None = None,
        conv_search: str = "EXHAUSTIVE",
        gpu: int = 0,
        seed: int = 0,
    ) -> None:
        if threads is not None:
            check_at_least(1, threads=threads)
        check_one_of(CONV_SEARCHES, conv_search=conv_search)
        self.path = onnx_file.check_path(path)
        self.provider = session.resolve_provider(provider)
        on_gpu = session.get_device_type(provider) == "cuda"
        model = onnx_file.load_model(self.path)
        model_inputs = read_inputs(self.path, model, shapes, inputs)
        self.is_kernel = is_kernel_model(model)
        self.level = level or ("disable" if self.is_kernel else "all")
        self.threads = threads
        self._has_run = False
        element_types = {v.name: v.type.tensor_type.elem_type for v in onnx_file.list_inputs(model)}
        options = session.make_provider_options(provider, gpu, cudnn_conv_algo_search=conv_search)
        self.conv_search: str | None = None
        self._session: Any
        self._binding: Any
        if self.provider == session.PROVIDERS["openvino"]:
            if self.is_kernel:
                feeds = make_dummy_inputs(self.path, seed)
            else:
                feeds = next(model_inputs.iter_draws(seed))
                fix_shapes(model, model_inputs.specs)
            self._inputs: Mapping[str, Any] = feeds
            self._session = self._binding = OpenVINOModel(
                onnx_file.serialize(model, str(self.path)),
                feeds,
                threads=threads,
                is_kernel=self.is_kernel,
                description=str(self.path),
            )
            return
        self._session = open_session(
            model, model_inputs, str(self.path), provider, self.level, threads=threads,
            provider_options=options,
        )  # fmt: skip
        feeds = self._find_feeds(model_inputs, seed)
        # The effective option, not the requested one.
        provider_options = self._session.get_provider_options().get(self.provider, {})
        self.conv_search = provider_options.get("cudnn_conv_algo_search") if on_gpu else None
        memory_device = session.get_memory_device(provider, gpu)
        with session.translate_run_errors(f"{self.path} on {memory_device[0]}"):
            # The binding does not keep the tensors alive.
            self._inputs = {
                name: copy_to_device(value, *memory_device, element_types[name])
                for name, value in feeds.items()
            }
            self._binding = bind_io(self._session, self._inputs, *memory_device)

    def _find_feeds(self, model_inputs: ModelInputs, seed: int) -> dict[str, np.ndarray]:
        """Return values of all inputs, after a run if they select the computation."""
        if self.is_kernel:
            return make_dummy_inputs(self.path, seed)
        if not model_inputs.free_control:
            return next(model_inputs.iter_draws(seed))
        names = [output.name for output in self._session.get_outputs()]
        feeds, _ = model_inputs.find_feeds(lambda feeds: session.run(self._session, names, feeds), seed)
        return feeds

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Inputs on the device, by name."""
        return self._inputs

    def warm_up(self, num_runs: int = 5) -> float:
        """Run without recording samples and return the total time in milliseconds.

        Raises:
            RunError: onnxruntime failed, or a run took too long.
        """
        description = f"{self.path} on {self.provider}"
        start_s = time.perf_counter()
        if num_runs and not self._has_run:
            # Only the first run, since a limit takes longer than a run of a small kernel.
            with session.limit_run_time() as options, session.translate_run_errors(description):
                self._session.run_with_iobinding(self._binding, options)
            self._has_run = True
            num_runs -= 1
        with session.translate_run_errors(description):
            for _ in range(num_runs):
                self._session.run_with_iobinding(self._binding)
            self._binding.synchronize_outputs()
        return 1e3 * (time.perf_counter() - start_s)

    def measure(
        self,
        *,
        warmup: int = 5,
        loops: int = 50,
        min_time_s: float = 0.0,
        max_time_s: float = math.inf,
        calls_per_sample: int = 1,
    ) -> Timing:
        """Run the model and record every sample.

        Args:
            warmup: Runs before the first sample; with 0 the first run, including its setup, is a sample.
            loops: Minimum number of samples, unless `max_time_s` ends the measurement earlier.
            min_time_s: Minimum total time of the samples. Under a cyclic load, a mean needs several cycles.
            max_time_s: Maximum total time; at least one sample is taken.
            calls_per_sample: Runs per sample, for models of a few microseconds.

        Raises:
            InputError: A count is out of range.
            RunError: onnxruntime failed.
        """
        check_at_least(0, warmup=warmup)
        check_at_least(1, loops=loops, calls_per_sample=calls_per_sample)
        warmup_ms = self.warm_up(warmup)
        run, binding = self._session.run_with_iobinding, self._binding
        clock, on_gpu = time.perf_counter_ns, session.get_device_type(self.provider) == "cuda"
        min_time_ns, max_time_ns = min_time_s * 1e9, max_time_s * 1e9
        wall_ns: list[int] = []
        with session.translate_run_errors(f"{self.path} on {self.provider}"):
            start_s, cpu_ns = time.time(), time.thread_time_ns()
            start_ns = sample_start_ns = clock()
            while True:
                for _ in range(calls_per_sample):
                    run(binding)
                if on_gpu:
                    binding.synchronize_outputs()
                # Samples are contiguous, and the loop makes no system calls: schedulers switch processes in
                # system calls, and time between samples would be missed.
                sample_end_ns = clock()
                wall_ns.append(max(sample_end_ns - sample_start_ns, 1))
                sample_start_ns = sample_end_ns
                elapsed_ns = sample_end_ns - start_ns
                if elapsed_ns >= max_time_ns or (len(wall_ns) >= loops and elapsed_ns >= min_time_ns):
                    break
            cpu_ns = time.thread_time_ns() - cpu_ns
            end_s = start_s + (sample_start_ns - start_ns) / 1e9
            share = binding.measure_kernel_share() if isinstance(binding, OpenVINOModel) else 1.0
        return Timing(
            model=str(self.path),
            kernel=self.is_kernel,
            provider=self.provider,
            level=self.level,
            threads=self.threads,
            conv_search=self.conv_search,
            warmup=warmup,
            warmup_ms=warmup_ms,
            start_s=start_s,
            end_s=end_s,
            latency_ms=tuple(share * value / 1e6 / calls_per_sample for value in wall_ns),
            cpu_ms=share * cpu_ns / 1e6,
            calls_per_sample=calls_per_sample,
            ort_version=session.get_runtime_version(self.provider),
        )

    def run_once(self) -> list[np.ndarray]:
        """Run once and return the outputs in host memory."""
        with session.translate_run_errors(f"{self.path} on {self.provider}"):
            self._session.run_with_iobinding(self._binding)
            return list(self._binding.copy_outputs_to_cpu())


def bind_io(session: Any, inputs: Mapping[str, Any], device_type: str, device_index: int) -> Any:
    """Bind a session to inputs on a device, which must outlive the binding; outputs stay on the device."""
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for output in session.get_outputs():
        binding.bind_output(output.name, device_type, device_index)
    return binding


def copy_to_device(value: np.ndarray, device_type: str, device_index: int, element_type: int) -> Any:
    """Create an onnxruntime tensor on a device.

    Args:
        value: Content.
        device_type: `"cpu"` or `"cuda"`.
        device_index: Index of the GPU.
        element_type: ONNX's number of the element type.
    """
    ort = require("onnxruntime", "latency")
    if value.dtype == object:
        return _make_text_tensor(value)
    if value.dtype.kind == "V" or value.dtype.name.startswith(
        ("bfloat", "float8", "float4", "int4", "uint4")
    ):
        # NumPy has no such type, so the element type is passed explicitly.
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, element_type)
    return ort.OrtValue.ortvalue_from_numpy(value, device_type, device_index)


def _make_text_tensor(value: np.ndarray) -> Any:
    """Create a tensor of text, which onnxruntime only does as the output of a model."""
    onnx = require("onnx", "latency")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["text"], ["copy"])],
        "text",
        [],
        [onnx.ValueInfoProto(name="copy")],
        [onnx.numpy_helper.from_array(value, "text")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    text_session = session.open_session(model.SerializeToString(), "cpu", "disable")
    binding = bind_io(text_session, {}, "cpu", 0)
    text_session.run_with_iobinding(binding)
    return binding.get_outputs()[0]
