"""Collecting what kernels and models take at several levels of load.

::

    out/
      plan.json       settings, items, and the order of every measurement
      rows.jsonl      one row a measurement, until the collection is whole
      rows.parquet    the same rows in the plan's order, once it is
      kernels.csv     Kernel_ID, OpType, Input_Shape, one column a metric of load, Latency_ms
      kernels/        a description of every kernel, in JSON
      graphs/         the graph of every model, in JSON

Whatever stops it (SIGKILL, a full disk, a load that misses its level), the rows so far stay, and the same
command goes on with what is missing: a row is written whole or not at all, and the plan's keys say which are
there. The table of an interrupted collection has exactly the rows of an unbroken one.

Columns of `rows.parquet`: `key`, `block`, `round`, `session` (how often the collection had been taken up),
`role` (`item`, or `reference` for those that show drift), `kernel_id`, `op_type`, `input_shape`, `path`,
`stressor`, `level` (load asked for), `stress_alone` (share that the load got while the measured work rested),
`stress_achieved` (what it got beside it), `before_*` (readings of load just before the block, the measured
work resting: what a reader sees before a model starts), `load_*` (readings during the measurement),
`latency_ms` (mean), `p50_ms`, `p95_ms`, `p99_ms`, `min_ms`, `max_ms`, `samples_ns` (all of them, in the order
taken, each a mean of `calls_per_sample` runs), `cpu_ratio`, `loops` (samples), `warmup`, `start_s`, `end_s`
(seconds since 1970) and `error`, which is None where there is a latency. A kernel that was measured in a
stream (`stream.py`) has `copies`, `device_ms` and `host_ms` besides, and the samples behind them:
`stream_ns`, `plug_ns`, `issue_ns` and `plug_issue_ns`; `overtaken` marks those that the host could not issue
while the plug ran, and `stream_error` says why one has none of it.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparseflow.core.files import write_atomic
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.errors import FileFormatError, RunError
from sparseflow.latency import descriptions
from sparseflow.latency.campaign import Config, Plan, Step, make_plan
from sparseflow.latency.instruments import Bench, Instruments

PLAN, ROWS, TABLE, CSV = "plan.json", "rows.jsonl", "rows.parquet", "kernels.csv"
METRIC = "load_"
TEXTS = ("error", "stream_error", "stressor", "conv_search")
NO_METRICS = ("timestamp_s", "interval_s", "source", "device")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a collection holds.

    Attributes:
        path: Its folder.
        rows: Measurements, the reference's included.
        added: Those that this call made.
        failed: Those that have an error in place of a latency.
        items: Kernels and models.
        drift: Spread of the reference's medians at the lowest level, relative to their middle; None where it
            was measured there less than twice.
        levels: One entry a level: `level`, `stress_alone`, `stress_achieved`, `slowdown` (geometric mean over
            items of their mean latency over that at the lowest level).
    """

    path: Path
    rows: int
    added: int
    failed: int
    items: int
    drift: float | None
    levels: tuple[Mapping[str, float | None], ...]

    def to_dict(self) -> dict[str, Any]:
        """The summary in JSON's types."""
        return {**asdict(self), "path": str(self.path), "levels": [dict(level) for level in self.levels]}


