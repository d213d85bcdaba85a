"""Labels: how long schedules took, task by task, and the patterns that they ran on; a folder on disk.

::

    labels.parquet                    a row a measurement, the columns of a task beside it
    patterns/<digest>.safetensors     `rows` and `cols` (int32) of a pattern, its shape as metadata

A schedule stands there in its canonical form for the task's extents, so that what runs the same reads the
same. `latency_ms` is the fastest sample, null where the schedule failed, and then `error` says why; `ratio`
is to the task's reference schedule, measured in turns with it, null where none was. `disturbed` says whether
others used the machine meanwhile, null where that is not known.
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
from sparseflow.tuning.schedule.matrices import FLOATS, Pattern
from sparseflow.tuning.schedule.operators import OPERATORS

if TYPE_CHECKING:
    import pyarrow as pa

FILE = "labels.parquet"
PATTERNS = "patterns"

_MARK = {b"sparseflow": b"labels", b"version": b"1"}
"""What the Parquet file's metadata says, so that no other file is taken for one."""

_TEXTS = ("operator", "matrix", "family", "dtype", "device", "pattern", "schedule", "error")
_COUNTS = ("rows", "cols", "nnz", "n_cols", "threads")
_TIMES = ("latency_ms", "ratio")
_OF_TASK = (
    "operator", "matrix", "family", "rows", "cols", "nnz", "n_cols", "dtype", "threads", "device", "pattern",
)  # fmt: skip
_MAY_LACK = ("nnz", "n_cols", "pattern", "error", "disturbed", *_TIMES)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What schedules are ranked for.

    Attributes:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        matrix: The matrix's name.
        family: Matrices that are kin have the same; see `families`.
        shape: The matrix's rows and columns.
        nnz: Its elements; None where they are not known.
        n_cols: Columns of the dense operands; None for SpMV.
        dtype: `"float32"` or `"float64"`.
        threads: Most threads that a schedule could use.
        device: What it ran on.
        pattern: Digest of the pattern; None where it is not known.
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
        """Axis -> extent."""
        sizes = (*self.shape, *(() if self.n_cols is None else (self.n_cols,)))
        return dict(zip(OPERATORS[self.operator].axes, sizes, strict=True))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What came of a schedule once.

    Attributes:
        schedule: Its line, canonical.
        latency_ms: Milliseconds; None where it failed.
        ratio: Over the reference's; None where it failed or there was no reference.
        error: Why it failed; None where it did not.
        disturbed: Whether others used the machine meanwhile; None where that is not known.
    """

    schedule: str
    latency_ms: float | None = None
    ratio: float | None = None
    error: str | None = None
    disturbed: bool | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The schedules of a task that ran, each once.

    Attributes:
        schedules: Their lines, n of them.
        latency_ms: Shape (n,), float64: the median over repeats, milliseconds.
        ratio: Shape (n,), float64: that of the ratios to the reference, NaN where none is known.
        repeats: Shape (n,), int64: how often each was measured.
    """

    schedules: tuple[str, ...]
    latency_ms: np.ndarray
    ratio: np.ndarray
    repeats: np.ndarray


