"""Label sets: measured latencies of schedules and the sparsity patterns, in a directory.

::

    labels.parquet                    one row for each measurement, with the columns of its task
    patterns/<digest>.safetensors     `rows` and `cols` (int32) of a pattern, its shape as metadata

Schedules are canonical for the extents of the task, so schedules that run identically have equal lines.
`latency_ms` is the fastest sample; it is null if the schedule failed, and `error` has the reason. `ratio` is
relative to the reference schedule of the task, measured in turns; it is null without a reference. `disturbed`
is whether other processes used the machine; it is null if unknown.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseflow.core.files import write_atomic
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.schedule.matrices import FLOAT_DTYPES, SparsityPattern
from sparseflow.tuning.schedule.operators import OPERATORS

if TYPE_CHECKING:
    import pyarrow as pa

LABELS_FILE = "labels.parquet"
PATTERNS_DIR = "patterns"

_METADATA = {b"sparseflow": b"labels", b"version": b"1"}
"""Metadata of the Parquet file, which identifies it."""

_TEXT_COLUMNS = ("operator", "matrix", "family", "dtype", "device", "pattern", "schedule", "error")
_COUNT_COLUMNS = ("rows", "cols", "nnz", "n_cols", "threads")
_TIME_COLUMNS = ("latency_ms", "ratio")
_TASK_COLUMNS = (
    "operator", "matrix", "family", "rows", "cols", "nnz", "n_cols", "dtype", "threads", "device", "pattern",
)  # fmt: skip
_NULLABLE_COLUMNS = ("nnz", "n_cols", "pattern", "error", "disturbed", *_TIME_COLUMNS)


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
        folder: Directory.
        tasks: Tasks in the order of the file.
    """

    def __init__(self, folder: Path, table: pa.Table) -> None:
        self.folder = folder
        self._lines, self._schedule = _encode_column(table, "schedule")
        self._latency, self._ratio = (_read_floats(table, name) for name in _TIME_COLUMNS)
        columns = {name: _encode_column(table, name) for name in _TASK_COLUMNS}
        task_codes = _combine_codes([codes for _, codes in columns.values()])
        _, first, task_codes = np.unique(task_codes, return_index=True, return_inverse=True)
        self._rows_of_task = np.split(
            np.argsort(task_codes, kind="stable"), np.cumsum(np.bincount(task_codes))[:-1]
        )
        tasks = [
            _make_task({name: values[codes[row]] for name, (values, codes) in columns.items()})
            for row in first
        ]
        self._task_index = {tasks[index]: int(index) for index in np.argsort(first)}
        self.tasks: tuple[TuningTask, ...] = tuple(self._task_index)

    @classmethod
    def open(cls, folder: Path | str) -> LabelSet:
        """Read a label set.

        Raises:
            InputError: The directory has no labels.
            FileFormatError: The labels are damaged or of another format.
        """
        root = Path(folder)
        if not (root / LABELS_FILE).is_file():
            raise InputError(
                f"{root} has no labels ({LABELS_FILE}); pass a directory that `sparseflow tuning collect` or "
                "`sparseflow tuning import` wrote"
            )
        return cls(root, _read_table(root / LABELS_FILE))

    def read_latencies(self, task: TuningTask) -> ScheduleLatencies:
        """Return the successful schedules of a task.

        Raises:
            InputError: The task is not in `tasks`.
        """
        if task not in self._task_index:
            raise InputError(f"{self.folder} has no labels of this task: {task}")
        rows = self._rows_of_task[self._task_index[task]]
        rows = rows[~np.isnan(self._latency[rows])]
        codes, latency_ms, repeats = _group_medians(self._schedule[rows], self._latency[rows])
        rows_with_ratio = rows[~np.isnan(self._ratio[rows])]
        codes_with_ratio, medians, _ = _group_medians(
            self._schedule[rows_with_ratio], self._ratio[rows_with_ratio]
        )
        ratio = np.full(len(codes), np.nan)
        ratio[np.searchsorted(codes, codes_with_ratio)] = medians
        return ScheduleLatencies(
            schedules=tuple(self._lines[code] for code in codes),
            latency_ms=latency_ms,
            ratio=ratio,
            repeats=repeats,
        )

    def read_pattern(self, task: TuningTask) -> SparsityPattern | None:
        """Read the pattern of a task; None if it is unknown.

        Raises:
            FileFormatError: The file is missing or damaged.
        """
        return None if task.pattern is None else read_pattern(self.folder, task.pattern)


def write_labels(out_dir: Path | str, measurements: Iterable[tuple[TuningTask, ScheduleMeasurement]]) -> None:
    """Write `labels.parquet`, replacing an existing file; `write_pattern` writes the patterns first.

    Args:
        out_dir: Output directory.
        measurements: Rows in the order of the file.
    """
    import pyarrow as pa
    from pyarrow import parquet

    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    names = [field.name for field in fields(ScheduleMeasurement)]
    columns: dict[str, list[Any]] = {name: [] for name in (*_TASK_COLUMNS, *names)}
    for task, measurement in measurements:
        for name in _TASK_COLUMNS:
            columns[name].append(
                task.shape[name == "cols"] if name in ("rows", "cols") else getattr(task, name)
            )
        for name in names:
            columns[name].append(getattr(measurement, name))
    table = pa.table(columns, schema=_schema()).replace_schema_metadata(_METADATA)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    write_atomic(root / LABELS_FILE, buffer.getvalue())


