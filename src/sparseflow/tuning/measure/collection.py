"""Collecting labels: schedules measured on many patterns, a folder that grows into a label set.

::

    patterns/<digest>.safetensors   written first
    measured.jsonl                  every trial as it comes; see `journal`
    labels.parquet                  the label set, written at the end; see `labels`

What is measured of each task, all of it together with the task's reference:

1. the schedules that experts write by hand (`presets`),
2. then, half and half, draws from the space and children of the best so far: mutants, and some with two
   parents. Draws show what slow schedules have in common; children stand close together near the top, where
   a model must tell them apart.

Tasks take turns: a round brings each to `_FIRST` schedules, the next to twice as many, and so on. Whenever
time runs out, no task has had more than twice as many as another that could have had them, and few rounds
keep the cost of changing tasks low.

A trial that others disturbed is measured once more. If that was disturbed, too, the faster one is kept and
marked; on a busy machine there would be nothing else.

The same call goes on with a folder in which one was stopped, by whatever: no row is lost or measured twice.
Further tasks, and more schedules, are added by asking for them.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.core.device import describe_cpu
from sparseflow.core.parallel import map_unordered
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, RunError
from sparseflow.tuning.codegen.compile import compiler
from sparseflow.tuning.measure import collection_log, labels, synthetic
from sparseflow.tuning.measure.collection_log import Journal
from sparseflow.tuning.measure.evaluator import Evaluator, Trial
from sparseflow.tuning.measure.families import family_of
from sparseflow.tuning.measure.labels import Task
from sparseflow.tuning.schedule.matrices import FLOATS, Pattern, find_matrix_files, matrix_name, read_matrix
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.operators import operator as operator_of
from sparseflow.tuning.schedule.presets import REFERENCE, presets
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import Space
from sparseflow.tuning.search.evolutionary import Evolutionary

_FIRST = 8
"""Schedules of a task in the first round."""

_DRAWN = 0.5
"""Share of schedules that are drawn, and not bred from better ones."""

_REPEATS = 50
"""Proposals in a row that were measured before, after which a task is done."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What labels are wanted of.

    Attributes:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: A name for the pattern.
        pattern: Where the elements are; values have no influence and are made up.
        n_cols: Columns of the dense operands; None for SpMV.
        dtype: `"float32"` or `"float64"`.
        family: By default what `family_of` makes of the name.
    """

    operator: str
    matrix: str
    pattern: Pattern
    n_cols: int | None = None
    dtype: str = "float32"
    family: str | None = None


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a folder holds after a call.

    Attributes:
        folder: The label set.
        tasks: Those that were asked for.
        rows: Measurements of all tasks in the folder.
        added: Those of this call.
        failed: Rows without a time.
        disturbed: Rows that others disturbed.
        fewest: Rows of the task, among those asked for, that has fewest.
        broken: Matrix and operator -> why the reference does not run; such tasks are passed over.
        seconds: How long the call took.
    """

    folder: Path
    tasks: int
    rows: int
    added: int
    failed: int
    disturbed: int
    fewest: int
    broken: Mapping[str, str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {**vars(self), "folder": str(self.folder), "broken": dict(self.broken)}


@dataclass(frozen=True, kw_only=True)
class _Visit:
    """A task's part of a round, as it travels to whoever measures it.

    Attributes:
        task: Its device is left to be filled in there.
        pattern: The pattern.
        known: Device -> trials that were measured there.
        schedules: How many the task shall have.
        end: Time of day, in seconds since the epoch, to stop at; clocks of other machines know no other.
        seed: What schedules are drawn from.
        cache: Folder for compiled code.
    """

    task: Task
    pattern: Pattern
    known: Mapping[str, tuple[Trial, ...]]
    schedules: int
    end: float
    seed: int
    cache: Path | None


def generate_targets(
    paths: Sequence[Path],
    workloads: Sequence[tuple[str, int | None]],
    *,
    num_synthetic: int = 0,
    dtype: str = "float32",
    families: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Iterator[Wanted]:
    """Generate the collection targets of matrix files and random patterns, one pattern at a time.

    Args:
        paths: Matrix Market files, or directories of them.
        workloads: Operator and number of columns of the dense operands, as `parse_workloads` returns them.
        num_synthetic: Number of random patterns; a larger number starts with the same patterns.
        dtype: `"float32"` or `"float64"`.
        families: Matrix name -> family.
        seed: Random seed of the patterns.

    Raises:
        InputError: A path does not exist, a directory has no matrix file, or there is no pattern at all.
        FileFormatError: A file is not a Matrix Market file.
    """
    files = find_matrix_files(paths)
    if not files and not num_synthetic:
        raise InputError("no matrix to measure on; pass .mtx files or directories, or --synthetic")

    def generate_patterns() -> Iterator[tuple[str, Pattern]]:
        for file in files:
            yield matrix_name(file), read_matrix(file).pattern
        kinds = tuple(synthetic.KINDS)
        for index in range(num_synthetic):
            # One generator for each pattern, so that the first patterns do not depend on the number of them.
            rng = np.random.default_rng([seed, index])
            yield synthetic.draw(rng, kind=kinds[index % len(kinds)])

    # Paths are checked above, before the caller starts work on the first target.
    return (
        Wanted(
            operator=operator,
            matrix=name,
            pattern=pattern,
            n_cols=n_cols,
            dtype=dtype,
            family=family_of(name, families or {}),
        )
        for name, pattern in generate_patterns()
        for operator, n_cols in workloads
    )


def collect(
    wanted: Iterable[Wanted],
    folder: Path | str,
    *,
    schedules: int = 128,
    budget_s: float | None = None,
    seed: int = 0,
    threads: int | None = None,
    cluster: str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Collected:
    """Measure schedules and write a label set.

    Args:
        wanted: What of. All of it is taken before anything is measured; only one pattern at a time is held.
        folder: Made when absent; what is in it is gone on with.
        schedules: Schedules to measure of each task.
        budget_s: Seconds after which to stop; by default none.
        seed: What schedules are drawn from.
        threads: Threads that a schedule may use; by default one for each CPU that this process may run on.
        cluster: Address of a Ray cluster that measures, one task at a time on `threads` CPUs: give its
            machines no more, or tasks disturb each other. Rows come home when a task's part of a round is
            over. By default this process measures.
        cache: Folder for compiled code; see `compile_source`.
        progress: Called with (what was found, fraction done).

    Raises:
        InputError: An argument cannot be used, nothing is wanted, or the folder holds other labels.
        FileFormatError: A line of the folder's journal is damaged.
        DeviceError: There is no C compiler, or no cluster at the address.
        RunError: Another process writes into the folder, or the disk is full.
    """
    begun = time.monotonic()
    end = time.time() + (1e9 if budget_s is None else budget_s)
    if schedules < 1 or seed < 0 or (budget_s is not None and not budget_s > 0):
        raise InputError(
            f"`schedules` (={schedules}) must be at least 1, `seed` (={seed}) not negative, and `budget_s` "
            f"(={budget_s}) above 0"
        )
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    if threads < 1:
        raise InputError(f"`threads` (={threads}) must be at least 1")
    root = Path(folder)
    if root.exists() and not root.is_dir():
        raise InputError(f"`folder` (={root}) is a file; name a folder")
    if (root / labels.FILE).exists() and not (root / collection_log.FILE).exists():
        raise InputError(f"{root} holds labels that were not collected here; name another folder")
    if cluster is None:
        compiler()
    root.mkdir(parents=True, exist_ok=True)
    with Journal(root) as log:
        tasks = _tasks(wanted, root, threads, log)
        before = _count(log)
        same = _same(log)
        done = sum(len(log.trials[one]) for task in tasks for one in same[_identity(task)])
        try:
            for until in _totals(schedules):
                same = _same(log)
                visits = (
                    _Visit(
                        task=task,
                        pattern=labels.read_pattern(root, digest),
                        known={one.device: tuple(log.trials[one].values()) for one in same[_identity(task)]},
                        schedules=until,
                        end=end,
                        seed=seed,
                        cache=cache,
                    )
                    for task, digest in tasks.items()
                    if time.time() < end
                )
                for task, trial in _measured(visits, cluster, threads):
                    log.write(task, trial)
                    done += 1
                    if progress is not None:
                        spent = 0.0 if budget_s is None else (time.monotonic() - begun) / budget_s
                        where = f"{task.operator} on {task.matrix}, up to {until} schedules"
                        progress(
                            f"{_count(log) - before} rows; {where}",
                            min(max(done / (schedules * len(tasks)), spent), 1.0),
                        )
        finally:
            # Whoever stops it finds what there is.
            if _count(log):
                labels.write_labels(root, log.measurements())
        return _collected(root, tasks, log, before, time.monotonic() - begun)


def _tasks(wanted: Iterable[Wanted], root: Path, threads: int, log: Journal) -> dict[Task, str]:
    """The tasks, each once and checked, and the digests of their patterns, which are in the folder then."""
    known = {_identity(task): task for task in log.trials}
    found: dict[tuple[object, ...], Task] = {}
    for one in wanted:
        if one.dtype not in map(str, FLOATS):
            raise InputError(f"`dtype` (={one.dtype!r}) must be float32 or float64")
        if not one.pattern.nnz:
            raise InputError(f"{one.matrix} has no elements: there is nothing to measure")
        op = operator_of(one.operator)
        problem = Problem(operator=op, matrix=one.pattern.filled(np.dtype(one.dtype)), n_cols=one.n_cols)
        task = Task(
            operator=op.name,
            matrix=one.matrix,
            family=family_of(one.matrix) if one.family is None else one.family,
            shape=one.pattern.shape,
            nnz=one.pattern.nnz,
            n_cols=problem.n_cols,
            dtype=one.dtype,
            threads=threads,
            device="",
            pattern=labels.write_pattern(root, one.pattern),
        )
        # The same pattern under another name is the same task.
        key = _identity(task)
        found.setdefault(key, replace(known.get(key, task), device=""))
    if not found:
        raise InputError("nothing is wanted; give at least one pattern and operator")
    return {task: task.pattern for task in found.values() if task.pattern is not None}


def _identity(task: Task) -> tuple[object, ...]:
    """What tells tasks apart, whatever they are called and wherever they run."""
    return task.operator, task.pattern, task.n_cols, task.dtype, task.threads


def _same(log: Journal) -> Mapping[tuple[object, ...], list[Task]]:
    """Identity -> the task, on each device that measured it."""
    found: defaultdict[tuple[object, ...], list[Task]] = defaultdict(list)
    for task in log.trials:
        found[_identity(task)].append(task)
    return found


def _totals(schedules: int) -> Iterator[int]:
    """Schedules that each task has after each round."""
    until = _FIRST
    while until < schedules:
        yield until
        until *= 2
    yield schedules


def _measured(visits: Iterable[_Visit], cluster: str | None, threads: int) -> Iterator[tuple[Task, Trial]]:
    if cluster is None:
        for visit in visits:
            yield from _measure(visit)
        return
    # A call a task: two on one machine would disturb each other.
    for _, rows in map_unordered(_whole_visit, list(visits), cluster=cluster, cpus_per_task=float(threads)):
        yield from rows


def _whole_visit(visit: _Visit) -> list[tuple[Task, Trial]]:
    return list(_measure(visit))


def _measure(visit: _Visit) -> Iterator[tuple[Task, Trial]]:
    """Measure what a task lacks."""
    task = replace(visit.task, device=describe_cpu())
    op, extents = OPERATORS[task.operator], task.extents()
    found = {trial.schedule: trial for trial in visit.known.get(task.device, ())}
    reference, *others = _by_hand(task)
    if len(found) >= visit.schedules or time.time() >= visit.end or _broken(found, reference):
        return
    space = Space(op, extents, threads=sorted({1, task.threads}))
    who = zlib.crc32(repr(_identity(task)).encode())
    # Going on, it must not propose once more what it proposed before.
    walk = Evolutionary(space, np.random.default_rng([visit.seed, who, len(found)]), fresh=_DRAWN)
    for trial in found.values():
        walk.tell(trial)
    waiting = [schedule for schedule in (reference, *others) if schedule not in found]
    again = 0
    try:
        problem = Problem(operator=op, matrix=visit.pattern.filled(np.dtype(task.dtype)), n_cols=task.n_cols)
        with Evaluator(problem, reference, cache=visit.cache) as evaluator:
            while len(found) < visit.schedules and again < _REPEATS and time.time() < visit.end:
                schedule = waiting.pop(0) if waiting else walk.ask().canonical(op, extents)
                if schedule in found:
                    again += 1
                    continue
                again = 0
                trial = found[schedule] = _twice_if_disturbed(evaluator, schedule)
                walk.tell(trial)
                yield task, trial
                if _broken(found, reference):
                    return
    except (RunError, InputError, MemoryError) as error:
        # The reference cannot be built, or its arrays find no room: the other tasks can do without.
        if reference not in found:
            yield task, Trial(schedule=reference, error=f"{type(error).__name__}: {error}")
            return
        raise


def _twice_if_disturbed(evaluator: Evaluator, schedule: Schedule) -> Trial:
    trial = evaluator.measure(schedule)
    if not trial.disturbed:
        return trial
    again = evaluator.measure(schedule)
    if again.error is not None:
        return trial
    return min(again, trial, key=lambda one: (one.disturbed, one.latency_ms))


def _by_hand(task: Task) -> list[Schedule]:
    """The presets, the reference first."""
    op, extents = OPERATORS[task.operator], task.extents()
    known = presets(op, extents, task.threads)
    first = known.pop(REFERENCE[op.name])
    return [schedule.canonical(op, extents) for schedule in (first, *known.values())]


def _broken(found: Mapping[Schedule, Trial], reference: Schedule) -> bool:
    return reference in found and found[reference].error is not None


def _count(log: Journal) -> int:
    return sum(map(len, log.trials.values()))


def _collected(root: Path, tasks: Iterable[Task], log: Journal, before: int, seconds: float) -> Collected:
    rows = [trial for trials in log.trials.values() for trial in trials.values()]
    counts, broken, same = [], {}, _same(log)
    for task in tasks:
        places = same[_identity(task)]
        counts.append(sum(len(log.trials[one]) for one in places))
        reference = _by_hand(task)[0]
        for one in places:
            if _broken(log.trials[one], reference):
                broken[f"{task.operator} on {task.matrix}"] = str(log.trials[one][reference].error)
    return Collected(
        folder=root,
        tasks=len(counts),
        rows=len(rows),
        added=len(rows) - before,
        failed=sum(trial.error is not None for trial in rows),
        disturbed=sum(trial.disturbed for trial in rows),
        fewest=min(counts),
        broken=broken,
        seconds=seconds,
    )
