"""Final measurement: the best schedules are measured in rounds and called in this process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparseflow.core.telemetry.cpu_contention import MAX_OTHER_SHARE, CpuUsageMonitor
from sparseflow.errors import RunError
from sparseflow.tuning.codegen.kernel import CompiledKernel, Kernel, LibraryKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.measure.evaluator import ScheduleEvaluator, Trial, estimate_thorough_s
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search.deadline import Deadline

LIBRARY = "library"
"""Name of the scipy baseline."""

NUM_BY_RATIO = 4
"""Schedules with the best ratios that are measured thoroughly, besides the baselines."""

_NUM_BY_LATENCY = 2
"""Schedules with the lowest latency that are also measured, because ratios to a disturbed reference are too
good.
"""

_NUM_PROCESSES = 3
"""Undisturbed measurements of each finalist, in a process each."""

_ROUNDS_PER_PROCESS = 2
"""Maximum number of measurements of a finalist over `_NUM_PROCESSES`, if some are disturbed."""

_CLOSE = 1.15
"""Finalists within this factor of the best are measured in every round, others once."""

_MIN_GAIN = 0.02
"""Minimum gain over the best baseline, because the best of many measurements is biased."""

_SHORT_CALL_MS = 0.2
"""Below this latency waking threads may take longer than they save."""

CALL_OVERHEAD_MS = 3e-3
"""Time of a call from Python besides the kernel."""

_NUM_TURNS = 3
_TURN_S = 0.3
"""Duration of a turn; threads that start on one CPU are only separated after some 100 ms of continuous work.
"""

_SAMPLE_S = 2e-3

_NUM_CALLS = 3
"""Calls of each kernel in the shortest measurement in this process."""

_LONG_CALL_S = 0.1
"""A first call that takes longer is a sample."""

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
    deadline: Deadline,
    cache_dir: Path | None = None,
) -> RerankResult:
    """Measure the best schedules and the baselines again, and select the fastest kernel.

    Finalists are measured in rounds, the most promising first, and those that are not much slower than the
    best up to three times. A disturbed measurement is repeated, and counts only if all of a schedule are
    disturbed. If the reference takes longer or shorter than its own time, everything is measured once more.
    All of this ends with the deadline. A baseline or a confirmed trial without a final measurement counts
    with the ratio of the search.

    In the harness a kernel has the CPUs for itself; in this process its threads may have to be woken. The
    fastest schedule, the fastest with one thread if calls are short, and the library are therefore also timed
    in this process. If other processes use the CPUs, a call takes at most the time of the harness and the
    overhead of a call.

    Args:
        problem: Problem.
        evaluator: Open evaluator of the problem.
        trials: Trials of the search.
        baselines: Baseline name -> schedule; those without a trial are ignored.
        reference: Schedule that the ratios are relative to; one of the baselines, in `trials`.
        deadline: Time limit.
        cache_dir: Directory of compiled code; see `compile_source`.

    Raises:
        RunError: No schedule runs.
    """
    measured = {name: schedule for name, schedule in baselines.items() if schedule in trials}
    preferred = set(measured.values())
    rounds = _FinalRounds(evaluator, trials, preferred, reference, deadline)
    final = rounds.measure()
    confirmed = {
        schedule: trial for schedule, trial in trials.items() if schedule in preferred or trial.times > 1
    }
    pool = {schedule: evaluator.update_ratio(trial) for schedule, trial in (confirmed | final).items()}
    winner = min(
        pool.values(),
        key=lambda trial: trial.ratio * (1.0 - _MIN_GAIN if trial.schedule in preferred else 1.0),
    )
    if winner.error is not None:
        raise RunError(f"no schedule ran in the final measurement: {winner.error}")
    finalists = [winner]
    if winner.latency_ms < _SHORT_CALL_MS and winner.schedule.threads > 1:
        single = [trial for trial in pool.values() if not trial.error and trial.schedule.threads == 1]
        finalists += sorted(single, key=lambda trial: trial.ratio)[:1]
    kernels: list[Kernel] = []
    for trial in finalists:
        # The evaluator computes with other values if all values are equal.
        is_same = evaluator.problem is problem
        program = evaluator.build(trial.schedule) if is_same else build_program(problem, trial.schedule)
        kernels.append(CompiledKernel(program, cache_dir=cache_dir))
    kernels.append(LibraryKernel(problem))
    times, is_disturbed = measure_call_times(kernels, evaluator.inputs, max_s=deadline.remaining_s)
    if is_disturbed:
        # All threads are rarely undisturbed in the same call; the library has only one.
        for index, trial in enumerate(finalists):
            times[index] = min(times[index], trial.latency_ms + CALL_OVERHEAD_MS)
    ratios = [winner.ratio * (time_ms / times[0]) for time_ms in times]
    baseline_ratios = {name: pool[schedule].ratio for name, schedule in measured.items()}
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
        warnings=tuple(_find_disturbances(final.values() or pool.values(), pool[reference].ratio)),
    )


def estimate_rerank_s(
    trials: Mapping[Schedule, Trial],
    baselines: Iterable[Schedule],
    reference: Schedule,
    *,
    library_s: float,
    max_s: float,
) -> float:
    """Estimate the seconds that a session should reserve for `rerank_schedules`.

    They allow all rounds, but are at most `max_s`, and at least what one measurement of the best schedule and
    the reference and some calls in this process take.

    Args:
        trials: Trials so far; with the reference.
        baselines: Schedules of the baselines.
        reference: Reference schedule.
        library_s: Time of one call of the library, seconds.
        max_s: Limit beyond that minimum, seconds.
    """
    preferred = {schedule for schedule in baselines if schedule in trials}
    costs_s = [
        estimate_thorough_s(trials[schedule]) for schedule in _select_finalists(trials, preferred, reference)
    ]
    full_s = _NUM_PROCESSES * sum(costs_s) + 3 * _NUM_TURNS * _TURN_S
    return max(sum(costs_s[:2]) + _estimate_calls_s(trials[reference], library_s), min(full_s, max_s))


def _estimate_calls_s(trial: Trial, library_s: float) -> float:
    """Estimate the time of the shortest measurement in this process from the reference's trial, seconds."""
    return _NUM_CALLS * (2e-3 * trial.latency_ms + library_s)


