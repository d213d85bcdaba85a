"""What a compiled kernel takes, measured in a process of its own.

The process is a small C program (`data/harness.c`): no Python in it, one OpenMP runtime, and a kernel that
crashes or hangs takes nothing else with it. Candidate and reference are timed in turns, so that a machine
that drifts slows both alike. Arrays travel in anonymous files in memory, which vanish with the last process
that has them open.

A kernel's shared object holds one function,
::

    void sparseflow_kernel(const void *const *inputs, void *const *outputs);

which reads the inputs in their order and writes all of the one output, whatever stands there before. Every
array begins, and its memory ends, at a multiple of 64 bytes; to write to an input, or to touch what lies
behind an array, is a crash.

A sample is the mean of so many calls that they last about a millisecond. Within it the caches hold what the
call before left there; between samples the other kernel has run.

How OpenMP is set: every `OMP_`, `GOMP_` and `KMP_` variable that we were started with is dropped. Threads
stay on their CPU (`OMP_PROC_BIND`), since a thread that moves leaves its caches behind. At a barrier they
spin for about a millisecond and then sleep (`GOMP_SPINCOUNT`, `KMP_BLOCKTIME`): a kernel of
microseconds must not pay for waking them up in every call, and one that leaves threads idle must not have
them run against it for long. Nested regions are off, and no region gets fewer threads than it asks for.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

from sparseflow.core.telemetry import procfs
from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.tuning.codegen import subprocess_runner
from sparseflow.tuning.codegen.compile import compile_program
from sparseflow.tuning.measure import harness as reports
from sparseflow.tuning.measure.cpu_contention import Cpus, Usage
from sparseflow.tuning.measure.harness import MOST_PAIRS, ROOM, Handover, MemoryFile, Report

DRIFT = 0.10
"""How far apart, as a share, the medians of the reference's two halves may lie."""

MOST_S = 1e6
MOST_SLOWER = 1e6

SETTINGS = {
    "OMP_PROC_BIND": "close",
    "OMP_PLACES": "cores",
    "OMP_DYNAMIC": "false",
    "OMP_MAX_ACTIVE_LEVELS": "1",
    "OMP_WAIT_POLICY": "active",
    "GOMP_SPINCOUNT": "50000",
    "KMP_BLOCKTIME": "1",
}
_GIVEN_UP = "and was given up"
"""How the harness ends what it says of a candidate that is too slow."""
_FOREIGN = ("OMP_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_")


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What a kernel reads and writes.

    Attributes:
        inputs: C-contiguous arrays in the order the kernel takes them: packed sparse arrays, then dense ones.
        output_dtype: Type of the one output.
        output_shape: Its shape.
    """

    inputs: tuple[np.ndarray, ...]
    output_dtype: np.dtype
    output_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        for number, array in enumerate(self.inputs):
            if array.dtype.hasobject or not array.flags.c_contiguous:
                kind = f"{array.dtype} of shape {array.shape}, strides {array.strides}"
                raise InputError(f"`inputs[{number}]` ({kind}) must be a C-contiguous array of plain numbers")
        if any(extent < 0 for extent in self.output_shape):
            raise InputError(f"`output_shape` (={self.output_shape}) must not be negative")
        object.__setattr__(self, "output_dtype", np.dtype(self.output_dtype))

    @property
    def output_bytes(self) -> int:
        return math.prod(self.output_shape) * self.output_dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Inputs and output together."""
        return sum(array.nbytes for array in self.inputs) + self.output_bytes


@dataclass(frozen=True, kw_only=True)
class Job(Buffers):
    """A kernel and what it works on.

    Attributes:
        library: The shared object; what it must hold stands at the top of this module.
    """

    library: Path


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What came of one measurement.

    Attributes:
        latency_ms: Samples of the candidate, milliseconds a call, in the order taken; empty where it failed.
        reference_ms: Those of the reference, each taken right before the candidate's; empty without one.
        output: What the candidate's first run wrote; bytes it did not write are 0xFF, which is NaN. Without a
            complete measurement it is empty.
        contended: Others used the CPUs meanwhile; see `Usage.contended`.
        drifted: The medians of the reference's first and second half (without a reference: the candidate's)
            are further apart than `DRIFT`. Never with fewer than four samples, which cannot tell.
        error: What went wrong, or None.
        usage: What `contended` was told by; None where it failed.
    """

    latency_ms: tuple[float, ...]
    reference_ms: tuple[float, ...]
    output: np.ndarray
    contended: bool
    drifted: bool
    error: str | None
    usage: Usage | None = None

    @property
    def given_up(self) -> bool:
        """It failed only because its first run took too long beside the reference, by `slower`."""
        return self.error is not None and self.error.endswith(_GIVEN_UP)

    @property
    def best_ms(self) -> float:
        """The candidate's fastest sample; infinite where it failed."""
        return min(self.latency_ms, default=math.inf)

    @property
    def ratio(self) -> float:
        """Median, over pairs, of the candidate's time over the reference's; infinite where it failed.

        Raises:
            InputError: There was no reference.
        """
        if not self.latency_ms:
            return math.inf
        if not self.reference_ms:
            raise InputError("a ratio needs a reference, and this was measured without one")
        pairs = zip(self.latency_ms, self.reference_ms, strict=True)
        return statistics.median(own / reference for own, reference in pairs)


