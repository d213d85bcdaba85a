"""Metrics of a training over its steps: JSON lines, and TensorBoard if it is installed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sparseflow.core.journal import Journal, read_journal

HISTORY_FILE = "losses.jsonl"
_TENSORBOARD_DIR = "tensorboard"
_MAX_CURVE_POINTS = 200

_LOG = logging.getLogger(__name__)


class History:
    """Writer of a training's metrics. A resumed training does not write a step twice.

    Every row has `"step"`, counted from 1, `"kind"`, such as `"train"` or `"held_out"`, and the metrics.

    Args:
        out_dir: Directory of the training; locked until `close`.

    Raises:
        RunError: Another process writes into the directory.
        FileFormatError: A line of an earlier run is damaged.
    """

    def __init__(self, out_dir: Path) -> None:
        self._journal: Journal[dict[str, Any]] = Journal(out_dir / HISTORY_FILE, dict, key=_get_key)
        self._tensorboard: Any = None
        try:
            make_writer = _load_tensorboard()
            if make_writer is not None:
                self._tensorboard = make_writer(str(out_dir / _TENSORBOARD_DIR))
        except BaseException:
            self._journal.close()
            raise

    def log(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step. Raises RunError if the disk is full."""
        # A step that is repeated after a stop gives the same metrics: the existing row stays.
        if (step, kind) in self._journal:
            return
        self._journal.append({"step": step, "kind": kind, **metrics})
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Flush the rows to disk, so that they survive a power failure."""
        self._journal.sync()

    def close(self) -> None:
        """Flush and close the files and release the directory."""
        self._journal.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_history(out_dir: Path | str) -> Iterator[dict[str, Any]]:
    """Yield the rows that a training has written.

    Raises:
        FileFormatError: A line is damaged.
    """
    yield from read_journal(Path(out_dir) / HISTORY_FILE, dict)[1]


def _get_key(row: Mapping[str, Any]) -> tuple[Any, Any]:
    return row.get("step"), row.get("kind")


def smooth_curve(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Average a metric over neighboring steps, for a plot with at most 200 points.

    Args:
        rows: Rows of one kind.
        name: Name of the metric; rows without it are skipped.

    Returns:
        Last step of each average, and the averages.
    """
    points = [(float(row["step"]), float(row[name])) for row in rows if name in row]
    size = max(1, -(-len(points) // _MAX_CURVE_POINTS))
    bins = [points[start : start + size] for start in range(0, len(points), size)]
    return [bin_[-1][0] for bin_ in bins], [sum(value for _, value in bin_) / len(bin_) for bin_ in bins]


@cache
def _load_tensorboard() -> Any:
    """TensorBoard's `SummaryWriter`; None, logged once, if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _LOG.info("tensorboard is not installed: metrics are written to %s only", HISTORY_FILE)
        return None
    return SummaryWriter
