"""Label sets: measured latencies of schedules and the sparsity patterns, in a directory.

::

    labels.parquet                    `LabelHeader` and one row for each measurement with its task
    patterns/<digest>.safetensors     `PatternHeader`, `rows` and `cols` (int32) of a pattern

Schedules are canonical for the extents of the task, so schedules that run identically have equal lines.
`latency_ms` is the fastest sample; it is null if the schedule failed, and `error` has the reason. `ratio` is
relative to the reference schedule of the task, measured in turns; it is null without a reference. `disturbed`
is whether other processes used the machine; it is null if unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sparseflow.core.artifact import Artifact
from sparseflow.core.checks import check_at_least, check_between, check_one_of
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.schedule.matrices import FLOAT_DTYPES, SparsityPattern
from sparseflow.tuning.schedule.matrix_market import MAX_EXTENT
from sparseflow.tuning.schedule.operators import OPERATORS

if TYPE_CHECKING:
    import pyarrow as pa

LABELS_FILE = "labels.parquet"
PATTERNS_DIR = "patterns"

_COUNT_COLUMNS = ("rows", "cols", "nnz", "n_cols", "threads")
_TIME_COLUMNS = ("latency_ms", "ratio")
_TASK_COLUMNS = (
    "operator", "matrix", "family", "rows", "cols", "nnz", "n_cols", "dtype", "threads", "device", "pattern",
)  # fmt: skip
_NULLABLE_COLUMNS = ("nnz", "n_cols", "pattern", "error", "disturbed", *_TIME_COLUMNS)


class LabelHeader(Artifact):
    """Metadata of `labels.parquet`."""

    FORMAT: ClassVar[str] = "sparseflow.tuning.labels"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "write the labels with `sparseflow tuning collect` or `sparseflow tuning import`"


class PatternHeader(Artifact):
    """Metadata of the file of a pattern."""

    FORMAT: ClassVar[str] = "sparseflow.tuning.pattern"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "copy the full directory of the labels, or collect or import them again"

    shape: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class TuningTask:
    """An operator on one matrix, for which schedules are ranked.

    Attributes:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: Matrix name.
        family: Family of related matrices; see `families`.
        shape: Rows and columns of the matrix.
        nnz: Number of elements; None if unknown.
        n_cols: Columns of the dense operands; None for SpMV.
        dtype: `"float32"` or `"float64"`.
        threads: Maximum number of threads of a schedule.
        device: CPU that the schedules ran on.
        pattern: Digest of the pattern; None if unknown.

    Raises:
        InputError: The operator or dtype is unknown, an extent is out of range, or `n_cols` does not fit.
    """

    operator: str
    matrix: str
    family: str
    shape: tuple[int, int]
    nnz: int | None
    n_cols: int | None
    dtype: str
    threads: int
    device: str
    pattern: str | None

    def __post_init__(self) -> None:
        check_one_of(OPERATORS, operator=self.operator)
        check_one_of([str(dtype) for dtype in FLOAT_DTYPES], dtype=self.dtype)
        rows, cols = self.shape
        counts: dict[str, int | None] = {"rows": rows, "cols": cols, "threads": self.threads}
        if OPERATORS[self.operator].dense_axes:
            counts["n_cols"] = self.n_cols
        elif self.n_cols is not None:
            raise InputError(f"`n_cols` (={self.n_cols}) must be None for {self.operator}")
        check_at_least(1, **counts)
        check_at_least(0, nnz=self.nnz or 0)
        # Label sets have 64 bits for each of them.
        check_between(1, MAX_EXTENT, **counts)
        check_between(0, rows * cols, nnz=self.nnz or 0)

    @property
    def key(self) -> tuple[object, ...]:
        """Fields that identify a task; names and the device do not."""
        return self.operator, self.pattern, self.n_cols, self.dtype, self.threads

    def extents(self) -> dict[str, int]:
        """Return axis name -> extent."""
        sizes = (*self.shape, *(() if self.n_cols is None else (self.n_cols,)))
        return dict(zip(OPERATORS[self.operator].axes, sizes, strict=True))


@dataclass(frozen=True, kw_only=True)
class ScheduleMeasurement:
    """One measurement of a schedule.

    Attributes:
        schedule: Canonical line.
        latency_ms: Latency, milliseconds; None if it failed.
        ratio: Latency over the reference's; None if it failed or there was no reference.
        error: Error message; None if it succeeded.
        disturbed: Whether other processes used the machine; None if unknown.
    """

    schedule: str
    latency_ms: float | None = None
    ratio: float | None = None
    error: str | None = None
    disturbed: bool | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ScheduleLatencies:
    """Successful schedules of a task, each once.

    Attributes:
        schedules: Lines of n schedules.
        latency_ms: Median latency over repeats, milliseconds, shape [n], float64.
        ratio: Median ratio to the reference, shape [n], float64; NaN if unknown.
        repeats: Number of measurements, shape [n], int64.
    """

    schedules: tuple[str, ...]
    latency_ms: np.ndarray
    ratio: np.ndarray
    repeats: np.ndarray


class LabelSet:
    """Labels of one directory; `LabelSet.open` reads them.

    Attributes:
        folder: Directory of the label set.
        tasks: Tasks in the order of the file.
    """

    def __init__(self, folder: Path, table: pa.Table) -> None:
        self.folder = folder
        self._schedules, self._schedule_codes = _encode_column(table, "schedule")
        self._latency_ms, self._ratio = (
            np.array(table[name].fill_null(np.nan).to_numpy(), np.float64) for name in _TIME_COLUMNS
        )
        self._rows_by_task = _group_rows_by_task(table)
        self.tasks: tuple[TuningTask, ...] = tuple(self._rows_by_task)

    @classmethod
    def open(cls, folder: Path | str) -> LabelSet:
        """Read a label set.

        Raises:
            InputError: The directory has no labels.
            FileFormatError: The labels are damaged or of another format.
        """
        path = Path(folder) / LABELS_FILE
        _, table = LabelHeader.load_table(path)
        import pyarrow as pa

        try:
            table = table.select(_schema().names).cast(_schema())
            table.validate(full=True)
            _check_outcomes(table)
            return cls(path.parent, table)
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise FileFormatError(f"{path} is damaged: {error}; {LabelHeader.HINT}") from error

    def read_latencies(self, task: TuningTask) -> ScheduleLatencies:
        """Return the successful schedules of a task.

        Raises:
            InputError: The task is not in `tasks`.
        """
        if task not in self._rows_by_task:
            raise InputError(f"{self.folder} has no labels of this task: {task}")
        rows = self._rows_by_task[task]
        rows = rows[~np.isnan(self._latency_ms[rows])]
        codes, latency_ms, repeats = _group_medians(self._schedule_codes[rows], self._latency_ms[rows])
        rows_with_ratio = rows[~np.isnan(self._ratio[rows])]
        codes_with_ratio, medians, _ = _group_medians(
            self._schedule_codes[rows_with_ratio], self._ratio[rows_with_ratio]
        )
        ratio = np.full(len(codes), np.nan)
        ratio[np.searchsorted(codes, codes_with_ratio)] = medians
        return ScheduleLatencies(
            schedules=tuple(self._schedules[code] for code in codes),
            latency_ms=latency_ms,
            ratio=ratio,
            repeats=repeats,
        )

    def read_pattern(self, task: TuningTask) -> SparsityPattern | None:
        """Read the pattern of a task; None if it is unknown.

        Raises:
            InputError: The file is missing.
            FileFormatError: The file is damaged.
        """
        return None if task.pattern is None else read_pattern(self.folder, task.pattern)


def write_labels(out_dir: Path | str, measurements: Iterable[tuple[TuningTask, ScheduleMeasurement]]) -> None:
    """Write `labels.parquet`, replacing an existing file; `write_pattern` writes the patterns first.

    Args:
        out_dir: Output directory.
        measurements: Rows in the order of the file.
    """
    import pyarrow as pa

    rows = [
        {**vars(task), **vars(measurement), "rows": task.shape[0], "cols": task.shape[1]}
        for task, measurement in measurements
    ]
    LabelHeader().save_table(Path(out_dir) / LABELS_FILE, pa.Table.from_pylist(rows, schema=_schema()))


def write_pattern(out_dir: Path | str, pattern: SparsityPattern) -> str:
    """Write a pattern to a label set if it is new, and return its digest."""
    import torch

    digest = pattern.digest()
    path = _pattern_path(out_dir, digest)
    if not path.exists():
        tensors = {"rows": torch.from_numpy(pattern.rows), "cols": torch.from_numpy(pattern.cols)}
        PatternHeader(shape=pattern.shape).save_tensors(path, tensors)
    return digest


def read_pattern(folder: Path | str, digest: str) -> SparsityPattern:
    """Read a pattern by its digest.

    Raises:
        InputError: The file is missing.
        FileFormatError: The file has other content, or `digest` is no digest.
    """
    # A label set could name a file outside of its directory.
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise FileFormatError(f"{folder}: pattern {digest[:80]!r} is no SHA-256 digest; {PatternHeader.HINT}")
    path = _pattern_path(folder, digest)
    header, tensors = PatternHeader.load_tensors(path)
    try:
        # Unsorted or repeated coordinates change the digest.
        pattern = SparsityPattern.from_coords(tensors["rows"].numpy(), tensors["cols"].numpy(), header.shape)
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged: {error}; {header.HINT}") from error
    if pattern.digest() != digest:
        raise FileFormatError(f"{path} is damaged: its pattern has another digest; {header.HINT}")
    return pattern


def _pattern_path(folder: Path | str, digest: str) -> Path:
    return Path(folder) / PATTERNS_DIR / f"{digest}.safetensors"


def _schema() -> pa.Schema:
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    kinds: dict[str, pa.DataType] = {"disturbed": pa.bool_()}
    kinds |= dict.fromkeys(_COUNT_COLUMNS, pa.int64()) | dict.fromkeys(_TIME_COLUMNS, pa.float64())
    order = (*_TASK_COLUMNS, *(field.name for field in fields(ScheduleMeasurement)))
    return pa.schema(
        [pa.field(name, kinds.get(name, text), nullable=name in _NULLABLE_COLUMNS) for name in order]
    )


def _check_outcomes(table: pa.Table) -> None:
    """Check that each row has either positive times or an error; raises InputError."""
    for name in _TIME_COLUMNS:
        times = table[name].drop_null().to_numpy()
        if not (np.isfinite(times) & (times > 0.0)).all():
            raise InputError(f"`{name}` has a value that is not a positive time")
    if (table["error"].is_valid().to_numpy() == table["latency_ms"].is_valid().to_numpy()).any():
        raise InputError("a row needs either a latency or an error")


def _group_rows_by_task(table: pa.Table) -> dict[TuningTask, np.ndarray]:
    """Return task -> indices of its rows, ascending, int64; tasks are in the order of their first rows."""
    columns = {name: _encode_column(table, name) for name in _TASK_COLUMNS}
    keys = np.stack([codes for _, codes in columns.values()], axis=1)
    _, first_rows, group_of_row = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    group_of_row = group_of_row.ravel()
    group_ends = np.cumsum(np.bincount(group_of_row))
    rows_by_group = np.split(np.argsort(group_of_row, kind="stable"), group_ends[:-1])
    rows_by_task: dict[TuningTask, np.ndarray] = {}
    for group in np.argsort(first_rows):
        cells = {name: values[codes[first_rows[group]]] for name, (values, codes) in columns.items()}
        task = TuningTask(shape=(cells.pop("rows"), cells.pop("cols")), **cells)
        rows_by_task[task] = rows_by_group[group]
    return rows_by_task


def _encode_column(table: pa.Table, name: str) -> tuple[list[Any], np.ndarray]:
    """Return the distinct values of a column, None last, and the code of each row, shape [n], int64."""
    import pyarrow as pa

    column = table[name].combine_chunks()
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    values = [*column.dictionary.to_pylist(), None]
    codes = column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
    return values, codes.astype(np.int64)


def _group_medians(codes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct codes in ascending order, and the median and the count of their values."""
    values = values[np.lexsort((values, codes))]  # Sorted by code, then by value.
    unique_codes, counts = np.unique(codes, return_counts=True)
    starts = np.cumsum(counts) - counts
    lower, upper = values[starts + (counts - 1) // 2], values[starts + counts // 2]
    return unique_codes, 0.5 * (lower + upper), counts
