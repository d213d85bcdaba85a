"""Timing of compiled kernels in a separate process.

The process is a small C program (`data/harness.c`) without Python and with one OpenMP runtime, so a kernel
that crashes or hangs affects nothing else. Candidate and reference are timed in turns, so that a change of
the machine's speed affects both. Arrays are passed in anonymous memory files; see `harness`.

The shared object of a kernel has one function::

    void sparseflow_kernel(const void *const *inputs, void *const *outputs);

It reads the inputs in order and overwrites the whole output. The start and the end of every array are aligned
to 64 bytes. Writing to an input or accessing memory beyond an array crashes the harness.

A sample is the mean of as many calls as take about one millisecond. Within a sample the caches contain the
data of the previous call; between samples the other kernel runs.

OpenMP settings: all inherited `OMP_`, `GOMP_` and `KMP_` variables are dropped. Threads are bound to their
CPUs (`OMP_PROC_BIND`), because a thread that moves loses its caches. At a barrier threads spin for about one
millisecond and then sleep (`GOMP_SPINCOUNT`, `KMP_BLOCKTIME`): short kernels do not pay for waking threads in
every call, and kernels with idle threads are not slowed down by spinning for long. Nested regions are
disabled, and every region gets the requested number of threads.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from sparseflow.core.checks import check_at_least, check_between, check_positive
from sparseflow.core.telemetry import procfs
from sparseflow.core.telemetry.cpu_contention import CpuUsage, CpuUsageMonitor
from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.tuning.codegen import subprocess_runner
from sparseflow.tuning.codegen.compile import compile_program
from sparseflow.tuning.measure.harness import (
    MAX_SAMPLES,
    REPORT_BYTES,
    HarnessReport,
    ShmTransport,
    open_memory_file,
    read_report,
)

MAX_DRIFT = 0.10
"""Maximum relative difference between the medians of the reference's first and second half."""

MAX_TIME_S = 1e6
MAX_SLOWDOWN = 1e6

OPENMP_ENVIRONMENT = {
    "OMP_PROC_BIND": "close",
    "OMP_PLACES": "cores",
    "OMP_DYNAMIC": "false",
    "OMP_MAX_ACTIVE_LEVELS": "1",
    "OMP_WAIT_POLICY": "active",
    "GOMP_SPINCOUNT": "50000",
    "KMP_BLOCKTIME": "1",
}
_TOO_SLOW_SUFFIX = "and was stopped"
"""End of the harness's message about a candidate that is too slow."""
_DROPPED_PREFIXES = ("OMP_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_")