def write_pattern(out_dir: Path | str, pattern: SparsityPattern) -> str:
    """Write a pattern to a label set if it is new, and return its digest."""
    from safetensors.numpy import save

    digest = pattern.digest()
    path = _pattern_path(out_dir, digest)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = {"shape": json.dumps(pattern.shape)}
        write_atomic(path, save({"rows": pattern.rows, "cols": pattern.cols}, metadata=shape))
    return digest


def read_pattern(folder: Path | str, digest: str) -> SparsityPattern:
    """Read a pattern by its digest.

    Raises:
        FileFormatError: The file is missing or has other content.
    """
    from safetensors import SafetensorError, safe_open

    path = _pattern_path(folder, digest)
    try:
        with safe_open(path, framework="numpy") as file:
            height, width = json.loads((file.metadata() or {})["shape"])
            pattern = SparsityPattern(
                rows=file.get_tensor("rows"), cols=file.get_tensor("cols"), shape=(height, width)
            )
        is_valid = pattern.rows.dtype == pattern.cols.dtype == np.int32 and pattern.digest() == digest
    except FileNotFoundError as error:
        raise FileFormatError(f"pattern {path} is missing; copy the full directory") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path} is not a pattern: {error}") from error
    if not is_valid:
        raise FileFormatError(f"{path} is damaged: its pattern has another digest")
    return pattern


def _pattern_path(folder: Path | str, digest: str) -> Path:
    return Path(folder) / PATTERNS_DIR / f"{digest}.safetensors"


def _schema() -> pa.Schema:
    import pyarrow as pa

    kinds = {
        **dict.fromkeys(_TEXT_COLUMNS, pa.dictionary(pa.int32(), pa.string())),
        **dict.fromkeys(_COUNT_COLUMNS, pa.int64()),
        **dict.fromkeys(_TIME_COLUMNS, pa.float64()),
        "disturbed": pa.bool_(),
    }
    order = (*_TASK_COLUMNS, *(field.name for field in fields(ScheduleMeasurement)))
    return pa.schema([pa.field(name, kinds[name], nullable=name in _NULLABLE_COLUMNS) for name in order])


def _read_table(path: Path) -> pa.Table:
    """Read and validate the Parquet file."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        metadata = table.schema.metadata or {}
        is_label_file = all(metadata.get(key) == value for key, value in _METADATA.items())
        if is_label_file:
            table = table.select(_schema().names).cast(_schema())
            table.validate(full=True)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise FileFormatError(f"{path} is not a readable label file: {error}") from error
    if not is_label_file:
        raise FileFormatError(
            f"{path} is not a label file of this version of SparseFlow; collect or import the labels again"
        )
    damage = _find_damage(table)
    if damage is not None:
        raise FileFormatError(f"{path} is damaged: {damage}")
    return table


def _find_damage(table: pa.Table) -> str | None:
    """Return the first impossible value of a table, or None."""
    for name in _COUNT_COLUMNS:
        values = table[name].drop_null().to_numpy()
        if (values < (0 if name == "nnz" else 1)).any():
            return f"`{name}` has the value {values.min()}"
    for name in _TIME_COLUMNS:
        values = table[name].drop_null().to_numpy()
        if not (np.isfinite(values) & (values > 0.0)).all():
            return f"`{name}` has a value that is not a positive time"
    failed = table["error"].is_valid().to_numpy()
    if (failed == table["latency_ms"].is_valid().to_numpy()).any():
        return "a row needs either a latency or an error"
    for name, known in (("operator", set(OPERATORS)), ("dtype", {str(dtype) for dtype in FLOAT_DTYPES})):
        unknown = sorted({str(value) for value in table[name].unique().to_pylist()} - known)
        if unknown:
            return f"`{name}` has the value {unknown[0]!r}"
    needs_columns = np.isin(
        _read_strings(table, "operator"), [name for name, spec in OPERATORS.items() if spec.dense_axes]
    )
    if (needs_columns != table["n_cols"].is_valid().to_numpy()).any():
        return "a value of `n_cols` does not fit the operator"
    return None


def _read_strings(table: pa.Table, name: str) -> np.ndarray:
    values, codes = _encode_column(table, name)
    return np.array(values, object)[codes]


def _encode_column(table: pa.Table, name: str) -> tuple[list[Any], np.ndarray]:
    """Return the distinct values of a column, None last, and the code of each row, shape [n], int64."""
    import pyarrow as pa

    column = table[name].combine_chunks()
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    values = [*column.dictionary.to_pylist(), None]
    codes = column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
    return values, codes.astype(np.int64)


def _read_floats(table: pa.Table, name: str) -> np.ndarray:
    """Return a column as float64, shape [n], with NaN for null."""
    return np.array(table[name].fill_null(np.nan).to_numpy(), np.float64)


def _combine_codes(columns: list[np.ndarray]) -> np.ndarray:
    """Return one code for each row that is equal if all columns are equal."""
    combined = np.zeros(len(columns[0]), np.int64)
    for codes in columns:
        combined = np.unique(combined * (codes.max(initial=0) + 1) + codes, return_inverse=True)[1]
    return combined


def _make_task(cells: dict[str, Any]) -> TuningTask:
    shape = (cells.pop("rows"), cells.pop("cols"))
    return TuningTask(shape=shape, **cells)


def _group_medians(codes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct codes in ascending order, and the median and the count of their values."""
    values = values[np.lexsort((values, codes))]
    unique_codes, counts = np.unique(codes, return_counts=True)
    first = np.cumsum(counts) - counts
    middle = values[first + (counts - 1) // 2], values[first + counts // 2]
    return unique_codes, 0.5 * (middle[0] + middle[1]), counts
