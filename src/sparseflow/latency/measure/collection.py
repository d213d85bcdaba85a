"""Collections: latency of kernels and models at several levels of load.

::

    out/
      plan.json       settings, targets and the order of all measurements
      rows.jsonl      one row per measurement, until the collection is complete
      rows.parquet    the same rows in the plan's order, once it is complete
      kernels.csv     Kernel_ID, OpType, Input_Shape, one column per load metric, Latency_ms
      kernels/        description of every kernel
      graphs/         graph of every model
      synthetic/      synthetic kernels, with `synthetic`

If the collection is interrupted (SIGKILL, a full disk), the rows are kept and the same command resumes it.
Rows are written completely or not at all, and identified by the keys of the
plan. A resumed collection has the same rows as an uninterrupted one.

Columns of `rows.parquet`:

- `key`, `block`, `round`, `session` (number of interruptions before the row)
- `role`: `item`, or `reference` for measurements that show drift
- `kernel_id`, `op_type`, `input_shape`, `path`
- `stressor`, `level` (requested load, to which other work on a CPU counts), `stress_alone` (share of the
  stressor while the measured work was idle), `stress_achieved` (its share during the measurement)
- `before_*`: load readings just before the block, while the measured work was idle, as before a model starts
- `load_*`: load readings during the measurement
- `latency_ms` (mean), `p50_ms`, `p95_ms`, `p99_ms`, `min_ms`, `max_ms`, `samples_ns` (all samples in order,
  each a mean of `calls_per_sample` runs), `cpu_ratio`, `loops` (number of samples), `warmup`
- `start_s`, `end_s`: POSIX timestamps
- `error`: message, None if the row has a latency
- for kernels measured in a stream (`stream.py`): `copies`, `device_ms`, `host_ms`, the samples `stream_ns`,
  `plug_ns` (blocking kernel only), `issue_ns` and `plug_issue_ns`, `overtaken` (host and device time are not
  separated) and `stream_error`
"""

from __future__ import annotations

import csv
import io
import itertools
import logging
import statistics
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from sparseflow.core.checks import check_between
from sparseflow.core.config import describe_validation_error
from sparseflow.core.files import read_parquet, write_atomic, write_parquet
from sparseflow.core.journal import Journal, read_journal
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, RunError
from sparseflow.latency.graph import session
from sparseflow.latency.graph.synthetic_kernels import write_synthetic_kernels
from sparseflow.latency.measure import descriptions
from sparseflow.latency.measure.config import CollectionConfig
from sparseflow.latency.measure.idle import (
    LOAD_METRICS,
    compute_idle_ms,
    compute_other_load,
    describe_other_load,
    get_load_before,
)
from sparseflow.latency.measure.instruments import Instruments, LocalInstruments
from sparseflow.latency.measure.plan import CollectionPlan, PlanStep, make_plan

PLAN, ROWS, TABLE, CSV = "plan.json", "rows.jsonl", "rows.parquet", "kernels.csv"
SYNTHETIC = "synthetic"
LOAD_PREFIX = "load_"
TEXT_COLUMNS = ("error", "stream_error", "stressor", "conv_search")
NON_METRIC_COLUMNS = ("timestamp_s", "interval_s", "source", "device")

logger = logging.getLogger(__name__)

Row = dict[str, Any]

Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Milliseconds = Annotated[float, Field(gt=0.0, allow_inf_nan=False, strict=True)]
Share = Annotated[float, Field(ge=0.0, le=1.0, strict=True)]


class _AnyRow(BaseModel):
    """Columns of every row that readers use."""

    key: str
    kernel_id: str
    op_type: str
    role: Literal["item", "reference"]
    level: Share
    session: int
    start_s: Number


class _FailedRow(_AnyRow):
    error: str


class _MeasuredRow(_AnyRow, extra="allow"):
    """Columns of a row with a latency that readers use."""

    error: None
    stress_alone: Share
    stress_achieved: Share
    latency_ms: Milliseconds
    p50_ms: Milliseconds
    p95_ms: Milliseconds
    samples_ns: Annotated[list[Annotated[int, Field(gt=0)]], Field(min_length=1)]
    cpu_ratio: Annotated[Number, Field(ge=0.0)] | None = None
    device_ms: Number | None = None
    host_ms: Number | None = None

    @model_validator(mode="after")
    def _check_loads(self) -> Self:
        check_between(0.0, 1.0, **get_load_before(self.model_extra or {}))
        return self