class LabelSet:
    """The labels of one folder; `LabelSet.open` reads them.

    Attributes:
        folder: Where they lie.
        tasks: In the order of the file.
    """

    def __init__(self, folder: Path, table: pa.Table) -> None:
        self.folder = folder
        self._lines, self._schedule = _coded(table, "schedule")
        self._latency, self._ratio = (_floats(table, name) for name in _TIMES)
        columns = {name: _coded(table, name) for name in _OF_TASK}
        number = _together([codes for _, codes in columns.values()])
        _, first, number = np.unique(number, return_index=True, return_inverse=True)
        self._of_task = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
        found = [
            _task({name: values[codes[at]] for name, (values, codes) in columns.items()}) for at in first
        ]
        self._number = {found[place]: int(place) for place in np.argsort(first)}
        self.tasks: tuple[Task, ...] = tuple(self._number)

    @classmethod
    def open(cls, folder: Path | str) -> LabelSet:
        """The labels that `write_labels` wrote.

        Raises:
            InputError: The folder holds none.
            FileFormatError: They are damaged, or something else.
        """
        root = Path(folder)
        if not (root / FILE).is_file():
            raise InputError(
                f"{root} holds no labels ({FILE}); name a folder that `sparseflow tuning collect` or "
                "`sparseflow tuning import` wrote"
            )
        return cls(root, _read(root / FILE))

    def rows(self, task: Task) -> Rows:
        """The schedules of a task that ran.

        Raises:
            InputError: The task is none of `tasks`.
        """
        if task not in self._number:
            raise InputError(f"{self.folder} has no labels of this task: {task}")
        places = self._of_task[self._number[task]]
        places = places[~np.isnan(self._latency[places])]
        codes, latency_ms, repeats = _medians(self._schedule[places], self._latency[places])
        known = places[~np.isnan(self._ratio[places])]
        with_ratio, medians, _ = _medians(self._schedule[known], self._ratio[known])
        ratio = np.full(len(codes), np.nan)
        ratio[np.searchsorted(codes, with_ratio)] = medians
        return Rows(
            schedules=tuple(self._lines[code] for code in codes),
            latency_ms=latency_ms,
            ratio=ratio,
            repeats=repeats,
        )

    def pattern(self, task: Task) -> Pattern | None:
        """The pattern of a task, read anew each time; None where it is not known.

        Raises:
            FileFormatError: Its file is missing or damaged.
        """
        return None if task.pattern is None else read_pattern(self.folder, task.pattern)


def write_labels(folder: Path | str, measurements: Iterable[tuple[Task, Measurement]]) -> None:
    """Write `labels.parquet`, in place of one that is there; patterns are written before, by `write_pattern`.

    Args:
        folder: Made when absent.
        measurements: One a row, in the order of the file.
    """
    import pyarrow as pa
    from pyarrow import parquet

    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    names = [field.name for field in fields(Measurement)]
    columns: dict[str, list[Any]] = {name: [] for name in (*_OF_TASK, *names)}
    for task, measurement in measurements:
        for name in _OF_TASK:
            columns[name].append(
                task.shape[name == "cols"] if name in ("rows", "cols") else getattr(task, name)
            )
        for name in names:
            columns[name].append(getattr(measurement, name))
    table = pa.table(columns, schema=_schema()).replace_schema_metadata(_MARK)
    buffer = io.BytesIO()
    parquet.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    write_atomic(root / FILE, buffer.getvalue())


def write_pattern(folder: Path | str, pattern: Pattern) -> str:
    """Keep a pattern among those of a label set, once; gives its digest."""
    from safetensors.numpy import save

    digest = pattern.digest()
    path = _pattern_path(folder, digest)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        shape = {"shape": json.dumps(pattern.shape)}
        write_atomic(path, save({"rows": pattern.rows, "cols": pattern.cols}, metadata=shape))
    return digest


def read_pattern(folder: Path | str, digest: str) -> Pattern:
    """The pattern that `write_pattern` kept under a digest.

    Raises:
        FileFormatError: Its file is missing or holds something else.
    """
    from safetensors import SafetensorError, safe_open

    path = _pattern_path(folder, digest)
    try:
        with safe_open(path, framework="numpy") as file:
            height, width = json.loads((file.metadata() or {})["shape"])
            pattern = Pattern(
                rows=file.get_tensor("rows"), cols=file.get_tensor("cols"), shape=(height, width)
            )
        sound = pattern.rows.dtype == pattern.cols.dtype == np.int32 and pattern.digest() == digest
    except FileNotFoundError as error:
        raise FileFormatError(f"the pattern {path} is missing; copy the folder as a whole") from error
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path} is not a pattern: {error}") from error
    if not sound:
        raise FileFormatError(f"{path} is damaged: it does not hold the pattern of its name")
    return pattern


def _pattern_path(folder: Path | str, digest: str) -> Path:
    return Path(folder) / PATTERNS / f"{digest}.safetensors"


