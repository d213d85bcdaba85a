"""Measurement of schedules of one problem: build, compile, check the result, time; also on a Ray cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, PlainSerializer, TypeAdapter

from sparseflow.core.device import describe_cpu
from sparseflow.core.parallel import map_unordered
from sparseflow.errors import DeviceError, InputError, RunError
from sparseflow.tuning.codegen.program import KernelProgram, build_program, compute_storage_limit
from sparseflow.tuning.measure.runner import KernelJob, MeasurementSession
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule, ScheduleLine

BATCH_SIZE = 8
"""Schedules that a machine of a cluster measures at a time, enough to amortize sending the matrix."""

TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}
"""dtype -> largest difference from scipy in float64, relative to the largest result."""

_COMPARE_CHUNK = 1 << 16
"""Results that are compared at a time."""

_QUICK_SETTINGS = {"repeats": 7, "min_time_s": 0.02, "max_time_s": 0.25, "max_slowdown": 10.0}
_THOROUGH_SETTINGS = {"repeats": 30, "min_time_s": 0.1, "max_time_s": 0.6}
"""Settings of measurements. The first run of the reference is slow, too: 10 times its first run is at least
20 times its warm time, and slower candidates need no exact time."""

_SAMPLE_S = 2e-3
"""Shortest time of a sample of candidate and reference."""

_MAX_PROGRAM_BYTES = 256 << 20
"""Size of the packed matrices that are stored for later measurements of the same schedules."""

_Time = Annotated[
    float,
    BeforeValidator(lambda value: math.inf if value is None else value),
    Field(gt=0.0),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
]
"""Positive time; files store infinity as null."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Measurement of one schedule; a row of the logs of searches and collections.

    Attributes:
        schedule: Schedule.
        latency_ms: Fastest sample, milliseconds; infinite if it failed.
        ratio: Median of schedule time / reference time over paired samples; if disturbed, fastest sample /
            fastest sample of the reference in the session; infinite if it failed.
        error: Error message; None if it succeeded.
        disturbed: Whether other processes used the CPUs or the speed of the machine changed.
        seconds: Phase ("build", "compile", "measure") -> duration, seconds.
        times: Number of measurements.

    Raises:
        InputError: There is neither an error nor both times, or there are both.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    schedule: ScheduleLine
    latency_ms: _Time = math.inf
    ratio: _Time = math.inf
    error: str | None = None
    disturbed: bool = False
    seconds: dict[str, Annotated[float, Field(ge=0.0)]] = field(default_factory=dict)
    times: Annotated[int, Field(ge=1)] = 1

    def __post_init__(self) -> None:
        if (self.error is None) != (math.isfinite(self.latency_ms) and math.isfinite(self.ratio)):
            raise InputError("a trial has either an error or both times")

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types; times are None if it failed."""
        return _TRIAL_TYPE.dump_python(self, mode="json")


_TRIAL_TYPE = TypeAdapter(Trial)


def sum_phases(trials: Iterable[Trial]) -> dict[str, float]:
    """Sum the durations of each phase of some trials, seconds."""
    seconds: dict[str, float] = {}
    for trial in trials:
        for phase, elapsed_s in trial.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + elapsed_s
    return seconds


def estimate_thorough_s(trial: Trial) -> float:
    """Estimate the duration of a thorough measurement from a quick one, seconds."""
    pair_s = 2 * max(1e-3 * (trial.latency_ms + trial.latency_ms / trial.ratio), _SAMPLE_S)
    quick_s, thorough_s = (
        min(max(settings["repeats"] * pair_s, settings["min_time_s"]), settings["max_time_s"])
        for settings in (_QUICK_SETTINGS, _THOROUGH_SETTINGS)
    )
    return trial.seconds.get("measure", 0.0) / trial.times + thorough_s - quick_s


def make_job(
    program: KernelProgram, inputs: tuple[np.ndarray, ...], *, cache_dir: Path | None = None
) -> KernelJob:
    """Compile a program for the runner."""
    return KernelJob(
        library=program.compile(cache_dir=cache_dir),
        inputs=program.bind_inputs(inputs),
        output_shape=program.output_shape,
        output_dtype=program.problem.dtype,
    )


class ScheduleEvaluator:
    """Measures schedules of one problem against a reference schedule; a context manager.

    Args:
        problem: Problem.
        reference: Reference schedule.
        seed: Random seed of the dense inputs.
        cache_dir: Directory of compiled code; see `compile_source`.

    Attributes:
        library_s: Time of one call of the library in float64, seconds.

    Raises:
        DeviceError, RunError: On entry: there is no C compiler, or the reference does not run.
    """

    def __init__(
        self, problem: SparseProblem, reference: Schedule, *, seed: int = 0, cache_dir: Path | None = None
    ) -> None:
        values = problem.matrix.values
        if values.size and (values == values[0]).all():
            # With equal values, as in a pattern, a schedule that mixes up elements could pass the check.
            matrix = problem.matrix.pattern.to_matrix(problem.dtype)
            problem = SparseProblem(operator=problem.operator, matrix=matrix, n_cols=problem.n_cols)
        self.problem = problem
        self.inputs = problem.generate_inputs(seed)
        self._cache_dir = cache_dir
        self._reference = reference
        start_s = time.perf_counter()
        self._expected = problem.compute_reference(self.inputs)
        self.library_s = time.perf_counter() - start_s
        self._scale = float(np.abs(self._expected).max(initial=0.0)) or 1.0
        self._limit_bytes = compute_storage_limit(problem)
        self._session: MeasurementSession | None = None
        self._reference_ms = math.inf
        self._programs: dict[Schedule, KernelProgram] = {}
        self._ratios: dict[Schedule, float] = {}

    def __enter__(self) -> ScheduleEvaluator:
        program = build_program(self.problem, self._reference)
        job = make_job(program, self.inputs, cache_dir=self._cache_dir)
        session = MeasurementSession(job, shared_arrays=self.inputs, cache_dir=self._cache_dir)
        self._session = session.__enter__()
        self._cache_program(program, 0.0)
        return self

    def __exit__(self, *details: object) -> None:
        if self._session is not None:
            self._session.__exit__(*details)
            self._session = None

    def measure(self, schedule: Schedule, *, thorough: bool = False) -> Trial:
        """Measure one schedule in one process; its errors are part of the trial.

        A disturbed sample is too slow, never too fast, but the median ratio of disturbed samples can be
        anything. The fastest samples are compared instead, so that a disturbed schedule looks slower than it
        is.

        Args:
            schedule: Schedule.
            thorough: Take many samples, to compare the best schedules. The memory layout of a process changes
                the time of a kernel by some percent, so several processes are better than one.

        Raises:
            InputError: The evaluator is not open.
        """
        if self._session is None:
            raise InputError("the evaluator is not open; use it in a `with` block")
        seconds: dict[str, float] = {}
        try:
            with _time_phase(seconds, "build"):
                program = self.build(schedule)
            with _time_phase(seconds, "compile"):
                job = make_job(program, self.inputs, cache_dir=self._cache_dir)
        except (InputError, RunError) as error:
            return Trial(schedule=schedule, error=str(error), seconds=seconds)
        with _time_phase(seconds, "measure"):
            settings = _THOROUGH_SETTINGS if thorough else _QUICK_SETTINGS
            timing = self._session.measure(job, **settings)
            if timing.too_slow:  # repeated, because a disturbance can have the same effect
                timing = self._session.measure(job, **settings)
            wrong = timing.error or self._check_output(program, timing.output)
        if wrong is not None:
            return Trial(schedule=schedule, error=wrong, seconds=seconds)
        self._reference_ms = min(self._reference_ms, *timing.reference_ms)
        disturbed = timing.contended or timing.drifted
        ratio = timing.min_ms / self._reference_ms if disturbed else timing.ratio
        self._cache_program(program, ratio)
        return Trial(
            schedule=schedule, latency_ms=timing.min_ms, ratio=ratio, disturbed=disturbed, seconds=seconds
        )

    def build(self, schedule: Schedule) -> KernelProgram:
        """Build the program of a schedule, or return that of an earlier measurement.

        Raises:
            InputError: The schedule cannot run, or exceeds the storage limit.
        """
        program = self._programs.get(schedule)
        return program or build_program(self.problem, schedule, max_bytes=self._limit_bytes)

    def _cache_program(self, program: KernelProgram, ratio: float) -> None:
        """Store a program for later measurements, and drop the slowest beyond the memory limit."""
        self._programs[program.schedule], self._ratios[program.schedule] = program, ratio
        total = sum(array.nbytes for other in self._programs.values() for array in other.leading_arrays)
        while total > _MAX_PROGRAM_BYTES:
            slowest = max(self._programs, key=lambda schedule: self._ratios[schedule])
            total -= sum(array.nbytes for array in self._programs.pop(slowest).leading_arrays)

    def confirm(self, trial: Trial) -> Trial:
        """Measure the best schedule again, because the best of many measurements is biased.

        Returns the undisturbed trial, the slower one of two undisturbed trials, or the faster one of two
        disturbed trials.

        Raises:
            InputError: The evaluator is not open.
        """
        repeat = self.measure(trial.schedule)
        seconds = {
            part: repeat.seconds.get(part, 0.0) + elapsed_s for part, elapsed_s in trial.seconds.items()
        }
        selected = max(
            trial,
            repeat,
            key=lambda candidate: (
                candidate.error is not None,
                not candidate.disturbed,
                -candidate.latency_ms if candidate.disturbed else candidate.ratio,
            ),
        )
        return replace(self.update_ratio(selected), seconds=seconds, times=trial.times + repeat.times)

    def update_ratio(self, trial: Trial) -> Trial:
        """Return a disturbed trial with its ratio to the fastest sample of the reference so far.

        Other trials are returned as they are.
        """
        if not trial.disturbed or trial.error is not None or math.isinf(self._reference_ms):
            return trial
        return replace(trial, ratio=trial.latency_ms / self._reference_ms)

    def _check_output(self, program: KernelProgram, output: np.ndarray) -> str | None:
        """Compare the output with the library's result in float64; return an error message or None."""
        result, expected = program.extract_result(output), self._expected
        # Chunks of rows stay in the cache; the full difference would be written to memory and read again.
        step = max(1, _COMPARE_CHUNK * len(expected) // max(expected.size, 1))
        chunks = [slice(first, first + step) for first in range(0, len(expected), step)]
        largest = [np.abs(result[part] - expected[part]).max(initial=0.0) for part in chunks]
        # Python's `max` would drop NaN.
        difference = float(np.max(largest, initial=0.0))
        scale = self._scale
        # Not `>`, because NaN is an error, too.
        if not difference <= TOLERANCE[self.problem.dtype] * scale:
            return (
                f"the result differs from the library's by {difference:.3g}; the largest value is {scale:.3g}"
            )
        return None


@contextmanager
def _time_phase(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Record the duration of a phase, also if it fails."""
    start_s = time.perf_counter()
    try:
        yield
    finally:
        seconds[phase] = time.perf_counter() - start_s


@dataclass(frozen=True, kw_only=True)
class _MeasurementBatch:
    """Schedules that one machine of a cluster measures at a time; see `measure_on_cluster`."""

    problem: SparseProblem
    reference: Schedule
    schedules: tuple[Schedule, ...]
    seed: int


def measure_on_cluster(
    cluster: str,
    problem: SparseProblem,
    reference: Schedule,
    schedules: Sequence[Schedule],
    *,
    seed: int,
    threads: int,
) -> Iterator[Trial]:
    """Measure schedules on a cluster and yield the trials in any order.

    Compiled code is cached on each machine.

    Args:
        cluster: Address of a Ray cluster, `"auto"` for the cluster of this machine.
        problem: Problem.
        reference: Reference schedule.
        schedules: Schedules to measure.
        seed: Random seed of the dense inputs.
        threads: CPUs that a batch takes of its machine. The machines should have no more CPUs, because
            batches on one machine disturb each other.

    Raises:
        DeviceError: No cluster is at the address, or a machine has another processor, so times are not
            comparable.
        MissingExtraError: Ray is missing.
        RunError: The reference does not run on a machine.
    """
    batches = [
        _MeasurementBatch(
            problem=problem,
            reference=reference,
            schedules=tuple(schedules[first : first + BATCH_SIZE]),
            seed=seed,
        )
        for first in range(0, len(schedules), BATCH_SIZE)
    ]
    local_cpu = describe_cpu()
    for _, (remote_cpu, trials) in map_unordered(
        _measure_batch, batches, cluster=cluster, cpus_per_task=float(threads)
    ):
        if remote_cpu != local_cpu:
            raise DeviceError(
                f"a machine of cluster {cluster!r} has another processor ({remote_cpu}) than this machine "
                f"({local_cpu}); use a homogeneous cluster"
            )
        yield from trials


def _measure_batch(batch: _MeasurementBatch) -> tuple[str, list[Trial]]:
    with ScheduleEvaluator(batch.problem, batch.reference, seed=batch.seed) as evaluator:
        return describe_cpu(), [evaluator.measure(schedule) for schedule in batch.schedules]
