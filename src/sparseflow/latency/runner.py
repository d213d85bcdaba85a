"""Running one ONNX model on one device, and what each run took.

Inputs and outputs are bound to the device's memory (IOBinding): what is timed is the model and no copy to or
from the host. A sample is the wall time of one run, from the call until the device is done; beside it stands
the CPU time of the calling thread over all of them: on a CPU their ratio tells how much of it was waiting.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.extras import require
from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.latency import onnx_file, session
from sparseflow.latency.extract import dummy_inputs, is_kernel
from sparseflow.latency.graph import random_inputs

if TYPE_CHECKING:
    import numpy as np

CONV_SEARCHES = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What runs of one model took. Times of day are seconds since 1970.

    Attributes:
        model: The model's file.
        kernel: Whether it is one extracted kernel.
        provider: onnxruntime's name of the provider that ran it.
        level: What onnxruntime could optimise.
        threads: Threads within an operator; None is onnxruntime's own choice.
        conv_search: `cudnn_conv_algo_search` of the CUDA provider, None elsewhere.
        warmup: Runs before the first sample.
        warmup_ms: What they took together, milliseconds.
        start_s: When the first sample began.
        end_s: When the last one ended.
        latency_ms: Wall time of every sample, milliseconds a run, in the order taken.
        cpu_ms: CPU time of the calling thread over all samples together, milliseconds.
        calls_per_sample: Runs inside one sample.
        ort_version: The onnxruntime that ran it.
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
        """CPU time of the calling thread over wall time: below 1 it waited, for a CPU or for a GPU."""
        return self.cpu_ms / (sum(self.latency_ms) * self.calls_per_sample)

    def quantile_ms(self, q: float) -> float:
        """The `q`-quantile, 0 <= q <= 1, in milliseconds."""
        return quantile(self.latency_ms, q)

    def to_dict(self) -> dict[str, Any]:
        """Everything in JSON's types, a summary first."""
        return {
            "model": self.model,
            "provider": self.provider,
            "mean_ms": self.mean_ms,
            **{f"p{q}_ms": self.quantile_ms(q / 100) for q in (50, 95, 99)},
            "min_ms": min(self.latency_ms),
            "max_ms": max(self.latency_ms),
            "cpu_ratio": self.cpu_ratio,
            "warmup": self.warmup,
            "warmup_ms": self.warmup_ms,
            "loops": len(self.latency_ms),
            "calls_per_sample": self.calls_per_sample,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "kernel": self.kernel,
            "level": self.level,
            "threads": self.threads,
            "conv_search": self.conv_search,
            "ort_version": self.ort_version,
            "latency_ms": list(self.latency_ms),
            "cpu_ms": self.cpu_ms,
        }


