"""Import of labels that AutoSparse measured.

Two text formats are read, with or without gzip or bzip2:

- a tab-separated table with the columns `matrix`, `schedule` and `latency_ms`,
- AutoSparse's lines of one matrix, which end with the latency; the caller gives the matrix name.

Lines that are not valid labels are rejected and listed: lines that violate the grammar, have no latency or
cannot run as the operator. The other schedules are stored in canonical form, so lines that run identically
are repeats.

The files do not describe the matrices. If there is a Matrix Market file of the same name, it gives the
pattern. Otherwise the extent of an axis is estimated as the product of the factors into which most schedules
split it. The estimate is correct to a factor of two, because AutoSparse splits the largest power of two in an
axis. The columns of the dense operands are estimated in the same way if they are not given.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.checks import check_at_least
from sparseflow.core.files import check_output, write_atomic
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.measure.families import infer_family
from sparseflow.tuning.measure.labels import (
    LABELS_FILE,
    ScheduleMeasurement,
    TuningTask,
    write_labels,
    write_pattern,
)
from sparseflow.tuning.schedule.matrices import SparsityPattern
from sparseflow.tuning.schedule.matrix_files import SUFFIXES, read_decompressed, read_matrix
from sparseflow.tuning.schedule.matrix_market import MAX_EXTENT
from sparseflow.tuning.schedule.operators import Operator, get_operator
from sparseflow.tuning.schedule.schedule import Schedule, parse_labeled_line

REJECTED_FILE = "rejected.tsv"
"""File with line number and reason of each rejected line."""

_Rejection = tuple[int, str, str]
"""Line number, short reason, full reason."""

_COLUMNS = ("matrix", "schedule", "latency_ms")


@dataclass(frozen=True, kw_only=True)
class ImportResult:
    """Result of an import.

    Attributes:
        out_dir: Directory of the label set.
        rows: Number of accepted measurements.
        tasks: Tasks of the measurements.
        patterns: Number of tasks with a known pattern.
        rejected: (line number, short reason, full reason) of the rejected lines, in the order of the file.
        warnings: Inconsistencies, as sentences.
    """

    out_dir: Path
    rows: int
    tasks: tuple[TuningTask, ...]
    patterns: int
    rejected: tuple[_Rejection, ...]
    warnings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types, with the number and the first line of each rejection reason."""
        first_rejection = {kind: (number, reason) for number, kind, reason in reversed(self.rejected)}
        counts = Counter(kind for _, kind, _ in self.rejected)
        return {
            "out_dir": str(self.out_dir),
            "rows": self.rows,
            "tasks": len(self.tasks),
            "patterns": self.patterns,
            "rejected": {
                kind: {
                    "rows": count,
                    "first_line": first_rejection[kind][0],
                    "first_reason": first_rejection[kind][1],
                }
                for kind, count in counts.most_common()
            },
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, kw_only=True)
class _SourceLine:
    """A line of the file: number, schedule text, and latency text if it is a separate column."""

    number: int
    schedule: str
    time: str | None


@dataclass(frozen=True, kw_only=True)
class _ParsedLine:
    """A line with a valid schedule and latency."""

    number: int
    schedule: Schedule
    latency_ms: float


