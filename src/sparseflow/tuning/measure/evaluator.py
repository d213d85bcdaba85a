"""Measurement of schedules of one problem: build, compile, check the result, time."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from sparseflow.errors import InputError, RunError
from sparseflow.tuning.codegen.program import KernelProgram, build_program
from sparseflow.tuning.measure.runner import KernelJob, MeasurementSession
from sparseflow.tuning.schedule.formats import MAX_STORAGE_BYTES
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}
"""dtype -> largest difference from scipy in float64, relative to the largest result."""

_MAX_STORAGE_RATIO = 32
"""Storage limit of a schedule as a multiple of the coordinate format."""

_MIN_STORAGE_BYTES = 64 << 20

_COMPARE_CHUNK = 1 << 16
"""Results that are compared at a time."""


_QUICK_SETTINGS = {"repeats": 7, "min_time_s": 0.02, "max_time_s": 0.25, "max_slowdown": 10.0}
_THOROUGH_SETTINGS = {"repeats": 30, "min_time_s": 0.1, "max_time_s": 0.6}
"""Settings of measurements. The first run of the reference is slow, too: 10 times its first run is at least
20 times its warm time, and slower candidates need no exact time."""


_THOROUGH_PROCESSES = 3
"""Processes of a thorough measurement."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Measurement of one schedule.

    Attributes:
        schedule: Schedule.
        latency_ms: Fastest sample, milliseconds; infinite if it failed.
        ratio: Median of schedule time / reference time over paired samples; infinite if it failed.
        error: Error message; None if it succeeded.
        disturbed: Whether other processes used the CPUs or the speed of the machine changed.
        seconds: Phase ("build", "compile", "measure") -> duration, seconds.
        times: Number of measurements.
    """

    schedule: Schedule
    latency_ms: float = math.inf
    ratio: float = math.inf
    error: str | None = None
    disturbed: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    times: int = 1

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types; times are None if it failed."""
        succeeded = self.error is None
        return {
            "schedule": str(self.schedule),
            "latency_ms": self.latency_ms if succeeded else None,
            "ratio": self.ratio if succeeded else None,
            "error": self.error,
            "disturbed": self.disturbed,
            "seconds": self.seconds,
            "times": self.times,
        }


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

    Raises:
        DeviceError, RunError: On entry: there is no C compiler, or the reference does not run.
    """

    def __init__(
        self, problem: SparseProblem, reference: Schedule, *, seed: int = 0, cache_dir: Path | None = None
    ) -> None:
        self.problem = problem
        self.inputs = problem.generate_inputs(seed)
        self._cache_dir = cache_dir
        self._stack = ExitStack()
        self._reference = reference
        self._expected = problem.compute_reference(self.inputs)
        self._scale = float(np.abs(self._expected).max(initial=0.0)) or 1.0
        stored = problem.matrix.nnz * (8 + problem.dtype.itemsize)
        self._limit_bytes = min(max(_MAX_STORAGE_RATIO * stored, _MIN_STORAGE_BYTES), MAX_STORAGE_BYTES)
        self._session: MeasurementSession | None = None

    def __enter__(self) -> ScheduleEvaluator:
        program = build_program(self.problem, self._reference)
        session = MeasurementSession(
            self._make_job(program), shared_arrays=self.inputs, cache_dir=self._cache_dir
        )
        self._session = self._stack.enter_context(session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None
        self._stack.close()

    def measure(self, schedule: Schedule, *, thorough: bool = False) -> Trial:
        """Measure one schedule; its errors are part of the trial.

        Args:
            schedule: Schedule.
            thorough: Take many samples in several processes, to compare the best schedules. The memory layout
                of a process changes the time of a kernel by some percent.

        Raises:
            InputError: The evaluator is not open.
        """
        if self._session is None:
            raise InputError("the evaluator is not open; use it in a `with` block")
        seconds: dict[str, float] = {}
        clock = _PhaseTimer(seconds)
        try:
            with clock("build"):
                program = build_program(self.problem, schedule, max_bytes=self._limit_bytes)
            with clock("compile"):
                job = self._make_job(program)
        except (InputError, RunError) as error:
            return Trial(schedule=schedule, error=str(error), seconds=seconds)
        with clock("measure"):
            settings, processes = (
                (_THOROUGH_SETTINGS, _THOROUGH_PROCESSES) if thorough else (_QUICK_SETTINGS, 1)
            )
            timings = []
            for _ in range(processes):
                timing = self._session.measure(job, **settings)
                if timing.too_slow:  # repeated, because a disturbance can have the same effect
                    timing = self._session.measure(job, **settings)
                wrong = timing.error or self._check_output(program, timing.output)
                if wrong is not None:
                    return Trial(schedule=schedule, error=wrong, seconds=seconds)
                timings.append(timing)
        return Trial(
            schedule=schedule,
            latency_ms=min(timing.min_ms for timing in timings),
            ratio=statistics.median(timing.ratio for timing in timings),
            disturbed=any(timing.contended or timing.drifted for timing in timings),
            seconds=seconds,
        )

    def confirm(self, trial: Trial) -> Trial:
        """Measure the best schedule again, because the best of many measurements is biased.

        Returns the undisturbed trial, or the slower one if both or none are disturbed.

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
            key=lambda candidate: (candidate.error is not None, not candidate.disturbed, candidate.ratio),
        )
        return replace(selected, seconds=seconds, times=trial.times + repeat.times)

    def _make_job(self, program: KernelProgram) -> KernelJob:
        return make_job(program, self.inputs, cache_dir=self._cache_dir)

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


class _PhaseTimer:
    """Records the duration of phases."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def __call__(self, part: str) -> _PhaseTimer:
        self._part = part
        return self

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._part] = time.perf_counter() - self._start