class Runner:
    """A model that is loaded, fed and bound, ready to be timed.

    Args:
        path: An ONNX file: a model, or a kernel as `latency extract` writes it.
        provider: `"cpu"` or `"cuda"`, or onnxruntime's name.
        level: What onnxruntime may optimise: `"disable"`, `"basic"`, `"extended"` or `"all"`. By default
            nothing of a kernel, which was taken from an optimised graph, and everything of a model.
        threads: Threads within an operator; None is onnxruntime's own choice.
        shapes: Input -> shape, for inputs that leave extents open.
        conv_search: How cuDNN finds a convolution's algorithm, one of `CONV_SEARCHES`; it changes results.
        gpu: Number of the GPU.
        seed: What inputs are drawn from.

    Raises:
        InputError: A file, a shape or an argument cannot be used.
        FileFormatError, ModelError: The file is no model that can be run.
        DeviceError: The provider is not there, or onnxruntime fell back to another.
    """

    def __init__(
        self,
        path: Path | str,
        provider: str = "cpu",
        *,
        level: str | None = None,
        threads: int | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        conv_search: str = "EXHAUSTIVE",
        gpu: int = 0,
        seed: int = 0,
    ) -> None:
        if threads is not None and threads < 1:
            raise InputError(f"`threads` (={threads}) must be at least 1")
        if conv_search not in CONV_SEARCHES:
            raise InputError(f"`conv_search` (={conv_search!r}) must be one of: {', '.join(CONV_SEARCHES)}")
        self.path = Path(path)
        self.provider = session.provider_name(provider)
        on_gpu = session.short_name(provider) == "cuda"
        model = onnx_file.load(self.path)
        onnx_file.fix_inputs(model, dict(shapes or {}))
        self.is_kernel = is_kernel(model)
        self.level = level or ("disable" if self.is_kernel else "all")
        self.threads = threads
        feeds = dummy_inputs(self.path, seed) if self.is_kernel else random_inputs(model, seed)
        types = {v.name: v.type.tensor_type.elem_type for v in onnx_file.true_inputs(model)}
        options = session.options_of(provider, gpu, cudnn_conv_algo_search=conv_search)
        content = onnx_file.serialise(model, str(self.path))
        self._session = session.open_session(
            content, provider, self.level, threads=threads, provider_options=options
        )
        # What the provider says it does, not what was asked for.
        provider_says = self._session.get_provider_options().get(self.provider, {})
        self.conv_search: str | None = provider_says.get("cudnn_conv_algo_search") if on_gpu else None
        place = session.place_of(provider, gpu)
        with told(self.path, place[0]):
            # The binding does not keep them alive.
            self._inputs = {name: on_device(value, *place, types[name]) for name, value in feeds.items()}
            self._binding = bind(self._session, self._inputs, *place)

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Name -> tensor on the device that is fed."""
        return self._inputs

    def warm_up(self, runs: int = 5) -> float:
        """Run without keeping samples; gives the milliseconds it took. Raises RunError where it failed."""
        begin = time.perf_counter()
        with told(self.path, self.provider):
            for _ in range(runs):
                self._session.run_with_iobinding(self._binding)
            self._binding.synchronize_outputs()
        return 1e3 * (time.perf_counter() - begin)

    def measure(
        self,
        *,
        warmup: int = 5,
        loops: int = 50,
        min_time_s: float = 0.0,
        max_time_s: float = math.inf,
        calls_per_sample: int = 1,
    ) -> Timing:
        """Run the model and keep every sample.

        Args:
            warmup: Runs before the first sample; 0 leaves the first run, with what it sets up, among them.
            loops: Samples to take at least, unless `max_time_s` ends them sooner.
            min_time_s: Go on until the samples took this long: beside a load that works and rests in cycles,
                a mean needs several of them.
            max_time_s: Stop after this long, with at least one sample.
            calls_per_sample: Runs timed together as one sample, for models of some microseconds.

        Raises:
            InputError: A count is out of range.
            RunError: onnxruntime failed.
        """
        if warmup < 0 or loops < 1 or calls_per_sample < 1:
            raise InputError(
                f"`warmup` (={warmup}) must be at least 0, `loops` (={loops}) and `calls_per_sample` "
                f"(={calls_per_sample}) at least 1"
            )
        warmup_ms = self.warm_up(warmup)
        run, binding = self._session.run_with_iobinding, self._binding
        clock, on_gpu = time.perf_counter_ns, session.short_name(self.provider) == "cuda"
        least_ns, most_ns = min_time_s * 1e9, max_time_s * 1e9
        walls: list[int] = []
        with told(self.path, self.provider):
            start_s, cpu_ns = time.time(), time.thread_time_ns()
            begin = before = clock()
            while True:
                for _ in range(calls_per_sample):
                    run(binding)
                if on_gpu:
                    binding.synchronize_outputs()
                # One sample ends where the next begins, and nothing in here enters the kernel: a scheduler
                # likes to switch to others in system calls, and what falls between samples is never seen.
                after = clock()
                walls.append(max(after - before, 1))
                before = after
                passed = after - begin
                if passed >= most_ns or (len(walls) >= loops and passed >= least_ns):
                    break
            cpu_ns = time.thread_time_ns() - cpu_ns
            end_s = start_s + (before - begin) / 1e9
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
            latency_ms=tuple(value / 1e6 / calls_per_sample for value in walls),
            cpu_ms=cpu_ns / 1e6,
            calls_per_sample=calls_per_sample,
            ort_version=require("onnxruntime", "latency").__version__,
        )

    def outputs(self) -> list[np.ndarray]:
        """Run once and give what came out, in host memory."""
        with told(self.path, self.provider):
            self._session.run_with_iobinding(self._binding)
            return list(self._binding.copy_outputs_to_cpu())


def run(
    path: Path | str, provider: str = "cpu", *, warmup: int = 5, loops: int = 50, **options: Any
) -> Timing:
    """Load a model and time it; `options` are those of `Runner`."""
    return Runner(path, provider, **options).measure(warmup=warmup, loops=loops)


def quantile(values: tuple[float, ...] | list[float], q: float) -> float:
    """The `q`-quantile, interpolated; unit as given."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def bind(opened: Any, inputs: Mapping[str, Any], place: str, number: int) -> Any:
    """A session's binding to inputs that lie on a device, which must outlive it; outputs stay there too."""
    binding = opened.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for output in opened.get_outputs():
        binding.bind_output(output.name, place, number)
    return binding


def on_device(value: np.ndarray, place: str, number: int, element: int) -> Any:
    """A tensor in the memory of a device.

    Args:
        value: What is in it.
        place: `"cpu"` or `"cuda"`.
        number: Number of the GPU.
        element: ONNX's number of the type of its elements.
    """
    ort = require("onnxruntime", "latency")
    if value.dtype.kind == "V" or value.dtype.name.startswith(
        ("bfloat", "float8", "float4", "int4", "uint4")
    ):
        # numpy has no type of its own for it, so onnxruntime is told which bits these are.
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, element)
    return ort.OrtValue.ortvalue_from_numpy(value, place, number)


class told:
    """Turns onnxruntime's errors, which share no base that it exports, into ours."""

    def __init__(self, path: Path, place: str) -> None:
        self._what = f"{path} on {place}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, MemoryError):
            return
        if isinstance(error, DeviceError | FileFormatError | InputError | RunError):
            return
        text = next(iter(str(error).strip().splitlines()), type(error).__name__)[:400]
        raise RunError(f"onnxruntime failed while it ran {self._what}: {text}") from error
