"""Measuring schedules for one problem: built, compiled, run in a process of its own, checked, timed."""

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
from sparseflow.tuning.codegen.program import Program, build
from sparseflow.tuning.measure.runner import Job, Session
from sparseflow.tuning.schedule.formats import LIMIT_BYTES
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule

TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}
"""Largest difference from scipy in float64, relative to the largest result."""

_ROOM = 32
"""Storage that a schedule may take, over what the matrix takes in coordinates."""

_LEAST_BYTES = 64 << 20

_COMPARED = 1 << 16
"""Results that are compared at a time."""


_QUICKLY = {"repeats": 7, "min_time_s": 0.02, "max_time_s": 0.25, "slower": 10.0}
_THOROUGHLY = {"repeats": 30, "min_time_s": 0.1, "max_time_s": 0.6}
"""How trials are measured. A first run is slow for the reference too: 10 times that is 20 times and more of
what it takes when it is warm, and no search needs to know how much more."""


_PROCESSES = 3
"""Processes of a thorough measurement."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What came of one schedule.

    Attributes:
        schedule: It.
        latency_ms: The fastest sample, milliseconds; infinite where it failed.
        ratio: Its time over the reference's, the median over pairs taken in turn; infinite where it failed.
        error: Why it failed; None where it did not.
        disturbed: Whether others used the CPUs meanwhile or the machine's speed changed.
        seconds: Part ("build", "compile", "measure") -> how long it took.
        times: How often it was measured.
    """

    schedule: Schedule
    latency_ms: float = math.inf
    ratio: float = math.inf
    error: str | None = None
    disturbed: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    times: int = 1

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; no number where it failed."""
        worked = self.error is None
        return {
            "schedule": str(self.schedule),
            "latency_ms": self.latency_ms if worked else None,
            "ratio": self.ratio if worked else None,
            "error": self.error,
            "disturbed": self.disturbed,
            "seconds": self.seconds,
            "times": self.times,
        }


def job_of(program: Program, inputs: tuple[np.ndarray, ...], *, cache: Path | None = None) -> Job:
    """A program as the runner takes it, compiled."""
    return Job(
        library=program.compiled(cache=cache),
        inputs=program.arrays(inputs),
        output_shape=program.output_shape,
        output_dtype=program.problem.dtype,
    )


class Evaluator:
    """Measures schedules for one problem against one of them; use it in a `with` block.

    Args:
        problem: What is computed.
        reference: What every schedule is timed beside.
        seed: What the dense inputs are drawn from.
        cache: Folder for compiled code; see `compile_source`.

    Raises:
        DeviceError, RunError: On entering: there is no C compiler, or the reference does not run.
    """

    def __init__(
        self, problem: Problem, reference: Schedule, *, seed: int = 0, cache: Path | None = None
    ) -> None:
        self.problem = problem
        self.inputs = problem.draw(seed)
        self._cache = cache
        self._stack = ExitStack()
        self._reference = reference
        self._expected = problem.reference(self.inputs)
        self._scale = float(np.abs(self._expected).max(initial=0.0)) or 1.0
        stored = problem.matrix.nnz * (8 + problem.dtype.itemsize)
        self._limit_bytes = min(max(_ROOM * stored, _LEAST_BYTES), LIMIT_BYTES)
        self._session: Session | None = None

    def __enter__(self) -> Evaluator:
        program = build(self.problem, self._reference)
        session = Session(self._job(program), keep=self.inputs, cache=self._cache)
        self._session = self._stack.enter_context(session)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None
        self._stack.close()

    def measure(self, schedule: Schedule, *, thorough: bool = False) -> Trial:
        """Try one schedule; what goes wrong with it is told in the trial.

        Args:
            schedule: What to try.
            thorough: Take many samples, to choose among the best, and in several processes: where its arrays
                lie in memory makes a kernel some percent faster or slower, and each process has others.

        Raises:
            InputError: Outside of the `with` block.
        """
        if self._session is None:
            raise InputError("an evaluator measures only inside its `with` block")
        seconds: dict[str, float] = {}
        clock = _Clock(seconds)
        try:
            with clock("build"):
                program = build(self.problem, schedule, limit_bytes=self._limit_bytes)
            with clock("compile"):
                job = self._job(program)
        except (InputError, RunError) as error:
            return Trial(schedule=schedule, error=str(error), seconds=seconds)
        with clock("measure"):
            settings, processes = (_THOROUGHLY, _PROCESSES) if thorough else (_QUICKLY, 1)
            found = []
            for _ in range(processes):
                one = self._session.measure(job, **settings)
                if one.given_up:  # or was it only held up?
                    one = self._session.measure(job, **settings)
                wrong = one.error or self._wrong(program, one.output)
                if wrong is not None:
                    return Trial(schedule=schedule, error=wrong, seconds=seconds)
                found.append(one)
        return Trial(
            schedule=schedule,
            latency_ms=min(each.best_ms for each in found),
            ratio=statistics.median(each.ratio for each in found),
            disturbed=any(each.contended or each.drifted for each in found),
            seconds=seconds,
        )

    def confirmed(self, trial: Trial) -> Trial:
        """Measure once more what did well, for of many the luckiest looks best.

        What was not disturbed is believed rather than what was, and else the slower one.

        Raises:
            InputError: Outside of the `with` block.
        """
        again = self.measure(trial.schedule)
        seconds = {part: again.seconds.get(part, 0.0) + took for part, took in trial.seconds.items()}
        believed = max(trial, again, key=lambda one: (one.error is not None, not one.disturbed, one.ratio))
        return replace(believed, seconds=seconds, times=trial.times + again.times)

    def _job(self, program: Program) -> Job:
        return job_of(program, self.inputs, cache=self._cache)

    def _wrong(self, program: Program, output: np.ndarray) -> str | None:
        """How the output differs from the library's in float64."""
        found, expected = program.result(output), self._expected
        # By rows that fit a cache: the difference as a whole would be written to memory and read again.
        step = max(1, _COMPARED * len(expected) // max(expected.size, 1))
        parts = [slice(first, first + step) for first in range(0, len(expected), step)]
        largest = [np.abs(found[part] - expected[part]).max(initial=0.0) for part in parts]
        # `max` of Python's own would drop what is not a number.
        difference = float(np.max(largest, initial=0.0))
        scale = self._scale
        # Not `>`: what is not a number is wrong, too.
        if not difference <= TOLERANCE[self.problem.dtype] * scale:
            return (
                f"its result differs from the library's by {difference:.3g}, where the largest is {scale:.3g}"
            )
        return None


class _Clock:
    """Adds up how long parts take."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def __call__(self, part: str) -> _Clock:
        self._part = part
        return self

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._part] = time.perf_counter() - self._begin