class _FinalRounds:
    """Measurements of the finalists in turns.

    Args:
        evaluator: Open evaluator.
        trials: Trials of the search.
        baselines: Baselines with a trial.
        reference: Reference schedule.
        deadline: Time limit.
    """

    def __init__(
        self,
        evaluator: ScheduleEvaluator,
        trials: Mapping[Schedule, Trial],
        baselines: Collection[Schedule],
        reference: Schedule,
        deadline: Deadline,
    ) -> None:
        self._evaluator, self._deadline = evaluator, deadline
        self._baselines, self._reference = baselines, reference
        self._finalists = _select_finalists(trials, baselines, reference)
        self._costs_s = {schedule: estimate_thorough_s(trials[schedule]) for schedule in self._finalists}
        self._reserve_s = _estimate_calls_s(trials[reference], evaluator.library_s)

    def measure(self) -> dict[Schedule, Trial]:
        """Measure the finalists; a second time if the reference's ratio to itself is wrong."""
        start_s = self._deadline.elapsed_s
        final = self._measure_once()
        duration_s = self._deadline.elapsed_s - start_s
        if self._reference not in final:
            return final
        error = abs(final[self._reference].ratio - 1.0)
        if error > _MAX_REFERENCE_ERROR and self._deadline.allows(duration_s + self._reserve_s):
            repeated = self._measure_once()
            if self._reference in repeated and abs(repeated[self._reference].ratio - 1.0) <= error:
                failed = {schedule: trial for schedule, trial in final.items() if trial.error is not None}
                final = repeated | failed
        return final

    def _measure_once(self) -> dict[Schedule, Trial]:
        measurements: dict[Schedule, list[Trial]] = {}
        merged: dict[Schedule, Trial] = {}
        for _ in range(_ROUNDS_PER_PROCESS * _NUM_PROCESSES):
            pending = self._select_unfinished(measurements, merged)
            for schedule in pending:
                if self._deadline.allows(self._costs_s[schedule] + self._reserve_s):
                    trial = self._evaluator.measure(schedule, thorough=True)
                    measurements.setdefault(schedule, []).append(trial)
                    self._costs_s[schedule] = sum(trial.seconds.values())
            merged = {
                schedule: self._evaluator.update_ratio(_merge(trials))
                for schedule, trials in measurements.items()
            }
        return merged

    def _select_unfinished(
        self, measurements: Mapping[Schedule, Sequence[Trial]], merged: Mapping[Schedule, Trial]
    ) -> list[Schedule]:
        """Select the finalists to measure in the next round."""
        if not merged:
            return self._finalists
        limit = _CLOSE * min(trial.ratio for trial in merged.values())
        baselines = [schedule for schedule in merged if schedule in self._baselines]
        precise = {self._reference, *sorted(baselines, key=lambda schedule: merged[schedule].ratio)[:1]}
        return [
            schedule
            for schedule, trial in merged.items()
            if trial.error is None
            and (trial.ratio <= limit or schedule in precise)
            and sum(not other.disturbed for other in measurements[schedule]) < _NUM_PROCESSES
        ]


