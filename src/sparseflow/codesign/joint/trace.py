"""Trace of a joint training: one JSON line per epoch and round, sufficient to recompute all objectives.

The first row identifies the run: config, chip library, reference, and the digest of a proxy whose copy is in
the same directory. Every other row contains

    kind, mode        "epoch", "round" (of hardware, after the last epoch) or "end"; mode of the run
    epoch, round      numbers of completed epochs and rounds
    accuracy          of the model, 0 to 1
    lambda_hw         weight of L_hw in that epoch
    guard, numbers    state of the accuracy guard; mean training metrics of the epoch
    alpha             one-hot chip types without noise, [S, T + 1], in the order of the config; last is empty
    probabilities     probability of each type, [S, T + 1]
    layers            layers of the model
    decision, priced  the decision and its cost

`replay` recomputes the cost of every decision and compares it bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.codesign.design.decision import HardwareDecision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.saved_plan import hardware_from_record
from sparseflow.codesign.workload.layers import parse_layers
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.errors import FileFormatError, InputError

TRACE_FILE = "trace.jsonl"


class TraceWriter:
    """Appends rows to a trace; a context manager.

    Args:
        path: The file; its directory must exist.
        num_rows: Number of valid rows; later rows were written after the last checkpoint and are removed.

    Raises:
        FileFormatError: There are fewer rows, or a row is damaged.
        RunError: Another process writes to the directory.
    """

    def __init__(self, path: Path, *, num_rows: int) -> None:
        num_existing = len(read_json_lines(path))
        if num_existing < num_rows:
            raise FileFormatError(
                f"{path} has {num_existing} rows, but its checkpoint was saved after {num_rows}; restore "
                "the trace or choose another directory"
            )
        self.num_rows = num_rows
        self._writer = JsonLinesWriter(path)
        self._writer.truncate(num_rows)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, row: dict[str, Any]) -> None:
        """Append a row and sync it to disk."""
        self._writer.write(row)
        self._writer.sync()
        self.num_rows += 1


def read_trace(path: Path | str) -> tuple[Hardware, list[dict[str, Any]]]:
    """Read the hardware and the rows of a trace.

    Raises:
        InputError: The file does not exist.
        FileFormatError: A row is damaged, or there are fewer than two.
        MissingExtraError: An optional package is missing.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"{file} does not exist; create a trace with `sparseflow codesign train`")
    rows = read_json_lines(file)
    if len(rows) < 2 or rows[0].get("kind") != "begin":
        raise FileFormatError(f"{file} must start with the run's header and contain at least one more row")
    try:
        return hardware_from_record(rows[0], file), rows
    except FileFormatError as error:
        raise FileFormatError(f"{file}, first row: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ReplayedRow:
    """A recomputed row.

    Attributes:
        row: Index in the trace.
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

    Raises:
        InputError: The file does not exist.
        FileFormatError: A row is damaged.
        MissingExtraError: An optional package is missing.
    """
    hardware, rows = read_trace(path)
    replayed = []
    for index, row in enumerate(rows[1:], start=1):
        try:
            layers, decision = parse_layers(row["layers"]), HardwareDecision.from_dict(row["decision"])
            hardware.check_decision(layers, decision)
            recorded = float(row["priced"]["objective"])
        except (InputError, LookupError, TypeError, ValueError) as error:
            raise FileFormatError(f"{path}, row {index}: invalid: {error}") from error
        recomputed = hardware.evaluate_cost(layers, decision).objective
        replayed.append(ReplayedRow(row=index, recorded=recorded, recomputed=recomputed))
    return replayed
