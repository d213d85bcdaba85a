"""Labels that AutoSparse measured, as a label set.

Two forms of file are read, compressed by gzip or not:

- a table with a header, its columns `matrix`, `schedule` and `latency_ms` tab separated,
- AutoSparse's own lines, which end in the latency, all of one matrix, whose name is given.

What cannot be a label is left out and told, line by line: what breaks the grammar, has no time, or cannot run
as the operator, such as a schedule whose threads add to the same elements. The rest is stored in canonical
form, so that lines that run the same count as repeats.

Such files tell nothing of the matrices. Where a Matrix Market file of the same name is at hand, it gives the
pattern. Elsewhere the shape is what the splits of most schedules cover, which is right to a factor of two:
AutoSparse splits the largest power of two that an axis holds. The same goes for the columns of the dense
operands where they are not given.
"""

from __future__ import annotations

import gzip
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.files import write_atomic
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.measure import labels
from sparseflow.tuning.measure.families import family_of
from sparseflow.tuning.measure.labels import Measurement, Task
from sparseflow.tuning.schedule.matrices import FLOATS, SUFFIXES, Pattern, read_matrix
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.operators import operator as operator_of
from sparseflow.tuning.schedule.schedule import Schedule, parse_labelled

REJECTED = "rejected.tsv"
"""Beside the labels: number of the line and why it was left out."""

_HEADER = ("matrix", "schedule", "latency_ms")


@dataclass(frozen=True, kw_only=True)
class Imported:
    """What came of a file.

    Attributes:
        folder: The label set.
        rows: Measurements that were kept.
        tasks: Tasks that they are of.
        patterns: Tasks whose pattern is known.
        rejected: (number of the line, short name of the reason, the reason), in the order of the file.
        doubts: What does not fit together, in sentences.
    """

    folder: Path
    rows: int
    tasks: tuple[Task, ...]
    patterns: int
    rejected: tuple[tuple[int, str, str], ...]
    doubts: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; of rejected lines the number for each reason, and the first."""
        first = {kind: (number, why) for number, kind, why in reversed(self.rejected)}
        counts = Counter(kind for _, kind, _ in self.rejected)
        return {
            "folder": str(self.folder),
            "rows": self.rows,
            "tasks": len(self.tasks),
            "patterns": self.patterns,
            "rejected": {
                kind: {"rows": count, "first_line": first[kind][0], "first_reason": first[kind][1]}
                for kind, count in counts.most_common()
            },
            "doubts": list(self.doubts),
        }


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A line of the file: its number, the schedule's text, and the time where it is not part of that."""

    number: int
    schedule: str
    time: str | None


@dataclass(frozen=True, kw_only=True)
class _Parsed:
    number: int
    schedule: Schedule
    latency_ms: float


