"""Grid of trainings."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparseflow.core.journal import read_journal
from sparseflow.core.training import grid
from sparseflow.core.training.grid import GridCell, make_grid, run_grid
from sparseflow.errors import FileFormatError, InputError, RunError

CONFIGS = [("small", 1), ("large", 10)]


def train_cell(cell: GridCell[int], device: str) -> Mapping[str, Any]:
    return {"score": cell.config + cell.seed, "device": device}


def fail(cell: GridCell[int], device: str) -> Mapping[str, Any]:
    if cell.seed == 1:
        raise RunError("it diverged")
    return train_cell(cell, device)


def test_make_grid_lists_all_cells_of_a_seed_first() -> None:
    cells = make_grid(CONFIGS, num_seeds=2, num_folds=2)
    assert [(cell.seed, cell.name, cell.fold, cell.config) for cell in cells[:5]] == [
        (0, "small", 0, 1), (0, "small", 1, 1), (0, "large", 0, 10), (0, "large", 1, 10), (1, "small", 0, 1),
    ]  # fmt: skip
    assert len(cells) == 8


def test_make_grid_refuses_equal_names_and_no_seeds() -> None:
    with pytest.raises(InputError, match="small, small"):
        make_grid([("small", 1), ("small", 2)], num_seeds=1)
    with pytest.raises(InputError, match=r"\(=0\)"):
        make_grid(CONFIGS, num_seeds=0)


@pytest.mark.parametrize("workers", [1, 2])
def test_run_grid_returns_rows_in_the_order_of_cells(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def map_in_reverse(
        function: Callable[[Any], Any], jobs: Sequence[Any], *, workers: int
    ) -> Iterator[tuple[int, Any]]:
        assert workers == 2
        function = pickle.loads(pickle.dumps(function))  # other processes import it
        for index in reversed(range(len(jobs))):
            yield index, function(jobs[index])

    if workers > 1:
        monkeypatch.setattr(grid, "map_unordered", map_in_reverse)
    messages: list[tuple[str, float]] = []
    rows = run_grid(
        train_cell, make_grid(CONFIGS, num_seeds=2), tmp_path / "grid" / "rows.jsonl", workers=workers,
        progress=lambda message, fraction: messages.append((message, fraction)),
    )  # fmt: skip
    assert rows == [
        {"entry": "small", "seed": 0, "score": 1, "device": "cpu"},
        {"entry": "large", "seed": 0, "score": 10, "device": "cpu"},
        {"entry": "small", "seed": 1, "score": 2, "device": "cpu"},
        {"entry": "large", "seed": 1, "score": 11, "device": "cpu"},
    ]
    assert [fraction for _, fraction in messages] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert {message for message, _ in messages} == {
        "small, seed 0", "small, seed 1", "large, seed 0", "large, seed 1",
    }  # fmt: skip


def test_run_grid_after_a_failure_trains_only_missing_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cells = tmp_path / "rows.jsonl", make_grid(CONFIGS, num_seeds=2, num_folds=2)
    with pytest.raises(RunError, match="diverged"):
        run_grid(fail, cells, path)
    before = read_journal(path, dict)[1]
    assert [row["seed"] for row in before] == [0] * 4 and [row["fold"] for row in before] == [0, 1, 0, 1]
    trained: list[tuple[str, int, int]] = []

    def record(cell: GridCell[int], device: str) -> Mapping[str, Any]:
        trained.append((cell.name, cell.fold, cell.seed))
        return train_cell(cell, device)

    assert len(run_grid(record, cells, path)) == 8
    assert trained == [("small", 0, 1), ("small", 1, 1), ("large", 0, 1), ("large", 1, 1)]
    monkeypatch.setattr(grid, "_train_cell", lambda *_: pytest.fail("it trained"))
    assert run_grid(record, cells[:3], path) == before[:3]


def test_run_grid_checks_the_rows_that_exist(tmp_path: Path) -> None:
    path, cells = tmp_path / "rows.jsonl", make_grid(CONFIGS, num_seeds=1)
    run_grid(train_cell, cells, path)

    def check_row(row: Mapping[str, Any]) -> None:
        if row["score"] == 10:
            raise InputError("large was trained with other settings")

    with pytest.raises(InputError, match="large"):
        run_grid(train_cell, cells, path, check_row=check_row)
    path.write_text('{"score": 1}\n')
    with pytest.raises(FileFormatError, match=str(path)):
        run_grid(train_cell, cells, path)
