"""History of a training."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sparseflow.core.training import history as module
from sparseflow.core.training.history import HISTORY_FILE, History, read_history, smooth_curve
from sparseflow.errors import FileFormatError, RunError


@pytest.fixture(autouse=True)
def _clear_cache() -> None:
    module._load_tensorboard.cache_clear()


@pytest.fixture
def without_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


@pytest.mark.usefixtures("without_tensorboard")
def test_log_of_a_repeated_step_writes_nothing(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (2, 3, 4)):
        history = History(tmp_path)
        for step in steps:
            history.log(step, "train", {"loss": 1.0 / step})
        history.log(3, "held_out", {"top1": 0.5})
        history.close()
    rows = list(read_history(tmp_path))
    assert [(row["step"], row["kind"]) for row in rows] == [
        (1, "train"), (2, "train"), (3, "train"), (3, "held_out"), (4, "train"),
    ]  # fmt: skip
    assert rows[3] == {"step": 3, "kind": "held_out", "top1": 0.5}


@pytest.mark.usefixtures("without_tensorboard")
def test_without_tensorboard_logs_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            History(tmp_path / name).close()
    assert caplog.text.count("tensorboard is not installed") == 1


def test_with_tensorboard_writes_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            calls.append(("open", folder))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def close(self) -> None:
            calls.append(("close",))

    board = ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = Writer  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    history = History(tmp_path)
    history.log(7, "train", {"loss": 0.25, "rate": 1e-3})
    history.close()
    opened = ("open", str(tmp_path / "tensorboard"))
    assert calls == [opened, ("train/loss", 0.25, 7), ("train/rate", 1e-3, 7), ("close",)]


@pytest.mark.usefixtures("without_tensorboard", "refused_at_once")
def test_history_of_a_locked_or_damaged_directory_raises(tmp_path: Path) -> None:
    history = History(tmp_path)
    with pytest.raises(RunError, match=str(tmp_path)):
        History(tmp_path)
    history.close()
    (tmp_path / HISTORY_FILE).write_text("no row\n")
    with pytest.raises(FileFormatError, match="line 1"):
        History(tmp_path)
    (tmp_path / HISTORY_FILE).unlink()
    History(tmp_path).close()


def test_smooth_curve_averages_neighbors_and_skips_missing_values() -> None:
    rows = [{"step": step, "loss": float(step)} for step in range(1, 401)] + [{"step": 401}]
    steps, losses = smooth_curve(rows, "loss")
    assert len(steps) == 200 and steps[:2] == [2.0, 4.0] and losses[:2] == [1.5, 3.5]
    assert smooth_curve(rows[:3], "loss") == ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
