"""The fastest schedule for one matrix: baselines, then a search, then a run-off between the best."""

from __future__ import annotations

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.core.jsonl import LineWriter
from sparseflow.errors import DeviceError, FileFormatError, InputError
from sparseflow.tuning.compile import compiler
from sparseflow.tuning.evaluate import Evaluator, Trial
from sparseflow.tuning.kernel import CompiledKernel, Kernel, LibraryKernel
from sparseflow.tuning.matrices import as_coo
from sparseflow.tuning.operators import operator as operator_of
from sparseflow.tuning.presets import presets
from sparseflow.tuning.problem import Problem
from sparseflow.tuning.program import build
from sparseflow.tuning.schedule import Schedule
from sparseflow.tuning.search import strategy
from sparseflow.tuning.space import Space

Progress = Callable[[str, float], None]

TRIALS = "trials.jsonl"

LIBRARY = "library"
"""Name of the baseline that is scipy."""

_REFERENCE = {"spmm": "tiled_csr", "spmv": "csr", "sddmm": "csr"}
"""Operator -> the preset that everything is timed beside."""

_FINALISTS = 4
"""Schedules that are measured thoroughly at the end, besides the baselines."""

_RUN_OFF = 0.15
"""Share of the time that is kept for it."""

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
        seconds: Part ("build", "compile", "measure", "search") -> how long it took, of what this call did.
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
    method: str = "evolutionary",
    threads: int | None = None,
    dtype: np.dtype | type | None = None,
    seed: int = 0,
    folder: Path | str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Search the schedules of an operator for one matrix; what experts write by hand is always measured too.

    Args:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: A matrix of scipy.sparse, a sparse tensor of torch, or what `as_coo` takes besides.
        n_cols: Columns of the dense operands; None for SpMV.
        budget_s: Seconds that all of it may take, about.
        trials: Schedules to measure at most, the baselines not counted.
        method: How to search, one of `STRATEGIES`.
        threads: Threads to use; by default one for each CPU that this process may run on.
        dtype: float32 or float64; by default the matrix's own.
        seed: What the search and the dense inputs are drawn from.
        folder: Where every trial is written as it comes; a search that was stopped goes on from there.
        cache: Folder for compiled code; see `compile_source`.
        progress: Called with (what was found, fraction done).

    Raises:
        InputError: An argument cannot be used, or `folder` holds the trials of another problem.
        RunError: The reference does not run, or another process writes into `folder`.
    """
    begun = time.monotonic()
    if budget_s <= 0 or (trials is not None and trials < 0):
        raise InputError(f"`budget_s` (={budget_s}) must be above 0 and `trials` (={trials}) not negative")
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
    known = presets(problem.operator, problem.extents, threads)
    reference = known[_REFERENCE[problem.operator.name]]
    space = Space(problem.operator, problem.extents, threads=sorted({1, threads}))
    rng = np.random.default_rng(seed)
    walk = chosen(space, rng)
    deadline = begun + budget_s * (1.0 - _RUN_OFF)
    with (
        Evaluator(problem, reference, seed=seed, cache=cache) as evaluator,
        _log(folder, problem) as (old, write),
    ):
        found: dict[Schedule, Trial] = {}

        def add(trial: Trial) -> None:
            found[trial.schedule] = trial
            walk.tell(trial)

        for trial in old:
            add(trial)
        baselines = [schedule.canonical(problem.operator, problem.extents) for schedule in known.values()]
        last = len(baselines) + trials if trials is not None else None
        waiting = [schedule for schedule in baselines if schedule not in found]
        again = 0
        while again < _REPEATS and (last is None or len(found) < last or waiting):
            if waiting:
                schedule = waiting.pop(0)
            elif time.monotonic() >= deadline:
                break
            else:
                schedule = walk.ask().canonical(problem.operator, problem.extents)
            if schedule in found:
                again += 1
                continue
            again = 0
            trial = evaluator.measure(schedule)
            write(trial)
            add(trial)
            if progress is not None:
                passed = (time.monotonic() - begun) / budget_s
                share = 0.0 if not last else len(found) / last
                best = min(found.values(), key=lambda one: one.ratio)
                progress(
                    f"{len(found)} schedules, best {best.latency_ms:.3f} ms", min(max(passed, share), 1.0)
                )
        return _run_off(problem, evaluator, found, dict(zip(known, baselines, strict=True)), begun, cache)


def _run_off(
    problem: Problem,
    evaluator: Evaluator,
    found: Mapping[Schedule, Trial],
    baselines: Mapping[str, Schedule],
    begun: float,
    cache: Path | None,
) -> Tuned:
    """Measure the best ones and the baselines again, thoroughly, and take the fastest."""
    ranked = sorted((trial for trial in found.values() if trial.error is None), key=lambda one: one.ratio)
    others = [trial.schedule for trial in ranked if trial.schedule not in baselines.values()][:_FINALISTS]
    thorough = {
        schedule: evaluator.measure(schedule, thorough=True) for schedule in (*baselines.values(), *others)
    }
    ratios = {name: thorough[schedule].ratio for name, schedule in baselines.items()}
    reference_ms = min(trial.latency_ms / trial.ratio for trial in thorough.values() if trial.error is None)
    ratios[LIBRARY] = problem.library_ms(evaluator.inputs) / reference_ms
    winner = min(thorough.values(), key=lambda one: one.ratio)
    best_baseline = min(ratios.values())
    kernel: Kernel
    if ratios[LIBRARY] < winner.ratio:
        kernel, best = LibraryKernel(problem, speedup=1.0), ratios[LIBRARY]
    else:
        program = build(problem, winner.schedule)
        best = winner.ratio
        kernel = CompiledKernel(program, speedup=best_baseline / best, cache=cache)
    seconds: dict[str, float] = {}
    for trial in found.values():
        for part, took in trial.seconds.items():
            seconds[part] = seconds.get(part, 0.0) + took
    seconds["search"] = time.monotonic() - begun - sum(seconds.values())
    return Tuned(kernel=kernel, trials=tuple(found.values()), baselines=ratios, best=best, seconds=seconds)


@contextmanager
def _log(
    folder: Path | str | None, problem: Problem
) -> Iterator[tuple[list[Trial], Callable[[Trial], None]]]:
    """The trials that a folder holds, and what writes one more."""
    if folder is None:
        yield [], lambda trial: None
        return
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    head = {"problem": _name(problem)}
    writer = LineWriter(root / TRIALS)
    try:
        lines = (root / TRIALS).read_text(encoding="utf-8").splitlines()
        if not lines:
            writer.write(head)
        elif json.loads(lines[0]) != head:
            other = json.loads(lines[0]).get("problem")
            raise InputError(
                f"{root} holds the trials of another problem ({other}) than this ({head['problem']}); name "
                "another folder"
            )
        yield [_trial(root, line) for line in lines[1:]], lambda trial: writer.write(trial.to_dict())
        writer.sync()
    finally:
        writer.close()


def _trial(root: Path, line: str) -> Trial:
    try:
        row = json.loads(line)
        if row["error"] is not None:
            del row["latency_ms"], row["ratio"]
        return Trial(**{**row, "schedule": Schedule.parse(row["schedule"])})
    except (ValueError, KeyError, TypeError) as error:
        raise FileFormatError(
            f"{root / TRIALS} holds a line that is no trial ({error}); remove it"
        ) from error


def _name(problem: Problem) -> str:
    """What tells one problem from another."""
    matrix = problem.matrix
    digest = hashlib.sha256()
    for array in (matrix.rows, matrix.cols):
        digest.update(np.ascontiguousarray(array).data)
    sizes = " x ".join(str(extent) for extent in problem.extents.values())
    return f"{problem.operator.name} {sizes} {problem.dtype} {digest.hexdigest()[:16]}"