def import_labels(
    file: Path | str,
    folder: Path | str,
    *,
    operator: str,
    n_cols: int | None = None,
    matrix: str | None = None,
    matrices: Path | str | None = None,
    families: Mapping[str, str] | None = None,
    device: str | None = None,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> Imported:
    """Make a label set of a file.

    Args:
        file: What AutoSparse measured.
        folder: Where the set is written; made when absent.
        operator: What was measured.
        n_cols: Columns of the dense operands; by default what the splits of most schedules cover.
        matrix: The matrix's name, if the file holds AutoSparse's own lines.
        matrices: Folder of `.mtx` and `.mtx.gz` files named as the matrices are.
        families: Name -> family, where `family_of` shall not decide.
        device: What it was measured on; by default the file's name without suffixes.
        dtype: float32 or float64.
        progress: Called with (what is read, fraction done).

    Raises:
        InputError: An argument cannot be used, `folder` holds labels, or no line of the file is one.
        FileFormatError: The file is in neither form, or a Matrix Market file is damaged.
    """
    op, source, root = operator_of(operator), Path(file), Path(folder)
    if (n_cols is not None and n_cols < 1) or (n_cols is not None and not op.dense_axes):
        raise InputError(f"`n_cols` (={n_cols}) must be at least 1, and is left out for spmv")
    if dtype not in map(str, FLOATS):
        raise InputError(f"`dtype` (={dtype!r}) must be float32 or float64")
    if matrices is not None and not Path(matrices).is_dir():
        raise InputError(f"there is no folder {matrices}")
    if root.exists() and not root.is_dir():
        raise InputError(f"`folder` (={root}) is a file; name a folder")
    if (root / labels.FILE).exists():
        raise InputError(f"{root} holds labels; name another folder, or remove it")
    rejected: list[tuple[int, str, str]] = []
    groups = _grouped(source, matrix, rejected)
    patterns = _patterns(groups, matrices)
    device = source.name.partition(".")[0] if device is None else device

    found: list[tuple[Task, Measurement]] = []
    doubts: list[str] = []
    for at, (name, lines) in enumerate(groups.items()):
        if progress is not None:
            progress(name, at / len(groups))
        parsed = [one for line in lines if (one := _parsed(line, rejected)) is not None]
        covered = _covered(op, [one.schedule for one in parsed])
        pattern = patterns.get(name)
        given = {} if pattern is None else dict(zip(op.sparse_axes, pattern.shape, strict=True))
        given |= {axis: n_cols for axis in op.dense_axes if n_cols is not None}
        extents = covered | given
        if set(extents) != set(op.axes):
            if _none_fits(parsed, op, rejected):
                continue
            missing = [axis for axis in op.axes if axis not in extents]
            raise InputError(
                f"the extent of {name}'s axis {missing[0]} is not known, and no schedule splits it; give "
                + ("`n_cols`" if missing[0] in op.dense_axes else f"`matrices`, a folder with {name}.mtx")
            )
        for axis, extent in given.items():
            if axis in covered and not _near(extent, covered[axis]):
                doubts.append(
                    f"{name}: axis {axis} is given as {extent}, and the splits of most schedules cover "
                    f"{covered[axis]}"
                )
        rows, cols = op.sparse_axes
        task = Task(
            operator=op.name,
            matrix=name,
            family=family_of(name, families),
            shape=(extents[rows], extents[cols]),
            nnz=None if pattern is None else pattern.nnz,
            n_cols=next((extents[axis] for axis in op.dense_axes), None),
            dtype=dtype,
            threads=max(one.schedule.threads for one in parsed),
            device=device,
            pattern=None if pattern is None else pattern.digest(),
        )
        found += ((task, one) for one in _measurements(task, op, parsed, rejected))
    if not found:
        why = f"; line {rejected[0][0]}: {rejected[0][2]}" if rejected else ""
        raise InputError(f"{source} holds no labels of {op.name}{why}")
    for pattern in patterns.values():
        labels.write_pattern(root, pattern)
    rejected.sort()
    root.mkdir(parents=True, exist_ok=True)
    told = "".join(f"{number}\t{' '.join(why.split())}\n" for number, _, why in rejected)
    write_atomic(root / REJECTED, f"line\treason\n{told}")
    labels.write_labels(root, found)
    tasks = tuple(dict.fromkeys(task for task, _ in found))
    return Imported(
        folder=root,
        rows=len(found),
        tasks=tasks,
        patterns=sum(task.pattern is not None for task in tasks),
        rejected=tuple(rejected),
        doubts=tuple(doubts),
    )


def _grouped(
    source: Path, matrix: str | None, rejected: list[tuple[int, str, str]]
) -> dict[str, list[_Line]]:
    """Matrix -> its lines."""
    rows = _lines(source)
    header = next(rows, "").split("\t")
    table = all(name in header for name in _HEADER)
    if table and matrix is not None:
        raise InputError(f"{source} names its matrices; leave `matrix` (={matrix!r}) out")
    if not table and matrix is None:
        raise FileFormatError(
            f"{source} does not begin with a header of the columns {', '.join(_HEADER)}, tab separated; if "
            "these are AutoSparse's own lines, give the name of their matrix (`matrix`)"
        )
    groups: dict[str, list[_Line]] = {}
    if matrix is not None:
        whole = enumerate(_lines(source), start=1)
        groups[matrix] = [_Line(number=number, schedule=line, time=None) for number, line in whole]
        return groups
    name_at, schedule_at, time_at = map(header.index, _HEADER)
    for number, line in enumerate(rows, start=2):
        cells = line.split("\t")
        if len(cells) != len(header):
            why = f"columns: {len(cells)} columns; expected {len(header)}, as in the header"
            rejected.append((number, "columns", why))
        elif not cells[name_at]:
            rejected.append((number, "matrix", "matrix: the name is empty"))
        else:
            read = _Line(number=number, schedule=cells[schedule_at], time=cells[time_at])
            groups.setdefault(cells[name_at], []).append(read)
    return groups


def _lines(source: Path) -> Iterator[str]:
    if not source.is_file():
        raise InputError(f"there is no file {source}")
    opened = gzip.open if source.suffix == ".gz" else open
    try:
        with opened(source, "rt", encoding="utf-8", newline="\n") as stream:
            for line in stream:
                yield line.rstrip("\r\n")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{source} cannot be read: {error}") from error


def _patterns(groups: Mapping[str, object], matrices: Path | str | None) -> dict[str, Pattern]:
    """Matrix -> its pattern, of those that have a file."""
    if matrices is None:
        return {}
    found = {}
    for name in groups:
        # A name is no path: it must not lead out of the folder.
        files = (Path(matrices) / f"{name}{suffix}" for suffix in SUFFIXES if Path(name).name == name)
        file = next((file for file in files if file.is_file()), None)
        if file is not None:
            found[name] = read_matrix(file).pattern
    if not found:
        raise InputError(
            f"{matrices} holds no file that is named as a matrix of the labels is, such as "
            f"{next(iter(groups), 'name')}.mtx.gz"
        )
    return found


def _parsed(line: _Line, rejected: list[tuple[int, str, str]]) -> _Parsed | None:
    """The schedule and the time of a line; None, and why, where it has not both."""
    try:
        if line.time is None:
            schedule, latency = parse_labelled(line.schedule)
        else:
            schedule, latency = Schedule.parse(line.schedule), _time(line.time)
    except FileFormatError as error:
        rejected.append((line.number, "grammar", str(error)))
        return None
    if latency is None or not 0.0 < latency < math.inf:
        told = "none" if line.time is None else repr(line.time)
        rejected.append((line.number, "latency", f"latency: {told}; expected milliseconds, above 0"))
        return None
    return _Parsed(number=line.number, schedule=schedule, latency_ms=latency)


def _time(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _covered(op: Operator, schedules: list[Schedule]) -> dict[str, int]:
    """Axis -> what the splits of most schedules cover, of the axes that some split."""
    products: dict[str, list[int]] = {}
    for schedule in schedules:
        for split in schedule.fsplit + schedule.lsplit:
            products.setdefault(split.axis, []).append(math.prod(size for _, size in split.parts))
    return {axis: statistics.median_low(products[axis]) for axis in op.axes if axis in products}


def _near(extent: int, covered: int) -> bool:
    """Whether an axis can be what is covered: the largest power of two in it, or the smallest above."""
    return extent < 2 * covered and covered < 2 * extent


def _none_fits(parsed: list[_Parsed], op: Operator, rejected: list[tuple[int, str, str]]) -> bool:
    """Whether no schedule is one of the operator; each is then rejected."""
    problems = [next(iter(one.schedule.problems(op)), None) for one in parsed]
    if None in problems:
        return False
    rejected += (_breach(one, why) for one, why in zip(parsed, problems, strict=True) if why is not None)
    return True


def _measurements(
    task: Task, op: Operator, parsed: list[_Parsed], rejected: list[tuple[int, str, str]]
) -> Iterator[Measurement]:
    extents = task.extents()
    lines: dict[str, str] = {}
    for one in parsed:
        given = str(one.schedule)
        if given not in lines:
            problem = next(iter(one.schedule.problems(op, extents)), None)
            if problem is not None:
                rejected.append(_breach(one, problem))
                continue
            lines[given] = str(one.schedule.canonical(op, extents))
        yield Measurement(schedule=lines[given], latency_ms=one.latency_ms)


def _breach(one: _Parsed, problem: str) -> tuple[int, str, str]:
    return one.number, problem.partition(":")[0], problem
