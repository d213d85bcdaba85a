"""The end of a search: the best are measured thoroughly, and called as their user will call them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparseflow.errors import RunError
from sparseflow.tuning.codegen.kernel import CompiledKernel, Kernel, LibraryKernel
from sparseflow.tuning.codegen.program import build
from sparseflow.tuning.measure.evaluator import Evaluator, Trial
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule

LIBRARY = "library"
"""Name of the baseline that is scipy."""

FINALISTS = 4
"""Schedules that are measured thoroughly, besides the baselines, for their ratios."""

_QUICKEST = 2
"""Likewise, for their times: what ran beside a reference that something slowed down has too good a ratio."""

_MARGIN = 0.02
"""What was found must be so much better than the best baseline: of equals, the luckiest looks better."""

_SHORT_MS = 0.2
"""Below this, waking up threads may take longer than they save."""

_TURNS = 3
_TURN_S = 0.3
"""How long each is called at a time: threads that begin on one CPU are parted only after some tenths of a
second of work without a pause."""

_SAMPLE_S = 2e-3


@dataclass(frozen=True, kw_only=True)
class Final:
    """Who won.

    Attributes:
        kernel: The fastest.
        best: Its time over the reference's.
        baselines: Name -> likewise.
    """

    kernel: Kernel
    best: float
    baselines: Mapping[str, float]


def finals(
    problem: Problem,
    evaluator: Evaluator,
    found: Mapping[Schedule, Trial],
    baselines: Mapping[str, Schedule],
    *,
    cache: Path | None = None,
) -> Final:
    """Measure the best and the baselines again, and choose.

    In a process of its own a kernel has the CPUs for itself; here, where it will be called, its threads may
    have to be woken up. The fastest schedule, the fastest with one thread if calls are short, and the library
    are therefore called here, too, and that decides between them.

    Args:
        problem: What is computed.
        evaluator: Of that problem, open.
        found: What the search measured.
        baselines: Name -> schedule, all of them in `found`.
        cache: Folder for compiled code; see `compile_source`.

    Raises:
        RunError: None of them runs.
    """
    known = set(baselines.values())
    ranked = sorted((trial for trial in found.values() if trial.error is None), key=lambda one: one.ratio)
    quickest = sorted(ranked, key=lambda one: one.latency_ms)
    others = [trial.schedule for trial in ranked if trial.schedule not in known][:FINALISTS]
    others += [trial.schedule for trial in quickest if trial.schedule not in (*known, *others)][:_QUICKEST]
    alone = next((trial.schedule for trial in ranked if trial.schedule.threads == 1), None)
    if alone is not None and ranked[0].latency_ms < _SHORT_MS:
        others.append(alone)
    thorough = {
        schedule: evaluator.measure(schedule, thorough=True)
        for schedule in dict.fromkeys((*baselines.values(), *others))
    }
    winner = min(
        thorough.values(), key=lambda one: one.ratio * (1.0 - _MARGIN if one.schedule in known else 1.0)
    )
    if winner.error is not None:
        raise RunError(f"no schedule ran when it was measured again: {winner.error}")
    chosen = [winner.schedule]
    if winner.latency_ms < _SHORT_MS and winner.schedule.threads > 1:
        single = [one for one in thorough.values() if one.error is None and one.schedule.threads == 1]
        chosen += [min(single, key=lambda one: one.ratio).schedule] if single else []
    kernels: list[Kernel] = [CompiledKernel(build(problem, each), cache=cache) for each in chosen]
    times = call_times([*kernels, LibraryKernel(problem)], evaluator.inputs)
    ratios = [winner.ratio * (each / times[0]) for each in times]
    told = {name: thorough[schedule].ratio for name, schedule in baselines.items()} | {LIBRARY: ratios[-1]}
    best = min(ratios)
    if best == ratios[-1]:
        return Final(kernel=LibraryKernel(problem, speedup=1.0), best=best, baselines=told)
    kernel = kernels[ratios.index(best)]
    kernel.speedup = min(told.values()) / best
    return Final(kernel=kernel, best=best, baselines=told)


def call_times(kernels: Sequence[Kernel], inputs: tuple[np.ndarray, ...]) -> list[float]:
    """Milliseconds that a call of each takes in this process, one after the other without a pause.

    They take turns; of each it is its best turn, the lower quartile of that one's samples.
    """
    counts = []
    for kernel in kernels:
        kernel.compute(*inputs)
        counts.append(max(1, int(_SAMPLE_S / max(_sample(kernel, inputs, 1), 1e-7))))
    best = [math.inf] * len(kernels)
    for _ in range(_TURNS):
        for place, (kernel, count) in enumerate(zip(kernels, counts, strict=True)):
            samples = []
            begin = time.perf_counter()
            while not samples or time.perf_counter() - begin < _TURN_S:
                samples.append(1e3 * _sample(kernel, inputs, count))
            best[place] = min(best[place], sorted(samples)[len(samples) // 4])
    return best


def _sample(kernel: Kernel, inputs: tuple[np.ndarray, ...], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        kernel.compute(*inputs)
    return (time.perf_counter() - begin) / count