def _merge(trials: Sequence[Trial]) -> Trial:
    """Merge measurements of one schedule: disturbed ones count only if all are disturbed."""
    failed = next((trial for trial in trials if trial.error is not None), None)
    if failed is not None:
        return failed
    ratios = [trial.ratio for trial in trials if not trial.disturbed]
    return replace(
        trials[0],
        latency_ms=min(trial.latency_ms for trial in trials),
        ratio=statistics.median(ratios) if ratios else min(trial.ratio for trial in trials),
        disturbed=not ratios,
        times=len(trials),
    )


def _find_disturbances(trials: Collection[Trial], reference_ratio: float) -> Iterator[str]:
    """Yield a sentence for each sign that other work disturbed the final measurements."""
    num_disturbed = sum(trial.disturbed for trial in trials)
    if num_disturbed:
        yield (
            f"other processes disturbed {num_disturbed} of {len(trials)} final measurements, whose ratios "
            "compare the fastest samples; tune again on an idle machine"
        )
    if not abs(reference_ratio - 1.0) <= _MAX_REFERENCE_ERROR:
        yield (
            f"the reference takes {reference_ratio:.2f} times its own time, expected 0.9 to 1.1; the ratios "
            "are unreliable, so tune again on an idle machine"
        )


def _select_finalists(
    trials: Mapping[Schedule, Trial], baselines: Collection[Schedule], reference: Schedule
) -> list[Schedule]:
    """Select what is measured again: the reference, then the others by ratio.

    These are the baselines that ran and the schedules with the best ratios, with the lowest latencies, and
    the best with one thread.
    """
    ranked = sorted((trial for trial in trials.values() if not trial.error), key=lambda trial: trial.ratio)
    by_latency = sorted(ranked, key=lambda trial: trial.latency_ms)
    candidates = [trial.schedule for trial in ranked if trial.schedule not in baselines][:NUM_BY_RATIO]
    candidates += [trial.schedule for trial in by_latency if trial.schedule not in (*baselines, *candidates)][
        :_NUM_BY_LATENCY
    ]
    if ranked and ranked[0].latency_ms < _SHORT_CALL_MS:
        candidates += [trial.schedule for trial in ranked if trial.schedule.threads == 1][:1]
    finalists = dict.fromkeys((reference, *baselines, *candidates))
    return sorted(
        (schedule for schedule in finalists if trials[schedule].error is None),
        key=lambda schedule: (schedule != reference, trials[schedule].ratio),
    )


def measure_call_times(
    kernels: Sequence[Kernel], inputs: tuple[np.ndarray, ...], *, max_s: float = math.inf
) -> tuple[list[float], bool]:
    """Measure the time of a call of each kernel in this process, milliseconds.

    Kernels take turns; the result is the best turn, by the lower quartile of its samples. If other processes
    use the CPUs, it is the fastest sample.

    Args:
        kernels: Kernels.
        inputs: Dense inputs.
        max_s: Approximate time limit, seconds; each kernel has at least one sample.

    Returns:
        Time of each kernel, and whether other processes used the CPUs.
    """
    monitor, start_s = CpuUsageMonitor(), time.perf_counter()
    counts: list[int] = []
    turns: list[list[list[float]]] = [[] for _ in kernels]
    for kernel, finished in zip(kernels, turns, strict=True):
        duration_s = _time_call(kernel, inputs, 1)
        if duration_s < _LONG_CALL_S:
            duration_s = _time_call(kernel, inputs, 1)
        else:
            finished.append([1e3 * duration_s])
        counts.append(max(1, int(_SAMPLE_S / max(duration_s, 1e-7))))
    turn_s = min(_TURN_S, max_s / (_NUM_TURNS * len(kernels)))
    for _ in range(_NUM_TURNS):
        if all(turns) and time.perf_counter() - start_s > max_s:
            break
        for kernel, count, finished in zip(kernels, counts, turns, strict=True):
            samples: list[float] = []
            turn_start_s = time.perf_counter()
            while not samples or time.perf_counter() - turn_start_s < turn_s:
                samples.append(1e3 * _time_call(kernel, inputs, count))
            finished.append(sorted(samples))
    other_share = monitor.measure_other_share()
    is_disturbed = other_share is not None and other_share > MAX_OTHER_SHARE
    times = [
        min(samples[0 if is_disturbed else len(samples) // 4] for samples in finished) for finished in turns
    ]
    return times, is_disturbed


def _time_call(kernel: Kernel, inputs: tuple[np.ndarray, ...], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        kernel.compute(*inputs)
    return (time.perf_counter() - start) / count