@dataclass(frozen=True, kw_only=True)
class CollectionSummary:
    """Summary of a collection.

    Attributes:
        path: Directory.
        rows: Number of measurements, including the reference's.
        added: Number of measurements that this call added.
        failed: Number of measurements with an error instead of a latency.
        targets: Number of kernels and models.
        drift: Range of the reference's medians at the lowest level over their median; None with fewer than
            two.
        levels: One entry per level: `level`, `load` (mean reading just before the blocks, with other work;
            None if it was not read), `stress_alone`, `stress_achieved`, `slowdown` (geometric mean over
            targets of the mean latency over that at the lowest level).
        other_load: Mean share of the device that other work used during the idle rows; None if it was not
            read, or there are no idle rows.
        problems: File that could not be measured -> message.
    """

    path: Path
    rows: int
    added: int
    failed: int
    targets: int
    drift: float | None
    levels: tuple[Mapping[str, float | None], ...]
    other_load: float | None
    problems: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types."""
        return {**asdict(self), "path": str(self.path), "levels": [dict(level) for level in self.levels]}


def collect(
    config: CollectionConfig,
    out_dir: Path | str,
    *,
    instruments: Instruments | None = None,
    progress: Progress | None = None,
) -> CollectionSummary:
    """Measure all targets of a configuration, or resume their measurement.

    A file that cannot be read or analyzed is one of `problems` and does not stop the others.

    Args:
        config: Settings.
        out_dir: Directory of the collection; created if missing, resumed if it contains one.
        instruments: Instruments; by default this machine's.
        progress: Receives a message and the fraction done.

    Raises:
        InputError: `out_dir` contains a collection with other settings, files or device.
        FileFormatError, ModelError: The only file is invalid.
        DeviceError: The provider, the load's device or the source of readings is not available.
        RunError: The load ended, the disk is full, or another process writes into `out_dir`.
    """
    if instruments is None:
        with LocalInstruments(config) as local_instruments:
            return collect(config, out_dir, instruments=local_instruments, progress=progress)
    folder = Path(out_dir)
    if config.synthetic is not None:
        kernels_dir = write_synthetic_kernels(
            config.synthetic, folder / SYNTHETIC, provider=config.provider, progress=progress
        )
        config = config.model_copy(update={"kernels": [*config.kernels, kernels_dir]})
    plan = _open_plan(config, folder, instruments, progress)
    finished = _read_finished_rows(folder, plan)
    if finished is not None:
        # Left by an interruption after the table was written.
        (folder / ROWS).unlink(missing_ok=True)
        return _summarize(folder, plan, finished, 0)
    steps = list(plan.iter_steps())
    with _open_journal(folder, steps) as journal:
        num_rows = len(journal)
        session = 1 + max((row["session"] for row in journal.rows), default=-1)
        missing = [step for step in steps if step.key not in journal]
        for index, block_steps in itertools.groupby(missing, key=lambda step: step.block):
            block = list(block_steps)
            if progress is not None:
                progress(f"level {block[0].level:g}: waiting for the load", len(journal) / len(steps))
            with instruments.block(block[0].level) as block_columns:
                for step in block:
                    if progress is not None:
                        position = f"level {step.level:g}, block {index + 1}/{len(plan.blocks)}"
                        progress(f"{position}: {step.target.id}", len(journal) / len(steps))
                    measured = instruments.measure(step.target)
                    with _explain_disk_errors(folder, len(journal), len(steps)):
                        journal.append(_describe_step(step, session, config) | dict(block_columns) | measured)
        by_key = {row["key"]: row for row in journal.rows}
        rows = [by_key[step.key] for step in steps]
        with _explain_disk_errors(folder, len(journal), len(steps)):
            journal.sync()
            _write_table(folder, rows)
            # Deleted last, so that the rows are always in one of the two files.
            journal.close(delete=True)
        return _summarize(folder, plan, rows, len(rows) - num_rows)


def read_rows(folder: Path | str) -> list[Row]:
    """Read the rows of a collection, complete or not, in the order of its plan.

    Raises:
        InputError: `folder` contains no collection.
        FileFormatError: The collection is damaged or of another version.
    """
    root = Path(folder)
    plan = read_plan(root)
    finished = _read_finished_rows(root, plan)
    if finished is not None:
        return finished
    _, rows = read_journal(root / ROWS, dict)
    _check_rows(rows, root / ROWS)
    by_key = {row["key"]: row for row in rows}
    return [by_key[step.key] for step in plan.iter_steps() if step.key in by_key]


def read_plan(folder: Path | str) -> CollectionPlan:
    """Read the plan of a collection.

    Raises:
        InputError: `folder` contains no collection.
        FileFormatError: The plan is damaged or of another version.
    """
    return CollectionPlan.load(Path(folder) / PLAN)


def count_rows(folder: Path | str) -> tuple[int, int]:
    """Return the current and the planned number of rows; both are 0 before the plan exists."""
    root = Path(folder)
    if not (root / PLAN).is_file():
        return 0, 0
    planned = sum(len(block.targets) for block in read_plan(root).blocks)
    if (root / TABLE).is_file():
        return planned, planned
    try:
        return (root / ROWS).read_bytes().count(b"\n"), planned
    except FileNotFoundError:
        return 0, planned


def _read_finished_rows(folder: Path, plan: CollectionPlan) -> list[Row] | None:
    """Return the rows of a complete collection; None if the table does not exist.

    Raises:
        FileFormatError: The table is damaged, or of another plan.
    """
    if not (folder / TABLE).is_file():
        return None
    rows = read_parquet(folder / TABLE).to_pylist()
    if [row.get("key") for row in rows] != [step.key for step in plan.iter_steps()]:
        raise FileFormatError(
            f"{folder / TABLE} does not have the rows of {folder / PLAN}; restore both, or collect into "
            "another directory"
        )
    _check_rows(rows, folder / TABLE)
    return rows


def _check_rows(rows: list[Row], path: Path) -> None:
    for number, row in enumerate(rows, start=1):
        try:
            (_FailedRow if row.get("error") else _MeasuredRow).model_validate(row)
        except ValidationError as error:
            raise FileFormatError(
                f"{path} is damaged: row {number}: {describe_validation_error(error)}; collect into another "
                "directory"
            ) from error


def _open_plan(
    config: CollectionConfig, folder: Path, instruments: Instruments, progress: Progress | None
) -> CollectionPlan:
    environment = instruments.environment()
    if (folder / PLAN).exists():
        existing = read_plan(folder)
        existing.check_equal(make_plan(config, environment, progress, exclude=existing.problems))
        return existing
    plan = make_plan(config, environment, progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problems = descriptions.write_descriptions(
            plan.targets, folder, config.provider, progress, inputs=config.inputs
        )
        if problems:
            plan = make_plan(config, environment, progress, exclude={**plan.problems, **problems})
        # Written last, so that a directory with a plan is complete.
        plan.save(folder / PLAN)
    except OSError as error:
        raise RunError(
            f"cannot write the plan to {folder}: {error.strerror or error}; free some space, or choose "
            "another directory"
        ) from error
    return plan


def _open_journal(folder: Path, steps: list[PlanStep]) -> Journal[Row]:
    try:
        journal = Journal(folder / ROWS, dict, key=lambda row: row.get("key"))
    except OSError as error:
        raise RunError(f"cannot write {folder / ROWS}: {error.strerror}") from error
    planned = {step.key for step in steps}
    for index, row in enumerate(journal.rows):
        if row.get("key") not in planned:
            journal.close()
            raise FileFormatError(
                f"{journal.locate(index)}: the key {row.get('key')!r} is not in the plan; restore the "
                "file, or collect into another directory"
            )
    try:
        _check_rows(journal.rows, journal.path)
    except FileFormatError:
        journal.close()
        raise
    return journal


def _describe_step(step: PlanStep, session: int, config: CollectionConfig) -> Row:
    return {
        "key": step.key,
        "block": step.block,
        "round": step.round,
        "session": session,
        "role": "reference" if step.reference else "item",
        "kernel_id": step.target.id,
        "op_type": step.target.op,
        "input_shape": step.target.input_shape,
        "path": step.target.path,
        "stressor": config.stressor if step.level > 0.0 else None,
        "level": step.level,
    }


@contextmanager
def _explain_disk_errors(folder: Path, num_rows: int, num_planned: int) -> Iterator[None]:
    try:
        yield
    except (OSError, RunError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RunError(
            f"cannot write to {folder} ({reason}); {num_rows} of {num_planned} rows are saved: free some "
            "space and run the same command again to resume"
        ) from error


def _write_table(folder: Path, rows: list[Row]) -> None:
    import pyarrow as pa

    # pyarrow alone would take the names of the first row and drop the others.
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        column_type = pa.list_(pa.int64()) if name.endswith("_ns") else None
        if column_type is None and all(value is None for value in values):
            # Columns of type null prevent the concatenation of collections.
            column_type = pa.string() if name in TEXT_COLUMNS else pa.float64()
        columns[name] = pa.array(values, type=column_type)
    write_atomic(folder / CSV, format_csv(rows))
    write_parquet(folder / TABLE, pa.table(columns))


def format_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format `Kernel_ID, OpType, Input_Shape, <metrics>, Latency_ms` of every row with a latency.

    Additional measurements of the reference are omitted, so that all targets have equal weight.
    """
    selected = [row for row in rows if row["error"] is None and row["role"] == "item"]
    load_columns = dict.fromkeys(name for row in selected for name in row if name.startswith(LOAD_PREFIX))
    metric_columns = [
        name for name in load_columns if name.removeprefix(LOAD_PREFIX) not in NON_METRIC_COLUMNS
    ]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [name.removeprefix(LOAD_PREFIX) for name in metric_columns]
    writer.writerow(["Kernel_ID", "OpType", "Input_Shape", *names, "Latency_ms"])
    for row in selected:
        shares = [row.get(name) for name in metric_columns]
        writer.writerow([row["kernel_id"], row["op_type"], row["input_shape"], *shares, row["latency_ms"]])
    return text.getvalue()