class Session:
    """Measures one candidate after another against the same reference.

    Use it in a `with` block. Arrays of the reference and those in `keep` are handed over once, as they are
    when the block is entered: what is written to them later is not seen. Measure one at a time; two would
    disturb each other.

    Args:
        reference: What every candidate is timed against; None times candidates alone.
        keep: Further arrays that the candidates will share, such as the dense operand.
        cache: Folder for compiled code; see `compile_source`.

    Raises:
        DeviceError, RunError: On entering: there is no C compiler, the harness does not compile, or the
            arrays find no room.
    """

    def __init__(
        self, reference: Job | None = None, *, keep: Iterable[np.ndarray] = (), cache: Path | None = None
    ) -> None:
        self.reference = reference
        self._keep = (*(() if reference is None else reference.inputs), *keep)
        self._cache = cache
        self._harness: Path | None = None
        self._kept = Handover()

    def __enter__(self) -> Session:
        source = (resources.files("sparseflow.tuning") / "data" / "harness.c").read_text(encoding="utf-8")
        self._harness = compile_program(source, cache=self._cache)
        try:
            for array in self._keep:
                self._kept.add(array)
        except OSError as error:
            self._kept.close()
            raise RunError(f"the arrays of a session cannot be handed over: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()
        self._harness = None

    def measure(
        self,
        job: Job,
        *,
        repeats: int = 10,
        min_time_s: float = 0.05,
        max_time_s: float = 2.0,
        timeout_s: float = 20.0,
        memory_bytes: int | None = None,
        slower: float | None = None,
    ) -> Measured:
        """Run a candidate once, keep what it wrote, then time it.

        Args:
            job: The candidate.
            repeats: Samples to take at least of each side, unless `max_time_s` ends them sooner.
            min_time_s: Go on until the samples of both sides took this long together.
            max_time_s: Stop after this long, with at least one sample. A first run that alone takes longer
                is the only sample.
            timeout_s: Kill the harness after this long, all in all.
            memory_bytes: Most address space that it may have, thread stacks and libraries included.
            slower: Give a candidate up, as an error, whose first run takes more than so many times as long as
                the reference's.

        Returns:
            Samples, or why there are none: a kernel that crashes, hangs, cannot be loaded or runs out of
            memory is an `error` there and raises nothing.

        Raises:
            InputError: An argument is out of range, or the session is not open.
        """
        if self._harness is None:
            raise InputError("a session measures only inside its `with` block")
        if not 1 <= repeats <= MOST_PAIRS:
            raise InputError(f"`repeats` (={repeats}) must be from 1 to {MOST_PAIRS}")
        if not (0 <= min_time_s <= max_time_s <= MOST_S and 0 < timeout_s <= MOST_S):
            raise InputError(
                f"`min_time_s` (={min_time_s}) must be from 0 to `max_time_s` (={max_time_s}), `timeout_s` "
                f"(={timeout_s}) above 0, and none above {MOST_S:g}"
            )
        if memory_bytes is not None and memory_bytes < 1:
            raise InputError(f"`memory_bytes` (={memory_bytes}) must be at least 1")
        if slower is not None and (not 1 <= slower <= MOST_SLOWER or self.reference is None):
            raise InputError(f"`slower` (={slower}) must be from 1 to {MOST_SLOWER:g}, and needs a reference")
        jobs = (job,) if self.reference is None else (job, self.reference)
        with ExitStack() as stack:
            try:
                _check_room(jobs)
                files = stack.enter_context(Handover(self._kept))
                kernels = [word for one in jobs for word in _words(one, files)]
                output = stack.enter_context(MemoryFile("output"))
                report = stack.enter_context(MemoryFile("report"))
                os.ftruncate(report.number, ROOM)
            except (OSError, MemoryError) as error:
                return _failed(job, f"its arrays cannot be handed over: {error}")
            limits = (
                repeats,
                round(min_time_s * 1e9),
                round(max_time_s * 1e9),
                MOST_PAIRS,
                memory_bytes or 0,
            )
            numbers = (report.number, output.number, *limits, os.getpid(), slower or 0)
            cpus = Cpus()
            try:
                ended = subprocess_runner.run(
                    [str(self._harness), *map(str, numbers), *kernels],
                    timeout_s=timeout_s,
                    environment=_environment(os.environ),
                    pass_fds=(report.number, output.number, *files.numbers),
                )
            except OSError as error:
                return _failed(job, f"the harness {self._harness} cannot be started: {error}")
            others = cpus.others()
            try:
                told = reports.read(report.number)
                if ended.code != 0 or not told.finished:
                    return _failed(job, _why(ended, told, timeout_s, memory_bytes))
                written = _written(job, output.number)
            except (OSError, FileFormatError) as error:
                return _failed(job, str(error))
        usage = Usage(wall_s=told.wall_s, cpu_s=told.cpu_s, waited_s=told.waited_s, others=others)
        latency_ms, reference_ms = (tuple(side.tolist()) for side in told.times_ms.T)
        if self.reference is None:
            reference_ms = ()
        return Measured(
            latency_ms=latency_ms,
            reference_ms=reference_ms,
            output=written,
            contended=usage.contended,
            drifted=_drifted(reference_ms or latency_ms),
            error=None,
            usage=usage,
        )


def measure(
    job: Job,
    reference: Job | None = None,
    *,
    repeats: int = 10,
    min_time_s: float = 0.05,
    max_time_s: float = 2.0,
    timeout_s: float = 20.0,
    memory_bytes: int | None = None,
    cache: Path | None = None,
) -> Measured:
    """Measure one kernel, beside a reference if there is one: a `Session` used once, which tells the rest."""
    with Session(reference, cache=cache) as session:
        return session.measure(
            job,
            repeats=repeats,
            min_time_s=min_time_s,
            max_time_s=max_time_s,
            timeout_s=timeout_s,
            memory_bytes=memory_bytes,
        )


def _words(job: Job, files: Handover) -> list[str]:
    """A kernel as the harness's arguments describe it."""
    words = [os.path.abspath(job.library), str(job.output_bytes), str(len(job.inputs))]
    for array in job.inputs:
        words += [str(files.add(array)), str(array.nbytes)]
    return words


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    own = {name: value for name, value in inherited.items() if not name.startswith(_FOREIGN)}
    return {**own, **SETTINGS, "LC_ALL": "C"}


def _check_room(jobs: Sequence[Job]) -> None:
    """Arrays that do not fit are refused before Linux looks for a process to kill."""
    # Once on the way and once in the harness.
    needed = 2 * sum(job.total_bytes for job in jobs)
    try:
        free = 1.0 - procfs.read_memory_used()
    except DeviceError:
        return
    available = free * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise MemoryError(f"{needed / 2**20:.0f} MiB are needed and {available / 2**20:.0f} MiB are free")


def _written(job: Job, file: int) -> np.ndarray:
    """The output that the harness put into a file. Raises OSError where it is not all there."""
    found = np.empty(job.output_shape, job.output_dtype)
    rest, done = found.reshape(-1).view(np.uint8).data, 0
    while done < len(rest):
        got = os.preadv(file, [rest[done:]], done)
        if got == 0:
            raise OSError(f"only {done} of {len(rest)} bytes came back")
        done += got
    return found


def _drifted(samples_ms: Sequence[float]) -> bool:
    half = len(samples_ms) // 2
    if half < 2:
        return False
    first, second = statistics.median(samples_ms[:half]), statistics.median(samples_ms[-half:])
    return max(first, second) > (1 + DRIFT) * min(first, second)


def _why(ended: subprocess_runner.Ended, told: Report, timeout_s: float, memory_bytes: int | None) -> str:
    """Why there is no measurement, in a sentence."""
    where, message = told.where, told.message
    limited = "" if memory_bytes is None else f"; its address space was limited to {memory_bytes} bytes"
    if ended.overdue:
        return f"{where}: it was killed because it had not ended after {timeout_s:g} s"
    if message:
        return f"{where}: {message}{limited if message.startswith('out of memory') else ''}"
    if ended.signal_name == "SIGKILL":
        return f"{where}: it was killed (SIGKILL), as Linux does where memory runs out{limited}"
    if ended.signal_name:
        return f"{where}: it crashed with {ended.signal_name}{limited}"
    said = " ".join(ended.output.split())[-300:]
    return f"{where}: it ended the process with status {ended.code}{': ' + said if said else ''}{limited}"


def _failed(job: Job, error: str) -> Measured:
    nothing = np.empty(0, job.output_dtype)
    return Measured(
        latency_ms=(), reference_ms=(), output=nothing, contended=False, drifted=False, error=error
    )