def collect(
    config: Config,
    out: Path | str,
    *,
    instruments: Instruments | None = None,
    progress: Progress | None = None,
) -> Collected:
    """Measure everything that the settings name, or what is missing of it.

    Args:
        config: The settings.
        out: Folder of the collection; made when absent, taken up again when it holds one.
        instruments: What to measure with; by default this machine's.
        progress: Called with (what is measured, fraction done).

    Raises:
        InputError: `out` holds a collection with other settings, files or on another device.
        FileFormatError, ModelError: A file cannot be used.
        DeviceError: The provider, the load's device or the readings' source is not there.
        RunError: The load missed its level, the disk is full, or another process writes into `out`.
    """
    if instruments is None:
        with Bench(config) as bench:
            return collect(config, out, instruments=bench, progress=progress)
    folder = Path(out)
    plan = _begin(config, folder, instruments, progress)
    if (folder / TABLE).is_file() and not (folder / ROWS).exists():
        return _summary(folder, plan, read(folder), 0)
    steps = list(plan.steps())
    writer = _opened(folder)
    try:
        done = _done(folder, steps)
        session = 1 + max((row["session"] for row in done.values()), default=-1)
        added = 0
        for number, block in _by_block(steps, done):
            if progress is not None:
                progress(f"level {block[0].level:g}: waiting for the load", len(done) / len(steps))
            with instruments.block(block[0].level) as facts:
                for step in block:
                    if progress is not None:
                        what = f"level {step.level:g}, block {number + 1}/{len(plan.blocks)}: {step.item.id}"
                        progress(what, len(done) / len(steps))
                    row = _labels(step, session, config) | dict(facts) | instruments.measure(step.item)
                    with _explained(folder, len(done), len(steps)):
                        writer.write(row)
                    done[step.key] = row
                    added += 1
        rows = [done[step.key] for step in steps]
        with _explained(folder, len(done), len(steps)):
            writer.sync()
            _write_table(folder, rows)
            # Last, so that the rows are always in one of the two files.
            (folder / ROWS).unlink()
        return _summary(folder, plan, rows, added)
    finally:
        writer.close()


def read(folder: Path | str) -> list[dict[str, Any]]:
    """The rows of a collection, whole or not, in the order of its plan.

    Raises:
        FileFormatError: `folder` holds no collection, or a damaged one.
    """
    root = Path(folder)
    order = [step.key for step in read_plan(root).steps()]
    if (root / ROWS).exists():
        found = {row["key"]: row for row in read_json_lines(root / ROWS)}
        return [found[key] for key in order if key in found]
    if not (root / TABLE).is_file():
        return []
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(root / TABLE).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise FileFormatError(f"{root / TABLE} is not a Parquet file that can be read: {error}") from error


def read_plan(folder: Path | str) -> Plan:
    """The plan of a collection.

    Raises:
        FileFormatError: `folder` holds none, or a damaged one.
    """
    file = Path(folder) / PLAN
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileFormatError(f"{folder} holds no collection that can be read: {error}") from error
    return Plan.from_dict(record)


def rows_of(folder: Path | str) -> tuple[int, int]:
    """Rows that a collection holds by now, and those that it will; nothing of either before it has a plan."""
    root = Path(folder)
    if not (root / PLAN).is_file():
        return 0, 0
    planned = sum(len(block.items) for block in read_plan(root).blocks)
    try:
        return (root / ROWS).read_bytes().count(b"\n"), planned
    except FileNotFoundError:
        return (planned if (root / TABLE).is_file() else 0), planned


def _begin(config: Config, folder: Path, instruments: Instruments, progress: Progress | None) -> Plan:
    plan = make_plan(config, instruments.environment(), progress)
    if (folder / PLAN).exists():
        begun = read_plan(folder)
        begun.check_same(plan)
        return begun
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptions.describe(plan.items, folder, config.provider, progress)
        # Last, so that a folder with a plan has all that belongs to it.
        write_atomic(folder / PLAN, json.dumps(plan.to_dict(), ensure_ascii=False) + "\n")
    except OSError as error:
        raise RunError(
            f"the plan could not be written to {folder}: {error.strerror}; free some space, or name "
            "another folder"
        ) from error
    return plan


def _opened(folder: Path) -> JsonLinesWriter:
    try:
        return JsonLinesWriter(folder / ROWS)
    except OSError as error:
        raise RunError(f"{folder / ROWS} cannot be written: {error.strerror}") from error


def _done(folder: Path, steps: list[Step]) -> dict[str, dict[str, Any]]:
    planned = {step.key for step in steps}
    done: dict[str, dict[str, Any]] = {}
    for row in read_json_lines(folder / ROWS):
        key = row.get("key")
        if key not in planned or key in done:
            raise FileFormatError(
                f"{folder / ROWS} holds the row {key!r}, which is not in the plan or there twice: it was "
                "edited; restore it, or collect into another folder"
            )
        done[key] = row
    return done


