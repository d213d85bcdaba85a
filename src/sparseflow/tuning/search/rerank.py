"""Final measurement: the best schedules are measured thoroughly and called in this process."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparseflow.errors import RunError
from sparseflow.tuning.codegen.kernel import CompiledKernel, Kernel, LibraryKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.measure.evaluator import ScheduleEvaluator, Trial
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

LIBRARY = "library"
"""Name of the scipy baseline."""

NUM_BY_RATIO = 4
"""Schedules with the best ratios that are measured thoroughly, besides the baselines."""

_NUM_BY_LATENCY = 2
"""Schedules with the lowest latency that are also measured, because ratios to a disturbed reference are too
good.
"""

_MIN_GAIN = 0.02
"""Minimum gain over the best baseline, because the best of many measurements is biased."""

_SHORT_CALL_MS = 0.2
"""Below this latency waking threads may take longer than they save."""

_NUM_TURNS = 3
_TURN_S = 0.3
"""Duration of a turn; threads that start on one CPU are only separated after some 100 ms of continuous work.
"""

_SAMPLE_S = 2e-3

_MAX_REFERENCE_ERROR = 0.1
"""Largest deviation from 1 of the reference's time over its own time."""


@dataclass(frozen=True, kw_only=True)
class RerankResult:
    """Result of the final measurement.

    Attributes:
        kernel: Fastest kernel.
        best_ratio: Its time over the reference's.
        baselines: Baseline name -> time over the reference's.
        kernel_ms: Time of a call of the kernel in this process, milliseconds.
        library_ms: Time of a call of the library in this process, milliseconds.
        warnings: Why the ratios are unreliable, as sentences.
    """

    kernel: Kernel
    best_ratio: float
    baselines: Mapping[str, float]
    kernel_ms: float
    library_ms: float
    warnings: tuple[str, ...]


def rerank_schedules(
    problem: SparseProblem,
    evaluator: ScheduleEvaluator,
    trials: Mapping[Schedule, Trial],
    baselines: Mapping[str, Schedule],
    reference: Schedule,
    *,
    cache_dir: Path | None = None,
) -> RerankResult:
    """Measure the best schedules and the baselines again, and select the fastest kernel.

    In the harness a kernel has the CPUs for itself; in this process its threads may have to be woken. The
    fastest schedule, the fastest with one thread if calls are short, and the library are therefore also timed
    in this process.

    Args:
        problem: Problem.
        evaluator: Open evaluator of the problem.
        trials: Trials of the search.
        baselines: Baseline name -> schedule; all are in `trials`.
        reference: Schedule that the ratios are relative to; one of the baselines.
        cache_dir: Directory of compiled code; see `compile_source`.

    Raises:
        RunError: No schedule runs.
    """
    preferred = set(baselines.values())
    candidates = _select_candidates(trials, preferred)
    thorough = {
        schedule: evaluator.measure(schedule, thorough=True)
        for schedule in dict.fromkeys((*baselines.values(), *candidates))
    }
    winner = min(
        thorough.values(),
        key=lambda trial: trial.ratio * (1.0 - _MIN_GAIN if trial.schedule in preferred else 1.0),
    )
    if winner.error is not None:
        raise RunError(f"no schedule ran in the final measurement: {winner.error}")
    finalists = [winner]
    if winner.latency_ms < _SHORT_CALL_MS and winner.schedule.threads > 1:
        single = [trial for trial in thorough.values() if not trial.error and trial.schedule.threads == 1]
        finalists += sorted(single, key=lambda trial: trial.ratio)[:1]
    kernels: list[Kernel] = [
        *(CompiledKernel(build_program(problem, trial.schedule), cache_dir=cache_dir) for trial in finalists),
        LibraryKernel(problem),
    ]
    times = measure_call_times(kernels, evaluator.inputs)
    ratios = [winner.ratio * (time_ms / times[0]) for time_ms in times]
    baseline_ratios = {name: thorough[schedule].ratio for name, schedule in baselines.items()}
    baseline_ratios[LIBRARY] = ratios[-1]
    best = min(ratios)
    index = len(kernels) - 1 if best == ratios[-1] else ratios.index(best)
    kernel = kernels[index]
    kernel.speedup = 1.0 if kernel is kernels[-1] else min(baseline_ratios.values()) / best
    return RerankResult(
        kernel=kernel,
        best_ratio=best,
        baselines=baseline_ratios,
        kernel_ms=times[index],
        library_ms=times[-1],
        warnings=tuple(_find_disturbances(thorough.values(), thorough[reference].ratio)),
    )


def _find_disturbances(trials: Collection[Trial], reference_ratio: float) -> Iterator[str]:
    """Yield a sentence for each sign that other work disturbed the final measurements."""
    num_disturbed = sum(trial.disturbed for trial in trials)
    if num_disturbed:
        yield (
            f"other processes disturbed {num_disturbed} of {len(trials)} final measurements; tune again on "
            "an idle machine"
        )
    if not abs(reference_ratio - 1.0) <= _MAX_REFERENCE_ERROR:
        yield (
            f"the reference takes {reference_ratio:.2f} times its own time, expected 0.9 to 1.1; the ratios "
            "are unreliable, so tune again on an idle machine"
        )


def _select_candidates(trials: Mapping[Schedule, Trial], baselines: Collection[Schedule]) -> list[Schedule]:
    """Select schedules with the best ratios, with the lowest latencies, and the best with one thread."""
    ranked = sorted((trial for trial in trials.values() if not trial.error), key=lambda trial: trial.ratio)
    by_latency = sorted(ranked, key=lambda trial: trial.latency_ms)
    candidates = [trial.schedule for trial in ranked if trial.schedule not in baselines][:NUM_BY_RATIO]
    candidates += [trial.schedule for trial in by_latency if trial.schedule not in (*baselines, *candidates)][
        :_NUM_BY_LATENCY
    ]
    if ranked and ranked[0].latency_ms < _SHORT_CALL_MS:
        candidates += [trial.schedule for trial in ranked if trial.schedule.threads == 1][:1]
    return candidates


def measure_call_times(kernels: Sequence[Kernel], inputs: tuple[np.ndarray, ...]) -> list[float]:
    """Measure the time of a call of each kernel in this process, milliseconds.

    Kernels take turns; the result is the best turn, by the lower quartile of its samples.
    """
    counts = []
    for kernel in kernels:
        kernel.compute(*inputs)
        counts.append(max(1, int(_SAMPLE_S / max(_time_call(kernel, inputs, 1), 1e-7))))
    best = [math.inf] * len(kernels)
    for _ in range(_NUM_TURNS):
        for index, (kernel, count) in enumerate(zip(kernels, counts, strict=True)):
            samples = []
            start = time.perf_counter()
            while not samples or time.perf_counter() - start < _TURN_S:
                samples.append(1e3 * _time_call(kernel, inputs, count))
            best[index] = min(best[index], sorted(samples)[len(samples) // 4])
    return best


def _time_call(kernel: Kernel, inputs: tuple[np.ndarray, ...], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        kernel.compute(*inputs)
    return (time.perf_counter() - start) / count