def _summarize(folder: Path, plan: CollectionPlan, rows: list[Row], added: int) -> CollectionSummary:
    valid = [row for row in rows if row["error"] is None]
    idle_rows = [row for row in valid if row["level"] == 0.0]
    metric = LOAD_METRICS[session.get_device_type(plan.config["provider"])]
    if warning := describe_other_load(idle_rows, metric):
        logger.warning("%s", warning)
    return CollectionSummary(
        path=folder,
        rows=len(rows),
        added=added,
        failed=len(rows) - len(valid),
        targets=len(plan.targets),
        drift=_compute_drift(valid),
        levels=tuple(_summarize_levels(valid, metric)),
        other_load=compute_other_load(idle_rows, metric),
        problems=plan.problems,
    )


def _compute_drift(rows: list[Row]) -> float | None:
    # Under load a median takes one of two values, so only the lowest level shows the machine's drift.
    lowest = min((row["level"] for row in rows), default=None)
    medians_ms = [
        row["p50_ms"] if lowest else compute_idle_ms(row)
        for row in rows
        if row["role"] == "reference" and row["level"] == lowest
    ]
    return (
        (max(medians_ms) - min(medians_ms)) / statistics.median(medians_ms) if len(medians_ms) > 1 else None
    )


def _summarize_levels(rows: list[Row], metric: str) -> Iterator[dict[str, float | None]]:
    times: dict[float, dict[str, list[float]]] = {}
    for row in rows:
        # Other work may disturb the idle rows, to which loaded ones are compared.
        latency_ms = row["latency_ms"] if row["level"] else compute_idle_ms(row)
        times.setdefault(row["level"], {}).setdefault(row["kernel_id"], []).append(latency_ms)
    lowest = times[min(times)] if times else {}
    for level in sorted(times):
        level_rows = [row for row in rows if row["level"] == level]
        loads = [load[metric] for row in level_rows if metric in (load := get_load_before(row))]
        ratios = [
            statistics.fmean(latencies_ms) / statistics.fmean(lowest[name])
            for name, latencies_ms in times[level].items()
            if name in lowest
        ]
        yield {
            "level": level,
            "load": statistics.fmean(loads) if loads else None,
            "stress_alone": statistics.fmean(row["stress_alone"] for row in level_rows),
            "stress_achieved": statistics.fmean(row["stress_achieved"] for row in level_rows),
            "slowdown": statistics.geometric_mean(ratios) if ratios else None,
        }