def _by_block(steps: list[Step], done: Mapping[str, object]) -> Iterator[tuple[int, list[Step]]]:
    """What is missing, block by block."""
    missing: dict[int, list[Step]] = {}
    for step in steps:
        if step.key not in done:
            missing.setdefault(step.block, []).append(step)
    yield from missing.items()


def _labels(step: Step, session: int, config: Config) -> dict[str, Any]:
    return {
        "key": step.key,
        "block": step.block,
        "round": step.round,
        "session": session,
        "role": "reference" if step.reference else "item",
        "kernel_id": step.item.id,
        "op_type": step.item.op,
        "input_shape": step.item.input_shape,
        "path": step.item.path,
        "stressor": config.stressor if step.level > 0.0 else None,
        "level": step.level,
    }


@contextmanager
def _explained(folder: Path, done: int, planned: int) -> Iterator[None]:
    """A disk that takes no more, in words."""
    try:
        yield
    except (OSError, RunError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise RunError(
            f"the disk of {folder} takes no more ({why}); {done} of {planned} rows are safe there: free some "
            "space and give the same command again, and it goes on from here"
        ) from error


def _write_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # The union over all rows: pyarrow alone would take the first row's names and drop the others.
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        kind = pa.list_(pa.int64()) if name.endswith("_ns") else None
        if kind is None and all(value is None for value in values):
            # A type of nothing but nulls would keep two collections from being put together.
            kind = pa.string() if name in TEXTS else pa.float64()
        columns[name] = pa.array(values, type=kind)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    write_atomic(folder / CSV, csv_text(rows))
    write_atomic(folder / TABLE, sink.getvalue().to_pybytes())


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """`Kernel_ID, OpType, Input_Shape, <metrics>, Latency_ms` of every row that has a latency.

    The reference's extra measurements are left out, or it would count more often than the others.
    """
    kept = [row for row in rows if row["error"] is None and row["role"] == "item"]
    told = dict.fromkeys(name for row in kept for name in row if name.startswith(METRIC))
    metrics = [name for name in told if name.removeprefix(METRIC) not in NO_METRICS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [name.removeprefix(METRIC) for name in metrics]
    writer.writerow(["Kernel_ID", "OpType", "Input_Shape", *names, "Latency_ms"])
    for row in kept:
        shares = [row.get(name) for name in metrics]
        writer.writerow([row["kernel_id"], row["op_type"], row["input_shape"], *shares, row["latency_ms"]])
    return text.getvalue()


def _summary(folder: Path, plan: Plan, rows: list[dict[str, Any]], added: int) -> Collected:
    good = [row for row in rows if row["error"] is None]
    return Collected(
        path=folder,
        rows=len(rows),
        added=added,
        failed=len(rows) - len(good),
        items=len(plan.items),
        drift=_drift(good),
        levels=tuple(_levels(good)),
    )


def _drift(rows: list[dict[str, Any]]) -> float | None:
    # Beside a load a median is one of two values, so only the least loaded level shows the machine.
    lowest = min((row["level"] for row in rows), default=None)
    found = [row["p50_ms"] for row in rows if row["role"] == "reference" and row["level"] == lowest]
    return (max(found) - min(found)) / statistics.median(found) if len(found) > 1 else None


def _levels(rows: list[dict[str, Any]]) -> Iterator[dict[str, float | None]]:
    times: dict[float, dict[str, list[float]]] = {}
    for row in rows:
        times.setdefault(row["level"], {}).setdefault(row["kernel_id"], []).append(row["latency_ms"])
    lowest = times[min(times)] if times else {}
    for level in sorted(times):
        here = [row for row in rows if row["level"] == level]
        ratios = [
            statistics.fmean(found) / statistics.fmean(lowest[name])
            for name, found in times[level].items()
            if name in lowest
        ]
        yield {
            "level": level,
            "stress_alone": statistics.fmean(row["stress_alone"] for row in here),
            "stress_achieved": statistics.fmean(row["stress_achieved"] for row in here),
            "slowdown": statistics.geometric_mean(ratios) if ratios else None,
        }
