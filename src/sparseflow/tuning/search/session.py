"""The fastest schedule for one matrix: baselines, then a search, then a run-off between the best."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.core.device import describe_cpu
from sparseflow.core.progress import Progress
from sparseflow.errors import DeviceError, InputError, RunError
from sparseflow.tuning.codegen.compile import compiler
from sparseflow.tuning.codegen.kernel import Kernel, LibraryKernel
from sparseflow.tuning.measure.cluster import LOT, measure_on
from sparseflow.tuning.measure.evaluator import Evaluator, Trial
from sparseflow.tuning.measure.trial_log import kept
from sparseflow.tuning.model.cost_model import BoostedTrees, Scorer
from sparseflow.tuning.model.features import Features
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import operator as operator_of
from sparseflow.tuning.schedule.presets import REFERENCE, presets
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import Space
from sparseflow.tuning.search.base import Strategy
from sparseflow.tuning.search.guided import GUIDED, Guided
from sparseflow.tuning.search.registry import strategy
from sparseflow.tuning.search.rerank import finals

Prior = Callable[[Problem, int], Scorer]

METHOD = "guided-evolutionary"
"""How to search by default."""

_RUN_OFF = 0.15
"""Share of the time that is kept for it."""

_NEARLY = 1.1
"""What was disturbed is confirmed if it took at most so many times as long as the best."""

_SMALL = 2_000_000
"""Products below which one thread may well be faster than several."""

_REPEATS = 50
"""Proposals in a row that were measured before, after which a search is over."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What tuning found.

    Attributes:
        kernel: The fastest, ready to be called.
        trials: Everything that was measured, in that order, baselines first and the run-off not among them.
        baselines: Name -> ratio to the reference, thoroughly measured; scipy as `"library"`.
        best: Ratio of the kernel to the reference, thoroughly measured.
        seconds: Part ("propose", "build", "compile", "measure", "rest") -> how long it took this time.
    """

    kernel: Kernel
    trials: tuple[Trial, ...]
    baselines: Mapping[str, float]
    best: float
    seconds: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        schedule = self.kernel.schedule
        return {
            "schedule": None if schedule is None else str(schedule),
            "speedup": self.kernel.speedup,
            "best": self.best,
            "baselines": dict(self.baselines),
            "trials": [trial.to_dict() for trial in self.trials],
            "seconds": dict(self.seconds),
        }


def tune(operator: str, matrix: Any, *, n_cols: int | None = None, **options: Any) -> Kernel:
    """The fastest kernel for a matrix; arguments and errors are `explore`'s."""
    return explore(operator, matrix, n_cols=n_cols, **options).kernel


