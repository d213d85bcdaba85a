"""Trace of a joint training: one JSON line per epoch and round, sufficient to recompute all objectives.

`replay` recomputes the cost of every decision and compares it bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from sparseflow.codesign.design.decision import DecisionCost, HardwareDecision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.saved_plan import HardwareArtifact
from sparseflow.codesign.workload.layers import LayersField
from sparseflow.core.config import StrictModel
from sparseflow.core.environment import collect_environment
from sparseflow.core.journal import Journal, read_journal
from sparseflow.errors import FileFormatError, InputError

TRACE_FILE = "trace.jsonl"


class TraceHeader(HardwareArtifact):
    """First line of a trace: the run that it belongs to."""

    FORMAT: ClassVar[str] = "sparseflow.codesign.trace"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "create a trace with `sparseflow codesign train`"

    mode: str
    environment: dict[str, Any]


class TraceRow(StrictModel):
    """State of the run after an epoch, after a hardware round, or at the end."""

    kind: Literal["epoch", "round", "end"]
    mode: str
    """Mode of the run; at the end also a baseline."""
    epoch: int
    """Number of completed epochs."""
    round: int
    """Number of completed hardware rounds."""
    accuracy: float
    """Accuracy of the model, from 0 to 1."""
    lambda_hw: float
    """Weight of the hardware loss in the epoch."""
    frozen: bool
    """Whether the accuracy guard froze the decisions."""
    reference_accuracy: float | None
    """Accuracy that the guard compares with; None during warmup."""
    numbers: dict[str, float]
    """Mean training metrics of the epoch."""
    alpha: list[list[float]]
    """Chip type of each slot as a one-hot row, without noise, [slots, types + 1].

    The types are in the order of the configuration; the last column is an empty slot.
    """
    probabilities: list[list[float]]
    """Probability of each type in each slot, [slots, types + 1]."""
    layers: LayersField
    decision: HardwareDecision
    cost: DecisionCost


def open_trace(
    path: Path, hardware: Hardware, *, mode: str, seed: int, num_rows: int | None
) -> Journal[TraceRow]:
    """Open a trace for appending.

    Args:
        path: The file; its directory must exist.
        hardware: Hardware of the run.
        mode: Mode of the run.
        seed: Random seed to record.
        num_rows: Number of rows at the last checkpoint; later rows are removed. None starts a new trace.

    Raises:
        FileFormatError: The trace has fewer rows, or a row is damaged.
        RunError: Another process writes to the directory.
    """
    if num_rows is None:
        # Rows without a checkpoint belong to a run that stopped before its first epoch ended.
        with Journal(path, dict) as previous:
            previous.truncate(0)
        header = TraceHeader.from_hardware(
            hardware, path.parent, mode=mode, environment=collect_environment("cpu", seed=seed)
        )
    else:
        header, _ = read_journal(path, TraceRow, header_type=TraceHeader)
        if header is None:
            raise FileFormatError(f"{path} is missing or empty, but there is a checkpoint; restore the trace")
    trace = Journal(path, TraceRow, header=header, sync_rows=1)
    try:
        trace.truncate(num_rows or 0)
    except BaseException:
        trace.close()
        raise
    return trace


def read_trace(path: Path | str) -> tuple[Hardware, TraceHeader, list[TraceRow]]:
    """Read the hardware, the header and the rows of a trace.

    Raises:
        InputError: The file does not exist.
        FileFormatError: A row is damaged, or there is none.
        MissingExtraError: An optional package is missing.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file} does not exist; {TraceHeader.HINT}")
    header, rows = read_journal(file, TraceRow, header_type=TraceHeader)
    if header is None or not rows:
        raise FileFormatError(f"{file} contains no epoch yet")
    return header.build_hardware(file), header, rows


@dataclass(frozen=True, kw_only=True)
class ReplayedRow:
    """A recomputed row.

    Attributes:
        row: Index in the trace, from 1.
        recorded: Recorded objective.
        recomputed: Recomputed objective.
    """

    row: int
    recorded: float
    recomputed: float

    @property
    def is_exact(self) -> bool:
        """Whether both are equal bit for bit."""
        return self.recorded == self.recomputed


def replay(path: Path | str) -> list[ReplayedRow]:
    """Recompute the objective of every decision from the trace alone.

    Returns:
        One row per row of the trace.

    Raises:
        InputError: The file does not exist.
        FileFormatError: A row is damaged.
        MissingExtraError: An optional package is missing.
    """
    hardware, _, rows = read_trace(path)
    replayed = []
    for index, row in enumerate(rows, start=1):
        try:
            hardware.check_decision(row.layers, row.decision)
        except FileFormatError as error:
            raise FileFormatError(f"{path}, row {index}: {error}") from error
        recomputed = hardware.evaluate_cost(row.layers, row.decision).objective
        replayed.append(ReplayedRow(row=index, recorded=row.cost.objective, recomputed=recomputed))
    return replayed