@dataclass(frozen=True, kw_only=True)
class KernelJob:
    """A kernel, its inputs and its output.

    Attributes:
        library: Shared object; the module docstring describes its function.
        inputs: C-contiguous arrays in the order of the kernel: packed sparse arrays, then dense arrays.
        output_dtype: dtype of the output.
        output_shape: Shape of the output.
    """

    library: Path
    inputs: tuple[np.ndarray, ...]
    output_dtype: np.dtype
    output_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for number, array in enumerate(self.inputs):
            if array.dtype.hasobject or not array.flags.c_contiguous:
                kind = f"{array.dtype} of shape {array.shape}, strides {array.strides}"
                raise InputError(f"`inputs[{number}]` ({kind}) must be a C-contiguous numeric array")
        if any(extent < 0 for extent in self.output_shape):
            raise InputError(f"`output_shape` (={self.output_shape}) must be at least 0")
        object.__setattr__(self, "output_dtype", np.dtype(self.output_dtype))

    @property
    def output_bytes(self) -> int:
        return math.prod(self.output_shape) * self.output_dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of inputs and output."""
        return sum(array.nbytes for array in self.inputs) + self.output_bytes


@dataclass(frozen=True, kw_only=True)
class KernelTiming:
    """Result of one measurement.

    Attributes:
        latency_ms: Samples of the candidate in order, milliseconds per call; empty if it failed.
        reference_ms: Samples of the reference, each taken before the candidate's; empty without a reference.
        output: Output of the candidate's first run; bytes that it did not write are 0xFF (NaN). Empty if the
            measurement failed.
        contended: Whether other processes used the CPUs; see `CpuUsage.contended`.
        drifted: Whether the medians of the first and the second half of the reference's samples (the
            candidate's without a reference) differ by more than `MAX_DRIFT`. False with fewer than four
            samples.
        error: Error message, or None.
        usage: CPU usage that `contended` is based on; None if the measurement failed.
    """

    latency_ms: tuple[float, ...]
    reference_ms: tuple[float, ...]
    output: np.ndarray
    contended: bool
    drifted: bool
    error: str | None
    usage: CpuUsage | None = None

    @property
    def too_slow(self) -> bool:
        """Whether the candidate was only stopped because its first run exceeded `max_slowdown`."""
        return self.error is not None and self.error.endswith(_TOO_SLOW_SUFFIX)

    @property
    def min_ms(self) -> float:
        """Fastest sample of the candidate; infinite if it failed."""
        return min(self.latency_ms, default=math.inf)

    @property
    def ratio(self) -> float:
        """Median over sample pairs of candidate time / reference time; infinite if it failed.

        Raises:
            InputError: There was no reference.
        """
        if not self.latency_ms:
            return math.inf
        if not self.reference_ms:
            raise InputError("`ratio` requires a measurement with a reference")
        pairs = zip(self.latency_ms, self.reference_ms, strict=True)
        return statistics.median(candidate / reference for candidate, reference in pairs)


class MeasurementSession:
    """Measures candidates one after the other against one reference.

    A context manager. The arrays of the reference and `shared_arrays` are copied once on entry; later changes
    have no effect. Run one measurement at a time, because two would disturb each other.

    Args:
        reference: Reference kernel; None times candidates alone.
        shared_arrays: Further arrays that candidates share, such as the dense operand.
        cache_dir: Directory of compiled code; see `compile_source`.

    Raises:
        DeviceError, RunError: On entry: there is no C compiler, the harness does not compile, or memory is
        too
            small.
    """

    def __init__(
        self,
        reference: KernelJob | None = None,
        *,
        shared_arrays: Iterable[np.ndarray] = (),
        cache_dir: Path | None = None,
    ) -> None:
        self.reference = reference
        self._shared_arrays = (*(() if reference is None else reference.inputs), *shared_arrays)
        self._cache_dir = cache_dir
        self._harness: Path | None = None
        self._transport = ShmTransport()

    def __enter__(self) -> MeasurementSession:
        source = (resources.files("sparseflow.tuning") / "data" / "harness.c").read_text(encoding="utf-8")
        self._harness = compile_program(source, cache_dir=self._cache_dir)
        try:
            for array in self._shared_arrays:
                self._transport.add(array)
        except OSError as error:
            self._transport.close()
            raise RunError(f"cannot copy the arrays of the session: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()
        self._harness = None

    def measure(
        self,
        job: KernelJob,
        *,
        repeats: int = 10,
        min_time_s: float = 0.05,
        max_time_s: float = 2.0,
        timeout_s: float = 20.0,
        memory_bytes: int | None = None,
        max_slowdown: float | None = None,
    ) -> KernelTiming:
        """Run a candidate once to get its output, then time it.

        Args:
            job: Candidate.
            repeats: Minimum number of samples of each kernel, unless `max_time_s` ends the measurement.
            min_time_s: Minimum time of all samples together.
            max_time_s: Maximum time, with at least one sample. A first run that takes longer is the only
                sample.
            timeout_s: Time limit of the harness.
            memory_bytes: Limit of the harness's address space, including thread stacks and libraries.
            max_slowdown: Fail a candidate whose first run takes longer than this multiple of the reference's.

        Returns:
            Samples or an error. A kernel that crashes, hangs, cannot be loaded or runs out of memory gives an
            error and raises nothing.

        Raises:
            InputError: An argument is out of range, or the session is not open.
        """
        if self._harness is None:
            raise InputError("the session is not open; use it in a `with` block")
        check_between(1, MAX_SAMPLES, repeats=repeats)
        check_between(0.0, MAX_TIME_S, max_time_s=max_time_s, timeout_s=timeout_s)
        check_between(0.0, max_time_s, min_time_s=min_time_s)
        check_positive(timeout_s=timeout_s)
        if memory_bytes is not None:
            check_at_least(1, memory_bytes=memory_bytes)
        if max_slowdown is not None:
            check_between(1.0, MAX_SLOWDOWN, max_slowdown=max_slowdown)
            if self.reference is None:
                raise InputError(f"`max_slowdown` (={max_slowdown}) requires a reference")
        limits = (repeats, round(min_time_s * 1e9), round(max_time_s * 1e9), MAX_SAMPLES, memory_bytes or 0)
        numbers = (*limits, os.getpid(), max_slowdown or 0)
        try:
            return self._run_harness(job, numbers, timeout_s, memory_bytes)
        except (RunError, FileFormatError, OSError) as error:
            return KernelTiming(
                latency_ms=(),
                reference_ms=(),
                output=np.empty(0, job.output_dtype),
                contended=False,
                drifted=False,
                error=str(error),
            )

    def _run_harness(
        self, job: KernelJob, numbers: tuple[float, ...], timeout_s: float, memory_bytes: int | None
    ) -> KernelTiming:
        """Run the harness with these settings; raises RunError, FileFormatError or OSError if it fails."""
        jobs = (job,) if self.reference is None else (job, self.reference)
        with ExitStack() as stack:
            try:
                _check_memory(jobs)
                files = stack.enter_context(ShmTransport(self._transport))
                kernels = [word for item in jobs for word in _format_arguments(item, files)]
                output = stack.enter_context(open_memory_file("output"))
                report = stack.enter_context(open_memory_file("report"))
                os.ftruncate(report, REPORT_BYTES)
            except (OSError, MemoryError) as error:
                raise RunError(f"cannot copy its arrays: {error}") from error
            cpus = CpuUsageMonitor()
            try:
                process = subprocess_runner.run_process(
                    [str(self._harness), *map(str, (report, output, *numbers)), *kernels],
                    timeout_s=timeout_s,
                    environment=_inherit_environment() | OPENMP_ENVIRONMENT | {"LC_ALL": "C"},
                    pass_fds=(report, output, *files.file_descriptors),
                )
            except OSError as error:
                raise RunError(f"the harness {self._harness} cannot be started: {error}") from error
            other_share = cpus.measure_other_share()
            result = read_report(report)
            if process.code != 0 or not result.finished:
                raise RunError(_describe_failure(process, result, timeout_s, memory_bytes))
            written = _read_output(job, output)
        usage = CpuUsage(
            wall_s=result.wall_s, cpu_s=result.cpu_s, wait_s=result.wait_s, other_share=other_share
        )
        latency_ms, reference_ms = (tuple(side.tolist()) for side in result.times_ms.T)
        if self.reference is None:
            reference_ms = ()
        return KernelTiming(
            latency_ms=latency_ms,
            reference_ms=reference_ms,
            output=written,
            contended=usage.contended,
            drifted=_has_drifted(reference_ms or latency_ms),
            error=None,
            usage=usage,
        )


def _format_arguments(job: KernelJob, files: ShmTransport) -> list[str]:
    """Format a kernel as arguments of the harness."""
    words = [os.path.abspath(job.library), str(job.output_bytes), str(len(job.inputs))]
    for array in job.inputs:
        words += [str(files.add(array)), str(array.nbytes)]
    return words


def _inherit_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED_PREFIXES)}


def _check_memory(jobs: Sequence[KernelJob]) -> None:
    """Raise MemoryError for arrays that do not fit, before Linux kills a process."""
    # One copy in memory files and one in the harness.
    needed = 2 * sum(job.total_bytes for job in jobs)
    try:
        free = 1.0 - procfs.read_memory_used()
    except DeviceError:
        return
    available = free * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise MemoryError(f"{needed / 2**20:.0f} MiB required, {available / 2**20:.0f} MiB available")


def _read_output(job: KernelJob, file: int) -> np.ndarray:
    """Read the output from a memory file; raises OSError if it is incomplete."""
    output = np.empty(job.output_shape, job.output_dtype)
    buffer, num_read = output.reshape(-1).view(np.uint8).data, 0
    while num_read < len(buffer):
        count = os.preadv(file, [buffer[num_read:]], num_read)
        if count == 0:
            raise OSError(f"only {num_read} of {len(buffer)} output bytes are available")
        num_read += count
    return output


def _has_drifted(samples_ms: Sequence[float]) -> bool:
    half = len(samples_ms) // 2
    if half < 2:
        return False
    first, second = statistics.median(samples_ms[:half]), statistics.median(samples_ms[-half:])
    return max(first, second) > (1 + MAX_DRIFT) * min(first, second)


def _describe_failure(
    process: subprocess_runner.ProcessResult,
    report: HarnessReport,
    timeout_s: float,
    memory_bytes: int | None,
) -> str:
    stage, message = report.stage, report.message
    limited = "" if memory_bytes is None else f"; the address space is limited to {memory_bytes} bytes"
    if process.timed_out:
        return f"{stage}: killed after {timeout_s:g} s"
    if message:
        return f"{stage}: {message}{limited if message.startswith('out of memory') else ''}"
    if process.signal_name == "SIGKILL":
        return f"{stage}: killed by SIGKILL, probably out of memory{limited}"
    if process.signal_name:
        return f"{stage}: crashed with {process.signal_name}{limited}"
    output = " ".join(process.output.split())[-300:]
    return f"{stage}: exited with status {process.code}{': ' + output if output else ''}{limited}"