def import_labels(
    path: Path | str,
    out_dir: Path | str,
    *,
    operator: str,
    n_cols: int | None = None,
    matrix: str | None = None,
    matrices: Path | str | None = None,
    families: Mapping[str, str] | None = None,
    device: str | None = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> ImportResult:
    """Create a label set from a file.

    Args:
        path: Measurements of AutoSparse.
        out_dir: Output directory.
        operator: Measured operator.
        n_cols: Columns of the dense operands; by default estimated from the splits.
        matrix: Matrix name, for files with AutoSparse's lines.
        matrices: Directory of files with the names of the matrices. Unreadable files give a warning.
        families: Matrix name -> family, which overrides `infer_family`.
        device: CPU of the measurements; by default the file name without suffixes.
        dtype: float32 or float64.
        progress: Progress callback.

    Raises:
        InputError: An argument is out of range, `out_dir` has labels, or no line is a valid label.
        FileFormatError: The file has another format.
    """
    op, source, root = get_operator(operator), Path(path), Path(out_dir)
    _check_arguments(op, root, n_cols, matrices)
    rejected: list[_Rejection] = []
    groups = _group_lines(source, matrix, rejected)
    warnings: list[str] = []
    patterns = _read_patterns(groups, matrices, warnings)
    measurements: list[tuple[TuningTask, ScheduleMeasurement]] = []
    for index, (name, lines) in enumerate(groups.items()):
        if progress is not None:
            progress(name, index / len(groups))
        parsed = [item for line in lines if (item := _parse_line(line, rejected)) is not None]
        if not parsed:
            continue
        pattern = patterns.get(name)
        extents = _determine_extents(op, name, parsed, pattern, n_cols, rejected, warnings)
        if extents is None:
            continue
        rows, cols = (extents[axis] for axis in op.sparse_axes)
        task = TuningTask(
            operator=op.name,
            matrix=name,
            family=infer_family(name, families),
            shape=(rows, cols),
            nnz=None if pattern is None else pattern.nnz,
            n_cols=extents[op.dense_axes[0]] if op.dense_axes else None,
            dtype=dtype,
            threads=max(item.schedule.threads for item in parsed),
            device=source.name.partition(".")[0] if device is None else device,
            pattern=None if pattern is None else pattern.digest(),
        )
        measurements += ((task, item) for item in _validate_lines(task, op, parsed, rejected))
    rejected.sort()
    if not measurements:
        reason = f"; line {rejected[0][0]}: {rejected[0][2]}" if rejected else ""
        raise InputError(f"{source} has no labels of {op.name}{reason}")
    _write_label_set(root, patterns.values(), rejected, measurements)
    tasks = tuple(dict.fromkeys(task for task, _ in measurements))
    return ImportResult(
        out_dir=root,
        rows=len(measurements),
        tasks=tasks,
        patterns=sum(task.pattern is not None for task in tasks),
        rejected=tuple(rejected),
        warnings=tuple(warnings),
    )


def _check_arguments(op: Operator, root: Path, n_cols: int | None, matrices: Path | str | None) -> None:
    """Raise InputError if an argument of `import_labels` is out of range, or `root` is in use."""
    if n_cols is not None:
        check_at_least(1, n_cols=n_cols)
        if not op.dense_axes:
            raise InputError(f"`n_cols` (={n_cols}) must be None for {op.name}")
    if matrices is not None and not Path(matrices).is_dir():
        raise InputError(f"directory not found: {matrices}")
    check_output(root, directory=True)
    if (root / LABELS_FILE).exists():
        raise InputError(f"{root} has labels; choose another directory, or remove it")


def _write_label_set(
    root: Path,
    patterns: Iterable[SparsityPattern],
    rejected: list[_Rejection],
    measurements: list[tuple[TuningTask, ScheduleMeasurement]],
) -> None:
    """Write the patterns, the rejected lines and the labels."""
    for pattern in patterns:
        write_pattern(root, pattern)
    root.mkdir(parents=True, exist_ok=True)
    lines = [f"{number}\t{' '.join(reason.split())}\n" for number, _, reason in rejected]
    write_atomic(root / REJECTED_FILE, "".join(["line\treason\n", *lines]))
    write_labels(root, measurements)


def _group_lines(
    source: Path, matrix: str | None, rejected: list[_Rejection]
) -> dict[str, list[_SourceLine]]:
    """Return matrix name -> its lines; reject lines without one cell per column or without a name."""
    rows = enumerate(_read_lines(source), start=1)
    if matrix is not None:
        lines = [_SourceLine(number=number, schedule=line, time=None) for number, line in rows]
        if lines and set(_COLUMNS) <= set(lines[0].schedule.split("\t")):
            raise InputError(f"{source} has matrix names; `matrix` (={matrix!r}) must be None")
        return {matrix: lines}
    header = next(rows, (1, ""))[1].split("\t")
    if not set(_COLUMNS) <= set(header):
        raise FileFormatError(
            f"{source} has no tab-separated header with the columns {', '.join(_COLUMNS)}; for AutoSparse's "
            "lines, pass the name of their matrix (`matrix`)"
        )
    groups: dict[str, list[_SourceLine]] = {}
    name_column, schedule_column, time_column = map(header.index, _COLUMNS)
    for number, line in rows:
        cells = line.split("\t")
        if len(cells) != len(header):
            reason = f"columns: {len(cells)} columns; expected {len(header)}, as in the header"
            rejected.append((number, "columns", reason))
        elif not cells[name_column]:
            rejected.append((number, "matrix", "matrix: the name is empty"))
        else:
            groups.setdefault(cells[name_column], []).append(
                _SourceLine(number=number, schedule=cells[schedule_column], time=cells[time_column])
            )
    return groups


def _read_lines(source: Path) -> Iterator[str]:
    """Yield the lines of a text file, with or without gzip or bzip2."""
    try:
        text = read_decompressed(source).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{source} is not UTF-8: {error}") from error
    for line in text.removesuffix("\n").split("\n") if text else ():
        yield line.rstrip("\r")


def _read_patterns(
    groups: Mapping[str, object], matrices: Path | str | None, warnings: list[str]
) -> dict[str, SparsityPattern]:
    """Return matrix name -> pattern, for matrices with a readable file; append a warning for other files."""
    if matrices is None:
        return {}
    patterns = {}
    for name in groups:
        # A matrix name must not lead out of the directory.
        files = (Path(matrices) / f"{name}{suffix}" for suffix in SUFFIXES if Path(name).name == name)
        file = next((file for file in files if file.is_file()), None)
        try:
            if file is not None:
                patterns[name] = read_matrix(file).pattern
        except InputError as error:
            warnings.append(str(error))
    if not patterns and not warnings:
        raise InputError(
            f"{matrices} has no file with the name of a matrix of the labels, such as "
            f"{next(iter(groups), 'name')}.mtx.gz"
        )
    return patterns


def _parse_line(line: _SourceLine, rejected: list[_Rejection]) -> _ParsedLine | None:
    """Parse the schedule and the latency of a line; reject the line and return None if one is invalid."""
    try:
        if line.time is None:
            schedule, latency = parse_labeled_line(line.schedule)
        else:
            schedule, latency = Schedule.parse(line.schedule), _parse_float(line.time)
    except FileFormatError as error:
        rejected.append((line.number, "grammar", str(error)))
        return None
    if latency is None or not 0.0 < latency < math.inf:
        value = "none" if line.time is None else repr(line.time)
        rejected.append((line.number, "latency", f"latency: {value}; expected milliseconds, above 0"))
        return None
    return _ParsedLine(number=line.number, schedule=schedule, latency_ms=latency)


def _parse_float(text: str) -> float | None:
    """Parse a number; None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None


def _determine_extents(
    op: Operator,
    name: str,
    parsed: list[_ParsedLine],
    pattern: SparsityPattern | None,
    n_cols: int | None,
    rejected: list[_Rejection],
    warnings: list[str],
) -> dict[str, int] | None:
    """Return axis -> extent of a matrix; None if an extent is unknown and all of its lines were rejected.

    Args:
        op: Measured operator.
        name: Matrix name.
        parsed: Lines of the matrix.
        pattern: Pattern of the matrix; None if unknown.
        n_cols: Columns of the dense operands; None if unknown.
        rejected: List to which the lines are appended if they are rejected.
        warnings: List to which inconsistencies of known and estimated extents are appended.

    Raises:
        InputError: An extent is unknown, and a line is valid for the operator.
    """
    known = {} if pattern is None else dict(zip(op.sparse_axes, pattern.shape, strict=True))
    known |= {axis: n_cols for axis in op.dense_axes if n_cols is not None}
    estimated = _estimate_extents(op, [item.schedule for item in parsed])
    extents = estimated | known
    if extents.keys() != set(op.axes):
        if _reject_all(parsed, op, rejected):
            return None
        raise InputError(_describe_missing_extent(op, name, extents))
    warnings += _compare_extents(name, known, estimated)
    return extents


def _estimate_extents(op: Operator, schedules: list[Schedule]) -> dict[str, int]:
    """Return axis -> median extent that the splits of a schedule cover, for axes that are split.

    Extents outside of the possible ones are ignored; their schedules are rejected later.
    """
    products: dict[str, list[int]] = {}
    for schedule in schedules:
        for split in schedule.fsplit + schedule.lsplit:
            product = math.prod(size for _, size in split.parts)
            if 1 <= product <= MAX_EXTENT:
                products.setdefault(split.axis, []).append(product)
    return {axis: statistics.median_low(products[axis]) for axis in op.axes if axis in products}


def _compare_extents(name: str, known: Mapping[str, int], estimated: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning for each axis whose known extent is at least twice or at most half the estimate."""
    for axis, extent in known.items():
        estimate = estimated.get(axis, extent)
        if extent >= 2 * estimate or estimate >= 2 * extent:
            yield (
                f"{name}: the extent of axis {axis} is {extent}, but the splits of most schedules cover "
                f"{estimate}"
            )


def _describe_missing_extent(op: Operator, name: str, extents: Mapping[str, int]) -> str:
    """Format the error of a matrix with an unknown extent."""
    axis = next(axis for axis in op.axes if axis not in extents)
    argument = "`n_cols`" if axis in op.dense_axes else f"`matrices`, a directory with {name}.mtx"
    return f"the extent of axis {axis} of {name} is unknown, and no schedule splits it; pass {argument}"


def _reject_all(parsed: list[_ParsedLine], op: Operator, rejected: list[_Rejection]) -> bool:
    """Reject all lines and return True if no schedule is valid for the operator."""
    violations = [next(iter(item.schedule.find_violations(op)), None) for item in parsed]
    reasons = [violation for violation in violations if violation is not None]
    if len(reasons) < len(violations):
        return False
    rejected += map(_make_rejection, parsed, reasons)
    return True


def _validate_lines(
    task: TuningTask, op: Operator, parsed: list[_ParsedLine], rejected: list[_Rejection]
) -> Iterator[ScheduleMeasurement]:
    """Yield the measurement of each line in canonical form; reject lines that cannot run as the operator."""
    extents = task.extents()
    canonical_lines: dict[str, str] = {}
    for item in parsed:
        line = str(item.schedule)
        if line not in canonical_lines:
            violation = next(iter(item.schedule.find_violations(op, extents)), None)
            if violation is not None:
                rejected.append(_make_rejection(item, violation))
                continue
            canonical_lines[line] = str(item.schedule.canonicalize(op, extents))
        yield ScheduleMeasurement(schedule=canonical_lines[line], latency_ms=item.latency_ms)


def _make_rejection(item: _ParsedLine, violation: str) -> _Rejection:
    """Make the rejection of a line; the text of `violation` before the colon is the short reason."""
    return item.number, violation.partition(":")[0], violation
