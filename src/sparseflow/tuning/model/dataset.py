"""Labels as the network learns from them: groups of encoded schedules, one a task, and batches of them.

Building takes a while (lines are parsed, patterns read), so build once and train many networks on the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.tuning.measure.labels import LabelSet, Task
from sparseflow.tuning.model.net.coarsen import Cells, coarsen
from sparseflow.tuning.model.net.statistics import WITHOUT_MATRIX, pattern_statistics, statistics
from sparseflow.tuning.model.net.tokenizer import Encoder
from sparseflow.tuning.schedule.operators import OPERATORS, operator
from sparseflow.tuning.schedule.schedule import Schedule

Mode = Literal["naive", "mix"]

FAVOUR = 0.5
"""Share of a batch that is drawn by label: fast schedules are few, and it is their order that counts."""

SLOWEST = 1 / 128
"""Labels below are clipped to it: how much slower than that something is, no ranking needs to know."""


def load_dataset(
    label_sets: Iterable[Path],
    *,
    operators: Sequence[str] | None = None,
    hold_out: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> tuple[Dataset, Dataset | None]:
    """Load label sets as training data and held-out data.

    Args:
        label_sets: Directories of label sets.
        operators: Operators to learn; by default all with labels.
        hold_out: Families of matrices to hold out; None holds out nothing.
        progress: Callback that takes a message and the fraction done.

    Raises:
        InputError: An operator or a family is unknown, or no task is left on one side.
        FileFormatError: A label set is damaged.
    """
    data = Dataset.of([LabelSet.open(path) for path in label_sets], progress=progress)
    if operators is not None:
        names = {operator(name).name for name in operators}
        data = data.only(lambda task: task.operator in names)
    return (data, None) if hold_out is None else data.hold_out(hold_out)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The schedules of one task.

    Attributes:
        task: It.
        ids: Their tokens in the data set's encoder, int32, (n, length).
        latency: float64, (n,): over the task's reference where that is known for all, because it is steadier,
            else in milliseconds. Only ratios within the group mean something.
        labels: float32, (n,): lowest latency over the schedule's, at least `SLOWEST`.
        weights: float32, (n,), below 1: r / (r + 1) for a latency from r repeats.
        statistics: float32, (WIDTH,).
    """

    task: Task
    ids: np.ndarray
    latency: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    statistics: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, rows: np.ndarray) -> Group:
        """Some of its schedules; labels stay what they are in all of them."""
        arrays = {name: getattr(self, name)[rows] for name in ("ids", "latency", "labels", "weights")}
        return replace(self, **arrays)

    @property
    def matrix(self) -> str:
        """What tells its matrix from others: the pattern's digest where it is known, else the name."""
        return self.task.pattern or self.task.matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Schedules of g tasks, up to s of each.

    Attributes:
        ids: int32, (g, s, length).
        labels: float32, (g, s).
        weights: float32, (g, s); 0 where a task has fewer schedules.
        statistics: float32, (g, WIDTH).
        patterns: Digests, each once.
        which: Each task's pattern among them, int64, (g,); -1 where it is not known.
    """

    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    statistics: np.ndarray
    patterns: tuple[str, ...]
    which: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What a step of training looks at.

    Attributes:
        mode: `"naive"`, one operator on one matrix, or `"mix"`, tasks of several.
        schedules: Schedules of each task; see `FAVOUR`.
        matrices: Matrices of a step in `"mix"`.
        tasks: Tasks of each matrix at most in `"mix"`.
        hidden: Share of tasks whose matrix is hidden, its pattern and all statistics of it. A matrix is known
            by its statistics: where all are told, what is learnt is each matrix by heart, rather than what
            schedules are good on most of them.

    Raises:
        InputError: A number is out of range.
    """

    mode: Mode = "mix"
    schedules: int = 64
    matrices: int = 4
    tasks: int = 2
    hidden: float = 0.5

    def __post_init__(self) -> None:
        if self.mode not in ("naive", "mix"):
            raise InputError(f"`mode` (={self.mode!r}) must be naive or mix")
        for name, least in (("schedules", 2), ("matrices", 1), ("tasks", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"`{name}` (={value!r}) must be a whole number of at least {least}")
        if not 0.0 <= self.hidden <= 1.0:
            raise InputError(f"`hidden` (={self.hidden!r}) must be a share, from 0 to 1")

    @property
    def most(self) -> int:
        """Schedules of a step, at most."""
        return self.schedules * (1 if self.mode == "naive" else self.matrices * self.tasks)


class Dataset:
    """Groups, with what all of them share.

    Attributes:
        groups: One a task.
        encoder: What encoded their schedules.
    """

    def __init__(self, groups: Sequence[Group], encoder: Encoder, patterns: _Patterns) -> None:
        self.groups = tuple(groups)
        self.encoder = encoder
        self._patterns = patterns
        members: dict[str, list[int]] = {}
        for at, group in enumerate(self.groups):
            members.setdefault(group.matrix, []).append(at)
        # A large pool tells more than a small one, but not as much more as it is larger.
        self._weight = np.sqrt([len(group) for group in self.groups])
        self._members = [np.array(each) for each in members.values()]
        self._of_matrix = np.array([self._weight[each].sum() for each in self._members])

    @classmethod
    def of(cls, label_sets: Iterable[LabelSet], *, progress: Progress | None = None) -> Dataset:
        """Read and encode all tasks with at least two schedules.

        Raises:
            InputError: A schedule is not one of its operator, or no task is left.
            FileFormatError: A line or a pattern's file is damaged.
        """
        tasks = [(labels, task) for labels in label_sets for task in labels.tasks]
        encoder, patterns, groups = Encoder(), _Patterns(), []
        for at, (labels, task) in enumerate(tasks):
            if progress is not None:
                progress(f"reading {task.operator} on {task.matrix}", at / len(tasks))
            group = _group(labels, task, encoder, patterns)
            if group is not None:
                groups.append(group)
        if not groups:
            raise InputError(
                f"none of {len(tasks)} tasks has two schedules that ran: there is nothing to learn"
            )
        return cls(groups, encoder, patterns)

    @property
    def schedules(self) -> int:
        """Schedules of all groups."""
        return sum(map(len, self.groups))

    @property
    def families(self) -> tuple[str, ...]:
        """Families of matrices, in order of appearance."""
        return tuple(dict.fromkeys(group.task.family for group in self.groups))

    @property
    def patterns(self) -> tuple[str, ...]:
        """Digests of the patterns that are known, in order of appearance."""
        return tuple(dict.fromkeys(group.task.pattern for group in self.groups if group.task.pattern))

    def only(self, keep: Callable[[Task], bool]) -> Dataset:
        """Those groups whose tasks are to be kept, as a data set that shares encodings and patterns.

        Raises:
            InputError: None is left.
        """
        groups = [group for group in self.groups if keep(group.task)]
        if not groups:
            raise InputError(f"none of {len(self.groups)} tasks is left")
        return Dataset(groups, self.encoder, self._patterns)

    def hold_out(self, families: Iterable[str]) -> tuple[Dataset, Dataset]:
        """What is learnt from, and what is held out: all matrices of these families.

        Raises:
            InputError: There is no such family, or nothing is left on one side.
        """
        held = set(families)
        unknown = sorted(held - set(self.families))
        if unknown:
            raise InputError(
                f"no matrix is of the family {', '.join(unknown)}; there are: {', '.join(self.families)}"
            )
        return self.only(lambda task: task.family not in held), self.only(lambda task: task.family in held)

    def names(self, pattern: str) -> str:
        """The matrices that have a pattern, for people to read."""
        return ", ".join(dict.fromkeys(one.task.matrix for one in self.groups if one.task.pattern == pattern))

    def cells(self, pattern: str, most: int) -> Cells:
        """A pattern, coarsened; kept for the next time."""
        return self._patterns.cells(pattern, most)

    def batch(self, sampling: Sampling, random: np.random.Generator) -> Batch:
        """What one step learns from; the same for the same state of `random`."""
        mix = sampling.mode == "mix"
        matrices = _draw(self._of_matrix, sampling.matrices if mix else 1, random)
        groups: list[Group] = []
        for members in (self._members[at] for at in matrices):
            drawn = _draw(self._weight[members], sampling.tasks if mix else 1, random)
            groups += [self.groups[members[at]] for at in drawn]
        rows = [
            _draw(
                (1 - FAVOUR) / len(one) + FAVOUR * one.labels / one.labels.sum(), sampling.schedules, random
            )
            for one in groups
        ]
        return _batch(groups, rows, random.random(len(groups)) < sampling.hidden)


class _Patterns:
    """Patterns by their digests: read when they are needed, kept coarsened."""

    def __init__(self) -> None:
        self._source: dict[str, tuple[LabelSet, Task]] = {}
        self._statistics: dict[str, np.ndarray] = {}
        self._cells: dict[tuple[str, int], Cells] = {}

    def statistics(self, labels: LabelSet, task: Task) -> np.ndarray | None:
        if task.pattern is None:
            return None
        if task.pattern not in self._source:
            self._source[task.pattern] = (labels, task)
            pattern = self._read(task.pattern)
            self._statistics[task.pattern] = pattern_statistics(pattern.rows, pattern.cols, pattern.shape)
        return self._statistics[task.pattern]

    def cells(self, digest: str, most: int) -> Cells:
        if (digest, most) not in self._cells:
            pattern = self._read(digest)
            self._cells[digest, most] = coarsen(pattern.rows, pattern.cols, pattern.shape, most=most)
        return self._cells[digest, most]

    def _read(self, digest: str) -> Any:
        labels, task = self._source[digest]
        return labels.pattern(task)


def _group(labels: LabelSet, task: Task, encoder: Encoder, patterns: _Patterns) -> Group | None:
    rows = labels.rows(task)
    if len(rows.schedules) < 2:
        return None
    schedules = [Schedule.parse(line) for line in rows.schedules]
    latency = rows.ratio if np.isfinite(rows.ratio).all() else rows.latency_ms
    return Group(
        task=task,
        ids=encoder.encode(schedules, OPERATORS[task.operator], task.extents()),
        latency=latency,
        labels=np.maximum(latency.min() / latency, SLOWEST).astype(np.float32),
        weights=(rows.repeats / (rows.repeats + 1.0)).astype(np.float32),
        statistics=statistics(
            operator=task.operator,
            shape=task.shape,
            nnz=task.nnz,
            n_cols=task.n_cols,
            dtype=task.dtype,
            threads=task.threads,
            pattern=patterns.statistics(labels, task),
        ),
    )


def _batch(groups: Sequence[Group], rows: Sequence[np.ndarray], hidden: np.ndarray) -> Batch:
    """Rows of each group, together; the matrices of some are hidden."""
    shape = (len(groups), max(map(len, rows)))
    ids = np.zeros((*shape, max(group.ids.shape[1] for group in groups)), np.int32)
    labels, weights = np.ones(shape, np.float32), np.zeros(shape, np.float32)
    told = np.stack([group.statistics for group in groups])
    told[hidden] *= WITHOUT_MATRIX
    digests = [None if hide else group.task.pattern for group, hide in zip(groups, hidden, strict=True)]
    patterns = tuple(dict.fromkeys(digest for digest in digests if digest is not None))
    for at, (group, row) in enumerate(zip(groups, rows, strict=True)):
        ids[at, : len(row), : group.ids.shape[1]] = group.ids[row]
        labels[at, : len(row)] = group.labels[row]
        weights[at, : len(row)] = group.weights[row]
    return Batch(
        ids=ids,
        labels=labels,
        weights=weights,
        statistics=told,
        patterns=patterns,
        which=np.array([-1 if digest is None else patterns.index(digest) for digest in digests]),
    )


def _draw(weights: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Up to `count` places, none twice, drawn by weight (Efraimidis and Spirakis 2006), ascending."""
    if count >= len(weights):
        return np.arange(len(weights))
    keys = random.standard_exponential(len(weights)) / weights
    return np.sort(np.argpartition(keys, count)[:count])


_LEAST = 2**8
"""Cells that are too few to tell much."""

_LOG = logging.getLogger(__name__)


class Room:
    """The cells of a data set's patterns, as many as fit.

    Args:
        data: Where patterns are from.
        most: Cells of a pattern at first.

    Attributes:
        limits: Digest -> cells at most, 0 where the pattern is set aside; of those that had to shrink.
    """

    def __init__(self, data: Dataset, most: int) -> None:
        self._data = data
        self._most = most
        self.limits: dict[str, int] = {}

    def cells(self, digest: str) -> Cells | None:
        """A pattern's cells; None where it is set aside."""
        limit = self.limits.get(digest, self._most)
        return self._data.cells(digest, limit) if limit else None

    def shrink(self, digests: Iterable[str]) -> bool:
        """Make room by halving the largest of these patterns; says whether there was one."""
        sizes = {digest: len(found.coords) for digest in digests if (found := self.cells(digest)) is not None}
        if not sizes:
            return False
        largest = max(sizes, key=sizes.__getitem__)
        half = sizes[largest] // 2
        self.limits[largest] = half if half >= _LEAST else 0
        _LOG.warning(
            "the pattern of %s does not fit into memory with %d cells; %s",
            self._data.names(largest),
            sizes[largest],
            f"it is coarsened to {half}" if half >= _LEAST else "it is set aside, as if it was not known",
        )
        return True

    def take(self, limits: Mapping[str, int]) -> None:
        """Go on with limits that were found before."""
        self.limits = dict(limits)
