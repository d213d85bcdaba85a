"""The numbers of a training as they come: JSON lines always, TensorBoard where it is installed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sparseflow.core.journal import JsonLinesWriter, read_json_lines

HISTORY_FILE = "losses.jsonl"
_BOARD = "tensorboard"
_POINTS = 200
"""Points of a curve."""

_LOG = logging.getLogger(__name__)


class History:
    """Rows of a training in its folder, each step's once, however often it was stopped and went on.

    Every row has `"step"`, counted from 1, and `"kind"`, such as `"train"` or `"held_out"`; the rest are
    numbers, under the names that the training gives them.

    Args:
        folder: Where to write.

    Raises:
        RunError: Another process writes into the folder.
        FileFormatError: A line of an earlier run is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = JsonLinesWriter(folder / HISTORY_FILE)
        self._board: Any = None
        try:
            rows = read_json_lines(folder / HISTORY_FILE)
            # A step that is done again after a stop gives the same: what is written stays.
            self._written = {(row.get("step"), row.get("kind")) for row in rows}
            board = _tensorboard()
            if board is not None:
                self._board = board(str(folder / _BOARD))
        except BaseException:
            self._writer.close()
            raise

    def log(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """Add what a step gave. Raises RunError where the disk is full."""
        if (step, kind) in self._written:
            return
        self._written.add((step, kind))
        self._writer.write({"step": step, "kind": kind, **numbers})
        if self._board is not None:
            for name, value in numbers.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Make what was written survive a power cut."""
        self._writer.sync()

    def close(self) -> None:
        self._writer.sync()
        self._writer.close()
        if self._board is not None:
            self._board.close()


def read_history(folder: Path | str) -> Iterator[dict[str, Any]]:
    """The rows that a training wrote so far.

    Raises:
        FileFormatError: A line is damaged.
    """
    yield from read_json_lines(Path(folder) / HISTORY_FILE)


def smooth_curve(rows: Iterable[Mapping[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """A number of a history as a curve: steps, and means of neighbours, as many as a curve has points.

    Args:
        rows: Of one kind.
        key: Name of the number; rows without it are left out.
    """
    there = [(float(row["step"]), float(row[key])) for row in rows if key in row]
    size = max(1, -(-len(there) // _POINTS))
    parts = [there[first : first + size] for first in range(0, len(there), size)]
    return [part[-1][0] for part in parts], [sum(value for _, value in part) / len(part) for part in parts]


@cache
def _tensorboard() -> Any:
    """TensorBoard's writer; None, said once, where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _LOG.info("tensorboard is not installed: losses are written to %s only", HISTORY_FILE)
        return None
    return SummaryWriter
