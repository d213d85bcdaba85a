"""The trace of a co-design: a JSON line for each epoch and round, from which objectives can be priced again.

A row holds the model's layers, the decision and what it was priced at. `replay` prices every decision again
and compares: the same numbers must come out, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparseflow.codesign.chips import library_of
from sparseflow.codesign.decision import Decision
from sparseflow.codesign.hardware import Hardware
from sparseflow.codesign.segments import number
from sparseflow.codesign.settings import settings_of
from sparseflow.core.jsonl import LineWriter, read_lines
from sparseflow.core.layers import LayerNode
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
        there = read_lines(path)
        if len(there) < rows:
            raise FileFormatError(
                f"{path} holds {len(there)} rows, and the checkpoint beside it stands after {rows}: it was "
                "cut short; restore it, or begin in another folder"
            )
        if len(there) > rows:
            lines = path.read_bytes().splitlines(keepends=True)[:rows]
            path.write_bytes(b"".join(lines))
        self.rows = rows
        self._writer = LineWriter(path)

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def write(self, row: dict[str, Any]) -> None:
        """Add a row; it is on the disk when this returns."""
        self._writer.write(row)
        self._writer.sync()
        self.rows += 1


def layer_records(layers: Sequence[LayerNode]) -> list[dict[str, Any]]:
    """Layers in JSON's types."""
    return [asdict(layer) | {"flops": number(layer.flops), "bytes": number(layer.bytes)} for layer in layers]


def layers_of(records: Sequence[dict[str, Any]]) -> list[LayerNode]:
    """What `layer_records` gave.

    Raises:
        FileFormatError: It is something else.
    """
    try:
        return [LayerNode(**record) for record in records]
    except TypeError as error:
        raise FileFormatError(f"a trace holds layers that cannot be read: {error}") from error


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
    rows = read_lines(file)
    if len(rows) < 2 or rows[0].get("kind") != "begin":
        raise FileFormatError(f"{file} does not begin with what the run was of, and an epoch")
    first = rows[0]
    hardware = Hardware(
        settings_of(first["settings"], str(file)), library=library_of(first["library"], str(file))
    )
    hardware.fix_reference(first["reference"])
    return hardware, rows


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
    for place, row in enumerate(rows):
        if "decision" not in row:
            continue
        priced = hardware.price(layers_of(row["layers"]), Decision.from_dict(row["decision"]))
        found.append(Replayed(row=place, recorded=row["priced"]["objective"], again=priced.objective))
    return found
