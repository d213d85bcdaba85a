"""Training data of AutoSparse Net: tokenized schedules with labels, grouped by task, and their batches.

Building a dataset parses lines and reads patterns, which is slow; it can be shared by many trainings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field

from sparseflow.core.config import StrictModel
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.tuning.measure.labels import LabelSet, TuningTask
from sparseflow.tuning.model.net.coarsen import Cells, coarsen
from sparseflow.tuning.model.net.statistics import (
    HIDDEN_MATRIX_MASK,
    compute_pattern_statistics,
    compute_task_statistics,
)
from sparseflow.tuning.model.net.tokenizer import ScheduleTokenizer
from sparseflow.tuning.schedule.operators import OPERATORS, get_operator
from sparseflow.tuning.schedule.schedule import Schedule

LABEL_SAMPLING_FRACTION = 0.5
"""Weight of labels in the sampling of schedules: fast schedules are few, and their order matters most."""

MIN_LABEL = 1 / 128
"""Minimum label; slower schedules are not distinguished."""


def load_dataset(
    label_sets: Iterable[Path],
    *,
    operators: Sequence[str] | None = None,
    hold_out: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
) -> tuple[RankingDataset, RankingDataset | None]:
    """Load label sets as training data and held-out data.

    Args:
        label_sets: Directories of label sets.
        operators: Operators to learn; by default all with labels.
        hold_out: Families of matrices to hold out; None holds out nothing.
        exclude: Names of matrices to leave out.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: An operator or a family is unknown, or no task is left on one side.
        FileFormatError: A label set is damaged.
    """
    data = RankingDataset.from_label_sets([LabelSet.open(path) for path in label_sets], progress=progress)
    if operators is not None:
        names = {get_operator(name).name for name in operators}
        data = data.filter(lambda task: task.operator in names)
    if exclude:
        data = data.filter(lambda task: task.matrix not in exclude)
    return (data, None) if hold_out is None else data.hold_out(hold_out)


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskGroup:
    """Schedules of one task.

    Attributes:
        task: Task.
        ids: Token ids of the dataset's tokenizer, int32, shape [n, length].
        latency: float64, shape [n]: ratios to the reference if known for all schedules, because they are more
            stable, else milliseconds. Only ratios within the group are meaningful.
        labels: Lowest latency / latency, at least `MIN_LABEL`, float32, shape [n].
        weights: r / (r + 1) for r repeats, float32, shape [n].
        statistics: Task features, float32, shape [NUM_FEATURES].
    """

    task: TuningTask
    ids: np.ndarray
    latency: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    statistics: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def select_rows(self, rows: np.ndarray) -> TaskGroup:
        """Select schedules; their labels stay relative to the full group."""
        arrays = {name: getattr(self, name)[rows] for name in ("ids", "latency", "labels", "weights")}
        return replace(self, **arrays)

    @property
    def matrix(self) -> str:
        """Identifier of the matrix: the digest of the pattern if known, else the name."""
        return self.task.pattern or self.task.matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingBatch:
    """Up to s schedules of each of g tasks.

    Attributes:
        ids: Token ids, int32, shape [g, s, length].
        labels: float32, shape [g, s].
        weights: float32, shape [g, s]; 0 for padding.
        statistics: Task features, float32, shape [g, NUM_FEATURES].
        patterns: Distinct pattern digests.
        pattern_index: Index of each task's pattern, int64, shape [g]; -1 if unknown.
    """

    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    statistics: np.ndarray
    patterns: tuple[str, ...]
    pattern_index: np.ndarray


class BatchSampling(StrictModel):
    """Composition of a training batch.

    Attributes:
        mode: `"naive"` for one operator and one matrix, `"mix"` for several.
        schedules: Schedules of each task; see `LABEL_SAMPLING_FRACTION`.
        matrices: Matrices of a `"mix"` batch.
        tasks: Maximum number of tasks of each matrix in a `"mix"` batch.
        hidden_fraction: Fraction of tasks whose pattern and matrix features are hidden. Otherwise the network
            memorizes each matrix by its features instead of learning which schedules are generally good.
    """

    mode: Literal["naive", "mix"] = "mix"
    schedules: int = Field(default=64, ge=2)
    matrices: int = Field(default=4, ge=1)
    tasks: int = Field(default=2, ge=1)
    hidden_fraction: float = Field(default=0.5, ge=0.0, le=1.0)

    @property
    def max_schedules(self) -> int:
        """Maximum number of schedules of a batch."""
        return self.schedules * (1 if self.mode == "naive" else self.matrices * self.tasks)


class RankingDataset:
    """Groups of schedules that share a tokenizer and patterns.

    Attributes:
        groups: One group for each task.
        encoder: Tokenizer of the schedules.
    """

    def __init__(
        self, groups: Sequence[TaskGroup], encoder: ScheduleTokenizer, patterns: _PatternStore
    ) -> None:
        self.groups = tuple(groups)
        self.encoder = encoder
        self._pattern_store = patterns
        members: dict[str, list[int]] = {}
        for index, group in enumerate(self.groups):
            members.setdefault(group.matrix, []).append(index)
        # The information of a pool grows more slowly than its size.
        self._group_weights = np.sqrt([len(group) for group in self.groups])
        self._groups_of_matrix = [np.array(indices) for indices in members.values()]
        self._matrix_weights = np.array(
            [self._group_weights[indices].sum() for indices in self._groups_of_matrix]
        )

    @classmethod
    def from_label_sets(
        cls, label_sets: Iterable[LabelSet], *, progress: Progress | None = None
    ) -> RankingDataset:
        """Read and tokenize all tasks with at least two schedules.

        Raises:
            InputError: A schedule does not fit its operator, or no task has two schedules.
            FileFormatError: A line or a pattern file is damaged.
        """
        tasks = [(labels, task) for labels in label_sets for task in labels.tasks]
        encoder, patterns, groups = ScheduleTokenizer(), _PatternStore(), []
        for index, (labels, task) in enumerate(tasks):
            if progress is not None:
                progress(f"reading {task.operator} on {task.matrix}", index / len(tasks))
            group = _build_group(labels, task, encoder, patterns)
            if group is not None:
                groups.append(group)
        if not groups:
            raise InputError(f"none of {len(tasks)} tasks has two successful schedules")
        return cls(groups, encoder, patterns)

    @property
    def num_schedules(self) -> int:
        """Number of schedules of all groups."""
        return sum(map(len, self.groups))

    @property
    def families(self) -> tuple[str, ...]:
        """Families of matrices, in order of appearance."""
        return tuple(dict.fromkeys(group.task.family for group in self.groups))

    @property
    def patterns(self) -> tuple[str, ...]:
        """Digests of the known patterns, in order of appearance."""
        return tuple(dict.fromkeys(group.task.pattern for group in self.groups if group.task.pattern))

    def filter(self, predicate: Callable[[TuningTask], bool]) -> RankingDataset:
        """Return a dataset of the tasks that satisfy `predicate`; it shares tokens and patterns.

        Raises:
            InputError: No task is left.
        """
        groups = [group for group in self.groups if predicate(group.task)]
        if not groups:
            raise InputError(f"no task of {len(self.groups)} is left")
        return RankingDataset(groups, self.encoder, self._pattern_store)

    def hold_out(self, families: Iterable[str]) -> tuple[RankingDataset, RankingDataset]:
        """Split into training data and the held-out matrices of these families.

        Raises:
            InputError: A family is unknown, or one part is empty.
        """
        held_out = set(families)
        unknown = sorted(held_out - set(self.families))
        if unknown:
            raise InputError(f"unknown family {', '.join(unknown)}; choose from: {', '.join(self.families)}")
        return self.filter(lambda task: task.family not in held_out), self.filter(
            lambda task: task.family in held_out
        )

    def list_matrix_names(self, pattern: str) -> str:
        """Return the names of the matrices with a pattern, as text."""
        return ", ".join(
            dict.fromkeys(group.task.matrix for group in self.groups if group.task.pattern == pattern)
        )

    def get_cells(self, pattern: str, max_cells: int) -> Cells:
        """Return a coarsened pattern; results are cached."""
        return self._pattern_store.get_cells(pattern, max_cells)

    def batch(self, sampling: BatchSampling, rng: np.random.Generator) -> TrainingBatch:
        """Sample a training batch."""
        mix = sampling.mode == "mix"
        matrices = _sample_weighted(self._matrix_weights, sampling.matrices if mix else 1, rng)
        groups: list[TaskGroup] = []
        for members in (self._groups_of_matrix[index] for index in matrices):
            selected = _sample_weighted(self._group_weights[members], sampling.tasks if mix else 1, rng)
            groups += [self.groups[members[index]] for index in selected]
        rows = [
            _sample_weighted(
                (1 - LABEL_SAMPLING_FRACTION) / len(group)
                + LABEL_SAMPLING_FRACTION * group.labels / group.labels.sum(),
                sampling.schedules,
                rng,
            )
            for group in groups
        ]
        return _build_batch(groups, rows, rng.random(len(groups)) < sampling.hidden_fraction)


class _PatternStore:
    """Patterns by digest: read on demand, cached in coarsened form."""

    def __init__(self) -> None:
        self._source: dict[str, tuple[LabelSet, TuningTask]] = {}
        self._statistics: dict[str, np.ndarray] = {}
        self._cells: dict[tuple[str, int], Cells] = {}

    def compute_statistics(self, labels: LabelSet, task: TuningTask) -> np.ndarray | None:
        if task.pattern is None:
            return None
        if task.pattern not in self._source:
            self._source[task.pattern] = (labels, task)
            pattern = self._read(task.pattern)
            self._statistics[task.pattern] = compute_pattern_statistics(
                pattern.rows, pattern.cols, pattern.shape
            )
        return self._statistics[task.pattern]

    def get_cells(self, digest: str, max_cells: int) -> Cells:
        if (digest, max_cells) not in self._cells:
            pattern = self._read(digest)
            self._cells[digest, max_cells] = coarsen(
                pattern.rows, pattern.cols, pattern.shape, max_cells=max_cells
            )
        return self._cells[digest, max_cells]

    def _read(self, digest: str) -> Any:
        labels, task = self._source[digest]
        return labels.read_pattern(task)


def _build_group(
    labels: LabelSet, task: TuningTask, encoder: ScheduleTokenizer, patterns: _PatternStore
) -> TaskGroup | None:
    rows = labels.read_latencies(task)
    if len(rows.schedules) < 2:
        return None
    schedules = [Schedule.parse(line) for line in rows.schedules]
    latency = rows.ratio if np.isfinite(rows.ratio).all() else rows.latency_ms
    return TaskGroup(
        task=task,
        ids=encoder.encode(schedules, OPERATORS[task.operator], task.extents()),
        latency=latency,
        labels=np.maximum(latency.min() / latency, MIN_LABEL).astype(np.float32),
        weights=(rows.repeats / (rows.repeats + 1.0)).astype(np.float32),
        statistics=compute_task_statistics(
            operator=task.operator,
            shape=task.shape,
            nnz=task.nnz,
            n_cols=task.n_cols,
            dtype=task.dtype,
            threads=task.threads,
            pattern=patterns.compute_statistics(labels, task),
        ),
    )


def _build_batch(
    groups: Sequence[TaskGroup], rows: Sequence[np.ndarray], hidden: np.ndarray
) -> TrainingBatch:
    """Assemble rows of each group, with hidden matrices for some."""
    shape = (len(groups), max(map(len, rows)))
    ids = np.zeros((*shape, max(group.ids.shape[1] for group in groups)), np.int32)
    labels, weights = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    statistics = np.stack([group.statistics for group in groups])
    statistics[hidden] *= HIDDEN_MATRIX_MASK
    digests = [
        None if is_hidden else group.task.pattern for group, is_hidden in zip(groups, hidden, strict=True)
    ]
    patterns = tuple(dict.fromkeys(digest for digest in digests if digest is not None))
    for index, (group, row) in enumerate(zip(groups, rows, strict=True)):
        ids[index, : len(row), : group.ids.shape[1]] = group.ids[row]
        labels[index, : len(row)] = group.labels[row]
        weights[index, : len(row)] = group.weights[row]
    return TrainingBatch(
        ids=ids,
        labels=labels,
        weights=weights,
        statistics=statistics,
        patterns=patterns,
        pattern_index=np.array([-1 if digest is None else patterns.index(digest) for digest in digests]),
    )


def _sample_weighted(weights: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Sample up to `count` distinct indices by weight, in ascending order (Efraimidis and Spirakis 2006)."""
    if count >= len(weights):
        return np.arange(len(weights))
    keys = rng.standard_exponential(len(weights)) / weights
    return np.sort(np.argpartition(keys, count)[:count])


_OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
"""Parts of the messages of torch's RuntimeError: of allocations on a CPU, of CUDA and of its libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a tensor or an array did not fit into the memory of a CPU or a GPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_TEXTS)


_MIN_CELLS = 2**8
"""Patterns with fewer cells are not useful."""

_LOGGER = logging.getLogger(__name__)


class CellLimits:
    """Cell limits of patterns that do not fit into memory, found during training.

    A pattern that does not fit is coarsened to half as many cells. A pattern that does not fit with few cells
    is ignored, and its tasks are trained as if the pattern were unknown.

    Args:
        data: Dataset of the patterns.
        max_cells: Initial limit.

    Attributes:
        limits: Digest -> reduced limit; 0 if the pattern is ignored.
    """

    def __init__(self, data: RankingDataset, max_cells: int) -> None:
        self._data = data
        self._max_cells = max_cells
        self.limits: dict[str, int] = {}

    def get_cells(self, digest: str) -> Cells | None:
        """Return the cells of a pattern; None if it is ignored."""
        limit = self.limits.get(digest, self._max_cells)
        return self._data.get_cells(digest, limit) if limit else None

    def shrink(self, digests: Iterable[str]) -> bool:
        """Halve the largest of these patterns; return False if all are ignored."""
        sizes = {
            digest: len(cells.coords) for digest in digests if (cells := self.get_cells(digest)) is not None
        }
        if not sizes:
            return False
        largest = max(sizes, key=sizes.__getitem__)
        half = sizes[largest] // 2
        self.limits[largest] = half if half >= _MIN_CELLS else 0
        _LOGGER.warning(
            "the pattern of %s does not fit into memory with %d cells; %s",
            self._data.list_matrix_names(largest),
            sizes[largest],
            f"it is coarsened to {half}" if half >= _MIN_CELLS else "it is ignored",
        )
        return True

    def restore(self, limits: Mapping[str, int]) -> None:
        """Set the limits of an earlier run."""
        self.limits = dict(limits)