def _schema() -> pa.Schema:
    import pyarrow as pa

    kinds = {
        **dict.fromkeys(_TEXTS, pa.dictionary(pa.int32(), pa.string())),
        **dict.fromkeys(_COUNTS, pa.int64()),
        **dict.fromkeys(_TIMES, pa.float64()),
        "disturbed": pa.bool_(),
    }
    order = (*_OF_TASK, *(field.name for field in fields(Measurement)))
    return pa.schema([pa.field(name, kinds[name], nullable=name in _MAY_LACK) for name in order])


def _read(path: Path) -> pa.Table:
    """The table, checked. Raises FileFormatError where it cannot be one of labels."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.read_table(path, page_checksum_verification=True)
        mark = table.schema.metadata or {}
        ours = all(mark.get(key) == value for key, value in _MARK.items())
        if ours:
            table = table.select(_schema().names).cast(_schema())
            table.validate(full=True)
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise FileFormatError(f"{path} is not a file of labels that can be read: {error}") from error
    if not ours:
        raise FileFormatError(f"{path} holds no labels of this version of SparseFlow")
    problem = _problem(table)
    if problem is not None:
        raise FileFormatError(f"{path} is damaged: {problem}")
    return table


def _problem(table: pa.Table) -> str | None:
    """What cannot be true of labels, if anything."""
    for name in _COUNTS:
        values = table[name].drop_null().to_numpy()
        if (values < (0 if name == "nnz" else 1)).any():
            return f"`{name}` is {values.min()} in some row"
    for name in _TIMES:
        values = table[name].drop_null().to_numpy()
        if not (np.isfinite(values) & (values > 0.0)).all():
            return f"`{name}` is not a time in some row"
    failed = table["error"].is_valid().to_numpy()
    if (failed == table["latency_ms"].is_valid().to_numpy()).any():
        return "some row has not either a latency or an error"
    for name, known in (("operator", set(OPERATORS)), ("dtype", {str(each) for each in FLOATS})):
        others = sorted({str(value) for value in table[name].unique().to_pylist()} - known)
        if others:
            return f"`{name}` is {others[0]!r} in some row"
    wide = np.isin(_strings(table, "operator"), [name for name, one in OPERATORS.items() if one.dense_axes])
    if (wide != table["n_cols"].is_valid().to_numpy()).any():
        return "`n_cols` does not fit the operator in some row"
    return None


def _strings(table: pa.Table, name: str) -> np.ndarray:
    values, codes = _coded(table, name)
    return np.array(values, object)[codes]


def _coded(table: pa.Table, name: str) -> tuple[list[Any], np.ndarray]:
    """The values that occur in a column, None last, and which of them each row has, (n,) int64."""
    import pyarrow as pa

    column = table[name].combine_chunks()
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    values = [*column.dictionary.to_pylist(), None]
    codes = column.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)
    return values, codes.astype(np.int64)


def _floats(table: pa.Table, name: str) -> np.ndarray:
    """A column as (n,) float64, NaN where it is null."""
    return np.array(table[name].fill_null(np.nan).to_numpy(), np.float64)


def _together(columns: list[np.ndarray]) -> np.ndarray:
    """One number for each row, the same where all columns are."""
    number = np.zeros(len(columns[0]), np.int64)
    for codes in columns:
        number = np.unique(number * (codes.max(initial=0) + 1) + codes, return_inverse=True)[1]
    return number


def _task(cells: dict[str, Any]) -> Task:
    shape = (cells.pop("rows"), cells.pop("cols"))
    return Task(shape=shape, **cells)


def _medians(codes: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The codes that occur, ascending, the median of the values of each and their number."""
    values = values[np.lexsort((values, codes))]
    found, counts = np.unique(codes, return_counts=True)
    first = np.cumsum(counts) - counts
    middle = values[first + (counts - 1) // 2], values[first + counts // 2]
    return found, 0.5 * (middle[0] + middle[1]), counts
