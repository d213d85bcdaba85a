"""Collection of labels: schedules measured on many sparsity patterns.

::

    patterns/<digest>.safetensors   written first
    measured.jsonl                  every trial; see `collection_log`
    labels.parquet                  the label set, written at the end; see `labels`

For each task the reference and the other presets are measured first, then the proposals of a search strategy.

Tasks take turns: the first round measures up to `_FIRST_ROUND` schedules of each task, the next twice as
many, and so on. When the time budget ends, no task has more than twice as many schedules as another, and few
rounds keep the cost of switching tasks low.

A disturbed trial is measured again. If the second trial is also disturbed, the faster of the two is kept and
marked as disturbed, because a busy machine does not give undisturbed trials.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparseflow.core.checks import check_at_least, check_positive
from sparseflow.core.device import describe_cpu
from sparseflow.core.files import check_output
from sparseflow.core.parallel import map_unordered
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, RunError
from sparseflow.tuning.codegen.compile import find_compiler
from sparseflow.tuning.codegen.program import check_threads
from sparseflow.tuning.measure.collection_log import COLLECTION_FILE, CollectionLog
from sparseflow.tuning.measure.evaluator import ScheduleEvaluator, Trial
from sparseflow.tuning.measure.families import infer_family
from sparseflow.tuning.measure.labels import (
    LABELS_FILE,
    TuningTask,
    read_pattern,
    write_labels,
    write_pattern,
)
from sparseflow.tuning.measure.synthetic import PATTERN_KINDS, sample_pattern
from sparseflow.tuning.schedule.matrices import SparsityPattern
from sparseflow.tuning.schedule.matrix_files import find_matrix_files, parse_matrix_name, read_matrix
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import REFERENCE_PRESETS, build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace

_LOGGER = logging.getLogger(__name__)

_FIRST_ROUND = 8
"""Schedules of each task in the first round."""

_MAX_REPEATS = 50
"""Consecutive proposals that were measured before, after which a task is complete."""


class ProposalStrategy(Protocol):
    """Proposes schedules to measure; `search.base.Strategy` implements it."""

    def propose(self) -> Schedule: ...

    def observe(self, trial: Trial) -> None: ...


StrategyFactory = Callable[[ScheduleSpace, np.random.Generator], ProposalStrategy]


@dataclass(frozen=True, kw_only=True)
class CollectionTarget:
    """A pattern and an operator to collect labels of.

    Attributes:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: Name of the pattern.
        pattern: Sparsity pattern; values do not matter and are generated.
        n_cols: Columns of the dense operands; None for SpMV.
        dtype: `"float32"` or `"float64"`.
        family: Family of the matrix; by default inferred from the name.
    """

    operator: str
    matrix: str
    pattern: SparsityPattern
    n_cols: int | None = None
    dtype: str = "float32"
    family: str | None = None


@dataclass(frozen=True, kw_only=True)
class CollectionResult:
    """Content of a collection after a call.

    Attributes:
        out_dir: Directory of the label set.
        tasks: Number of requested tasks.
        rows: Measurements of all tasks in the directory.
        added: Measurements of this call.
        failed: Rows without a latency.
        disturbed: Rows that other processes disturbed.
        min_rows: Rows of the requested task with the fewest rows.
        failed_references: Matrix and operator -> error of the reference; such tasks are skipped.
        seconds: Duration of the call, seconds.
    """

    out_dir: Path
    tasks: int
    rows: int
    added: int
    failed: int
    disturbed: int
    min_rows: int
    failed_references: Mapping[str, str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return asdict(self) | {"out_dir": str(self.out_dir)}


@dataclass(frozen=True, kw_only=True)
class _TaskBatch:
    """One task's part of a round, as it is sent to a machine.

    Attributes:
        task: Task; the machine fills in the device.
        pattern: Sparsity pattern.
        trials: Device -> schedule -> earlier trial.
        schedules: Total number of schedules to reach.
        end_time: Time to stop at, seconds since the epoch, because other machines have other monotonic
            clocks.
        seed: Random seed of the schedules.
        cache_dir: Directory of compiled code.
        create_strategy: Creates the strategy that proposes schedules.
    """

    task: TuningTask
    pattern: SparsityPattern
    trials: Mapping[str, Mapping[Schedule, Trial]]
    schedules: int
    end_time: float
    seed: int
    cache_dir: Path | None
    create_strategy: StrategyFactory


def generate_targets(
    paths: Sequence[Path],
    workloads: Sequence[tuple[str, int | None]],
    *,
    num_synthetic: int = 0,
    dtype: str = "float32",
    families: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Iterator[CollectionTarget]:
    """Generate the collection targets of matrix files and random patterns, one pattern at a time.

    Args:
        paths: Matrix files, or directories of them. Unreadable and empty matrices of a directory are skipped
            with a warning.
        workloads: Operator and number of columns of the dense operands, as `parse_workloads` returns them.
        num_synthetic: Number of random patterns; a larger number starts with the same patterns.
        dtype: `"float32"` or `"float64"`.
        families: Matrix name -> family.
        seed: Random seed of the patterns.

    Raises:
        InputError: A path does not exist, a directory has no matrix file, or there is no pattern at all.
        FileFormatError: A file of `paths` is not a readable matrix.
    """
    files = find_matrix_files(paths)
    if not files and not num_synthetic:
        raise InputError("no matrix to measure on; pass matrix files or directories, or --synthetic")

    def generate_patterns() -> Iterator[tuple[str, SparsityPattern]]:
        for file in files:
            try:
                pattern = read_matrix(file).pattern
                if not pattern.nnz:
                    raise InputError(f"{file} has no elements to measure")
            except InputError as error:
                if file in paths:
                    raise
                _LOGGER.warning(f"skipped: {error}")
                continue
            yield parse_matrix_name(file), pattern
        kinds = tuple(PATTERN_KINDS)
        for index in range(num_synthetic):
            # One generator for each pattern, so that the first patterns do not depend on the number of them.
            rng = np.random.default_rng([seed, index])
            yield sample_pattern(rng, kind=kinds[index % len(kinds)])

    # Paths are checked above, before the caller starts work on the first target.
    return (
        CollectionTarget(
            operator=operator,
            matrix=name,
            pattern=pattern,
            n_cols=n_cols,
            dtype=dtype,
            family=infer_family(name, families),
        )
        for name, pattern in generate_patterns()
        for operator, n_cols in workloads
    )


def collect(
    targets: Iterable[CollectionTarget],
    out_dir: Path | str,
    *,
    strategy: StrategyFactory,
    schedules: int = 128,
    budget_s: float | None = None,
    seed: int = 0,
    threads: int | None = None,
    cluster: str | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> CollectionResult:
    """Measure schedules and write a label set.

    An interrupted collection is resumed by the same call: no row is lost or measured twice. More targets
    and more schedules extend an existing collection.

    Args:
        targets: Patterns and operators. All targets are checked first; one pattern at a time is in memory.
        out_dir: Output directory; an existing collection is resumed.
        strategy: Creates the strategy that proposes schedules of a task, such as
            `search.evolutionary.COLLECTION_STRATEGY`.
        schedules: Schedules to measure for each task.
        budget_s: Time budget, seconds; by default unlimited.
        seed: Random seed of the schedules.
        threads: Maximum number of threads of a schedule; by default all CPUs that this process may use.
        cluster: Address of a Ray cluster that measures one task at a time on `threads` CPUs of each machine.
            Its machines should have no more CPUs, because tasks on one machine disturb each other. Rows of
            a task arrive at the end of its round. By default this process measures.
        cache_dir: Directory of compiled code; see `compile_source`.
        progress: Progress callback.

    Raises:
        InputError: An argument is out of range, there are no targets, or `out_dir` has other labels.
        FileFormatError: The log of the collection is damaged.
        DeviceError: There is no C compiler, or no cluster at the address.
        RunError: Another process writes to `out_dir`, or the disk is full.
    """
    start_s = time.monotonic()
    end_time = time.time() + (1e9 if budget_s is None else budget_s)
    threads = len(os.sched_getaffinity(0)) if threads is None else threads
    check_at_least(1, schedules=schedules)
    check_threads(threads)
    check_at_least(0, seed=seed)
    check_positive(budget_s=1.0 if budget_s is None else budget_s)
    root = Path(out_dir)
    if cluster is None:
        find_compiler()
    _prepare_dir(root)
    with CollectionLog(root) as log:
        tasks = _create_tasks(targets, root, threads, log)
        initial_rows = log.num_trials
        initial_task_rows = sum(len(trials) for task in tasks for trials in log.find(task).values())
        try:
            for round_size in _round_sizes(schedules):
                # Created one by one, so that one pattern at a time is in memory.
                batches = (
                    _TaskBatch(
                        task=task,
                        pattern=read_pattern(root, str(task.pattern)),
                        trials=log.find(task),
                        schedules=round_size,
                        end_time=end_time,
                        seed=seed,
                        cache_dir=cache_dir,
                        create_strategy=strategy,
                    )
                    for task in tasks
                    if time.time() < end_time
                )
                for task, trial in _measure_batches(batches, cluster, threads):
                    log.append(task, trial)
                    if progress is not None:
                        added = log.num_trials - initial_rows
                        progress(
                            f"{added} rows; {task.operator} on {task.matrix}, up to {round_size} schedules",
                            _compute_fraction(
                                (initial_task_rows + added) / (schedules * len(tasks)),
                                time.monotonic() - start_s,
                                budget_s,
                            ),
                        )
        finally:
            # An interrupted collection leaves a label set of all rows so far.
            if log.num_trials:
                write_labels(root, log.measurements())
        return _summarize(root, tasks, log, initial_rows, time.monotonic() - start_s)


def _compute_fraction(measured: float, elapsed_s: float, budget_s: float | None) -> float:
    """Compute the completed fraction: of the measurements or of the time budget, whichever is larger."""
    elapsed = 0.0 if budget_s is None else elapsed_s / budget_s
    return min(max(measured, elapsed), 1.0)


def _prepare_dir(root: Path) -> None:
    """Create the output directory, and check that it has no labels of another source."""
    check_output(root, directory=True)
    if (root / LABELS_FILE).exists() and not (root / COLLECTION_FILE).exists():
        raise InputError(f"{root} has labels that were not collected; choose another directory")
    root.mkdir(parents=True, exist_ok=True)


def _create_tasks(
    targets: Iterable[CollectionTarget], root: Path, threads: int, log: CollectionLog
) -> list[TuningTask]:
    """Validate the targets, write their patterns and return their tasks, without a device."""
    measured_tasks = {task.key: task for task in log.trials}
    tasks: dict[tuple[object, ...], TuningTask] = {}
    for target in targets:
        if not target.pattern.nnz:
            raise InputError(f"{target.matrix} has no elements to measure")
        task = TuningTask(
            operator=target.operator,
            matrix=target.matrix,
            family=infer_family(target.matrix) if target.family is None else target.family,
            shape=target.pattern.shape,
            nnz=target.pattern.nnz,
            n_cols=target.n_cols,
            dtype=target.dtype,
            threads=threads,
            device="",
            pattern=target.pattern.digest(),
        )
        write_pattern(root, target.pattern)
        # A pattern with another name is the same task.
        tasks.setdefault(task.key, replace(measured_tasks.get(task.key, task), device=""))
    if not tasks:
        raise InputError("`targets` is empty; pass at least one pattern and operator")
    return list(tasks.values())


def _round_sizes(schedules: int) -> Iterator[int]:
    """Yield the number of schedules of each task after each round."""
    size = _FIRST_ROUND
    while size < schedules:
        yield size
        size *= 2
    yield schedules


def _measure_batches(
    batches: Iterable[_TaskBatch], cluster: str | None, threads: int
) -> Iterator[tuple[TuningTask, Trial]]:
    if cluster is None:
        for batch in batches:
            yield from _measure_batch(batch)
        return
    # One call for each task, because tasks on one machine disturb each other.
    for _, rows in map_unordered(
        _measure_whole_batch, list(batches), cluster=cluster, cpus_per_task=float(threads)
    ):
        yield from rows


def _measure_whole_batch(batch: _TaskBatch) -> list[tuple[TuningTask, Trial]]:
    return list(_measure_batch(batch))


def _measure_batch(batch: _TaskBatch) -> Iterator[tuple[TuningTask, Trial]]:
    """Measure the missing schedules of a task."""
    task = replace(batch.task, device=describe_cpu())
    op, extents = OPERATORS[task.operator], task.extents()
    trials = dict(batch.trials.get(task.device, {}))
    reference, *presets = _list_presets(task)
    if (
        len(trials) >= batch.schedules
        or time.time() >= batch.end_time
        or _reference_failed(trials, reference)
    ):
        return
    space = ScheduleSpace(op, extents, threads=sorted({1, task.threads}))
    task_seed = zlib.crc32(repr(task.key).encode())
    # A resumed task gets another random stream, so that it does not repeat its proposals.
    strategy = batch.create_strategy(space, np.random.default_rng([batch.seed, task_seed, len(trials)]))
    for trial in trials.values():
        strategy.observe(trial)
    pending = [schedule for schedule in (reference, *presets) if schedule not in trials]
    num_repeats = 0
    try:
        problem = SparseProblem(
            operator=op, matrix=batch.pattern.to_matrix(np.dtype(task.dtype)), n_cols=task.n_cols
        )
        with ScheduleEvaluator(problem, reference, cache_dir=batch.cache_dir) as evaluator:
            while (
                len(trials) < batch.schedules and num_repeats < _MAX_REPEATS and time.time() < batch.end_time
            ):
                schedule = pending.pop(0) if pending else strategy.propose().canonicalize(op, extents)
                if schedule in trials:
                    num_repeats += 1
                    continue
                num_repeats = 0
                trial = trials[schedule] = _measure_undisturbed(evaluator, schedule)
                strategy.observe(trial)
                yield task, trial
                if _reference_failed(trials, reference):
                    return
    except (RunError, InputError, MemoryError) as error:
        # A reference that cannot be built or exceeds the memory does not stop the other tasks.
        if reference not in trials:
            yield task, Trial(schedule=reference, error=f"{type(error).__name__}: {error}")
            return
        raise


def _measure_undisturbed(evaluator: ScheduleEvaluator, schedule: Schedule) -> Trial:
    trial = evaluator.measure(schedule)
    if not trial.disturbed:
        return trial
    repeat = evaluator.measure(schedule)
    if repeat.error is not None:
        return trial
    return min(repeat, trial, key=lambda candidate: (candidate.disturbed, candidate.latency_ms))


def _list_presets(task: TuningTask) -> list[Schedule]:
    """List the presets, the reference first."""
    op, extents = OPERATORS[task.operator], task.extents()
    preset_schedules = build_presets(op, extents, task.threads)
    first = preset_schedules.pop(REFERENCE_PRESETS[op.name])
    return [schedule.canonicalize(op, extents) for schedule in (first, *preset_schedules.values())]


def _reference_failed(trials: Mapping[Schedule, Trial], reference: Schedule) -> bool:
    return reference in trials and trials[reference].error is not None


def _summarize(
    root: Path, tasks: Iterable[TuningTask], log: CollectionLog, initial_rows: int, seconds: float
) -> CollectionResult:
    rows = [trial for trials in log.trials.values() for trial in trials.values()]
    counts, failed_references = [], {}
    for task in tasks:
        trials_of_device = log.find(task)
        counts.append(sum(map(len, trials_of_device.values())))
        reference = _list_presets(task)[0]
        for trials in trials_of_device.values():
            if _reference_failed(trials, reference):
                failed_references[f"{task.operator} on {task.matrix}"] = str(trials[reference].error)
    return CollectionResult(
        out_dir=root,
        tasks=len(counts),
        rows=len(rows),
        added=len(rows) - initial_rows,
        failed=sum(trial.error is not None for trial in rows),
        disturbed=sum(trial.disturbed for trial in rows),
        min_rows=min(counts),
        failed_references=failed_references,
        seconds=seconds,
    )
