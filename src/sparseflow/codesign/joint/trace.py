"""The trace of a co-design: a JSON line for each epoch and round, from which objectives can be priced again.

The first row says what the run is of: settings, chip library, reference, and the digest of a proxy of which a
copy lies beside the trace. Each of the others holds

    kind, mode        "epoch", "round" of hardware after the last epoch, or "end"; and whose
    epoch, round      how many there have been
    accuracy          of the model, 0 to 1
    lambda_hw         weight of L_hw in that epoch
    guard, numbers    state of the guard; means over the steps of the epoch
    alpha             what slots hold in a draw without noise, one type each, [S, T + 1]; types are in the
                      order of the settings' chips, the last is empty
    probabilities     how likely a draw gives each slot each type, likewise
    layers            of the model
    decision, priced  what was decided, and what that costs

`replay` prices every decision again and compares: the same numbers must come out, to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseflow.codesign.design.decision import Decision
from sparseflow.codesign.design.hardware import Hardware
from sparseflow.codesign.design.saved_plan import hardware_of
from sparseflow.codesign.workload.layers import layers_of
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.errors import FileFormatError, InputError

TRACE = "trace.jsonl"


class Trace:
    """The open end of a trace; a context manager.

    Args:
        path: The file. Its folder must exist.
        rows: Rows that count; what comes after them was written by a run that was stopped before its
            checkpoint, and is taken away.

    Raises:
        FileFormatError: There are fewer rows, or one is damaged.
        RunError: Another process writes in the folder.
    """

    def __init__(self, path: Path, *, rows: int) -> None:
        there = len(read_json_lines(path))
        if there < rows:
            raise FileFormatError(
                f"{path} holds {there} rows, and the checkpoint beside it stands after {rows}: it was "
                "cut short; restore it, or begin in another folder"
            )
        self.rows = rows
        self._writer = JsonLinesWriter(path)
        self._writer.truncate(rows)

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, row: dict[str, Any]) -> None:
        """Add a row; it is on the disk when this returns."""
        self._writer.write(row)
        self._writer.sync()
        self.rows += 1


def opened(path: Path | str) -> tuple[Hardware, list[dict[str, Any]]]:
    """The hardware that a trace's decisions are priced by, and its rows.

    Raises:
        InputError: There is no such file.
        FileFormatError: A row is damaged, the first does not say what the run was of, or there is no other.
        MissingExtraError: An optional package is missing.
    """
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no trace {file}; `sparseflow codesign train` writes one")
    rows = read_json_lines(file)
    if len(rows) < 2 or rows[0].get("kind") != "begin":
        raise FileFormatError(f"{file} does not begin with what the run was of, and an epoch")
    try:
        return hardware_of(rows[0], file), rows
    except FileFormatError as error:
        raise FileFormatError(f"{file}, first row: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A row that was priced again.

    Attributes:
        row: Its place in the trace, from 0.
        recorded: The objective that it holds.
        again: What it comes to now.
    """

    row: int
    recorded: float
    again: float

    @property
    def same(self) -> bool:
        """To the last bit."""
        return self.recorded == self.again


def replay(path: Path | str) -> list[Replayed]:
    """Price every decision of a trace again, from nothing but the trace.

    Raises:
        InputError: There is no such file.
        FileFormatError: A row is damaged, or the first does not say what the run was of.
        MissingExtraError: An optional package is missing.
    """
    hardware, rows = opened(path)
    found = []
    for place, row in enumerate(rows[1:], start=1):
        try:
            layers, decision = layers_of(row["layers"]), Decision.from_dict(row["decision"])
            hardware.check(layers, decision)
            recorded = float(row["priced"]["objective"])
        except (InputError, LookupError, TypeError, ValueError) as error:
            raise FileFormatError(f"{path}, row {place}, cannot be priced: {error}") from error
        again = hardware.price(layers, decision).objective
        found.append(Replayed(row=place, recorded=recorded, again=again))
    return found