def explore(
    operator: str,
    matrix: Any,
    *,
    n_cols: int | None = None,
    budget_s: float = 60.0,
    trials: int | None = None,
    method: str = METHOD,
    prior: Prior | None = None,
    threads: int | None = None,
    dtype: np.dtype | type | None = None,
    seed: int = 0,
    folder: Path | str | None = None,
    cache: Path | None = None,
    cluster: str | None = None,
    machines: int = 1,
    progress: Progress | None = None,
) -> Tuned:
    """Search the schedules of an operator for one matrix; what experts write by hand is always measured too.

    Args:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: A matrix of scipy.sparse, a sparse tensor of torch, or what `as_coo` takes besides.
        n_cols: Columns of the dense operands; None for SpMV.
        budget_s: Seconds that all of it may take, about.
        trials: Schedules to measure at most, the baselines not counted. What looks best is measured twice.
        method: How to search, one of `STRATEGIES`.
        prior: For a guided method, what is thought of the schedules of a problem, for so many threads,
            before anything is measured, such as `functools.partial(net.scoring.scorer, network)`; by default
            what the network that comes with SparseFlow thinks. Boosted trees learn from this search what to
            add to it.
        threads: Threads to use; by default one for each CPU that this process may run on.
        dtype: float32 or float64; by default the matrix's own.
        seed: What the search and the dense inputs are drawn from.
        folder: Where every trial is written as it comes; a search that was stopped goes on from there.
        cache: Folder for compiled code; see `compile_source`.
        cluster: Address of a Ray cluster that measures what the search proposes, `"auto"` for the one that
            this machine belongs to; the baselines and the end are measured here.
        machines: How many of its machines to keep busy.
        progress: Called with (what was found, fraction done).

    Raises:
        InputError: An argument cannot be used, or `folder` holds the trials of another problem.
        RunError: The reference does not run, or another process writes into `folder`.
        DeviceError: There is no cluster at the address, or its machines have other processors.
        FileFormatError: A line of `folder`'s trials is damaged.
    """
    begun = time.monotonic()
    if not budget_s > 0 or (trials is not None and trials < 0) or seed < 0 or machines < 1:
        raise InputError(
            f"`budget_s` (={budget_s}) must be above 0, as must `machines` (={machines}), and neither "
            f"`trials` (={trials}) nor `seed` (={seed}) negative"
        )
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    if threads < 1:
        raise InputError(f"`threads` (={threads}) must be at least 1")
    chosen = strategy(method)
    problem = Problem(operator=operator_of(operator), matrix=as_coo(matrix, dtype=dtype), n_cols=n_cols)
    try:
        compiler()
    except DeviceError as error:
        warnings.warn(f"{error}; scipy computes instead", RuntimeWarning, stacklevel=2)
        return Tuned(kernel=LibraryKernel(problem), trials=(), baselines={}, best=1.0, seconds={})
    baselines = _canonical(problem, presets(problem.operator, problem.extents, threads))
    reference = baselines[REFERENCE[problem.operator.name]]
    space = Space(problem.operator, problem.extents, threads=sorted({1, threads}))
    facts = {
        "operator": problem.operator.name,
        "extents": dict(problem.extents),
        "threads": threads,
        "cpu": describe_cpu(),
        "dtype": str(problem.dtype),
        "pattern": problem.matrix.digest(values=False),
    }
    with (
        kept(folder, problem, facts) as log,
        Evaluator(problem, reference, seed=seed, cache=cache) as evaluator,
    ):
        old = () if log is None else log.trials
        # Going on, it must not propose once more what it proposed before.
        walk = _begun(chosen, space, np.random.default_rng([seed, len(old)]), prior, problem, threads)
        found: dict[Schedule, Trial] = {}
        for trial in old:
            found[trial.schedule] = trial
            walk.tell(trial)
        first = list(baselines.values())
        if threads > 1 and problem.matrix.nnz * (n_cols or 1) < _SMALL:
            first += _canonical(problem, presets(problem.operator, problem.extents, 1)).values()
        first = [schedule for schedule in first if schedule not in found]
        most = math.inf if trials is None else len(baselines) + trials
        deadline = begun + budget_s * (1.0 - _RUN_OFF)
        fresh: list[Trial] = []

        proposing = 0.0

        def told(trial: Trial) -> None:
            nonlocal proposing
            if trial.error is not None and trial.schedule == reference:
                raise RunError(f"the reference does not run: {trial.error}; it is {reference}")
            if log is not None:
                log.write(trial)
            found[trial.schedule] = trial
            fresh.append(trial)
            began = time.monotonic()
            walk.tell(trial)
            proposing += time.monotonic() - began
            if progress is not None:
                best = min(each.latency_ms for each in found.values())
                done = max((time.monotonic() - begun) / budget_s, len(found) / most if most else 0.0)
                progress(f"{len(found)} schedules, best {best:.3f} ms", min(done, 1.0))

        def measured(schedule: Schedule) -> Trial:
            trial = evaluator.measure(schedule)
            best = min((each.ratio for each in found.values()), default=math.inf)
            near = trial.ratio < best * (_NEARLY if trial.disturbed else 1.0)
            return evaluator.confirmed(trial) if near and math.isfinite(best) else trial

        for schedule in first:
            told(measured(schedule))
        lot = 1 if cluster is None else LOT * machines
        while time.monotonic() < deadline and len(found) < most:
            began = time.monotonic()
            wanted = _proposed(walk, problem, found, min(lot, most - len(found)))
            proposing += time.monotonic() - began
            if not wanted:
                break
            if cluster is None:
                told(measured(wanted[0]))
                continue
            for trial in measure_on(cluster, problem, reference, wanted, seed=seed, threads=threads):
                told(trial)
        if progress is not None:
            progress("measuring the best again", 1.0)
        final = finals(problem, evaluator, found, baselines, cache=cache)
    seconds: dict[str, float] = {"propose": proposing}
    for trial in fresh:
        for part, took in trial.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + took
    seconds["rest"] = time.monotonic() - begun - sum(seconds.values())
    return Tuned(
        kernel=final.kernel,
        trials=tuple(found.values()),
        baselines=final.baselines,
        best=final.best,
        seconds=seconds,
    )


def _begun(
    chosen: type[Strategy],
    space: Space,
    rng: np.random.Generator,
    prior: Prior | None,
    problem: Problem,
    threads: int,
) -> Strategy:
    if issubclass(chosen, Guided):
        if prior is None:
            from sparseflow.tuning.model.net.pretrained import prior
        return chosen(space, rng, BoostedTrees(Features(problem, threads), prior=prior(problem, threads)))
    if prior is not None:
        raise InputError(f"the method {chosen.name!r} asks no `prior`; choose {GUIDED}{chosen.name}")
    return chosen(space, rng)


def _canonical(problem: Problem, schedules: Mapping[str, Schedule]) -> dict[str, Schedule]:
    return {name: each.canonical(problem.operator, problem.extents) for name, each in schedules.items()}


def _proposed(walk: Strategy, problem: Problem, found: Container[Schedule], count: float) -> list[Schedule]:
    """So many new schedules; fewer, or none, where nothing new comes any more."""
    wanted: dict[Schedule, None] = {}
    again = 0
    while len(wanted) < count and again < _REPEATS:
        schedule = walk.ask().canonical(problem.operator, problem.extents)
        again = again + 1 if schedule in found or schedule in wanted else 0
        if schedule not in found:
            wanted[schedule] = None
    return list(wanted)
