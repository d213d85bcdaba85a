"""Grid of trainings: every configuration with every seed, in every fold, resumable and in parallel.

Each result is a row of a JSON-lines file in the output directory. Rows that are there already are not trained
again, so a grid that was interrupted continues where it stopped.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from sparseflow.core.checks import check_at_least
from sparseflow.core.journal import Journal
from sparseflow.core.parallel import map_unordered
from sparseflow.core.progress import Progress
from sparseflow.core.training.distributed import round_robin_device
from sparseflow.errors import FileFormatError, InputError

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True, kw_only=True)
class GridCell(Generic[ConfigT]):
    """One training of a grid.

    Attributes:
        name: Name of the configuration.
        config: The configuration.
        seed: Seed, from 0.
        fold: Fold of the cross-validation, from 0.
    """

    name: str
    config: ConfigT
    seed: int
    fold: int = 0


def make_grid(
    configs: Iterable[tuple[str, ConfigT]], *, num_seeds: int, num_folds: int = 1
) -> list[GridCell[ConfigT]]:
    """List the cells of a grid, seed by seed, so that an interrupted grid has complete seeds.

    Args:
        configs: Name and configuration of each model.
        num_seeds: Trainings of each model in each fold, with seeds from 0.
        num_folds: Folds.

    Raises:
        InputError: A name is not unique, or there is no seed.
    """
    configs = list(configs)
    names = [name for name, _ in configs]
    if len(set(names)) < len(names):
        raise InputError(f"names must be unique, got: {', '.join(names)}")
    check_at_least(1, num_seeds=num_seeds)
    return [
        GridCell(name=name, config=config, seed=seed, fold=fold)
        for seed in range(num_seeds)
        for name, config in configs
        for fold in range(num_folds)
    ]


def run_grid(
    train_cell: Callable[[GridCell[ConfigT], str], Mapping[str, Any]],
    cells: Sequence[GridCell[ConfigT]],
    path: Path | str,
    *,
    check_row: Callable[[Mapping[str, Any]], None] | None = None,
    device: str = "cpu",
    workers: int = 1,
    describe: Callable[[Mapping[str, Any]], str] | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Train every cell that has no row yet.

    Args:
        train_cell: Called with a cell and its device; returns its results in JSON's types. A function of a
            module, or a partial of one, so that another process can import it.
        cells: Cells in the order of training, see `make_grid`.
        path: JSON-lines file of the results; its directory is created if absent and locked meanwhile.
        check_row: Called with each row of the file; raises InputError if it comes from other settings.
        device: Device to train on; `"cuda"` cycles through all GPUs.
        workers: Concurrent trainings, each in its own process.
        describe: Progress message of a row; by default its configuration, fold and seed.
        progress: Called after each training.

    Returns:
        The row of each cell, in the order of `cells`. A row has `"entry"`, `"seed"`, `"fold"` (if there is
        more than one fold) and the results.

    Raises:
        InputError: `check_row` refused a row.
        FileFormatError: A line of the file is damaged.
        RunError: A training failed, or another process writes into the directory.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    has_folds = any(cell.fold for cell in cells)
    journal: Journal[dict[str, Any]]
    with Journal(path, dict) as journal:
        rows: dict[tuple[str, int, int], dict[str, Any]] = {}
        for row in journal.rows:
            if check_row is not None:
                check_row(row)
            rows[_row_key(row, path)] = row
        pending = [cell for cell in cells if _cell_key(cell) not in rows]
        jobs = [(cell, round_robin_device(device, index)) for index, cell in enumerate(pending)]
        results = map_unordered(partial(_train_cell, train_cell), jobs, workers=workers)
        for count, (index, result) in enumerate(results, start=1):
            cell = pending[index]
            row = {
                "entry": cell.name, **({"fold": cell.fold} if has_folds else {}), "seed": cell.seed, **result
            }  # fmt: skip
            journal.append(row)
            rows[_cell_key(cell)] = row
            if progress is not None:
                text = _describe_row(row) if describe is None else describe(row)
                progress(text, count / len(pending))
    return [rows[_cell_key(cell)] for cell in cells]


def _train_cell(
    train_cell: Callable[[GridCell[Any], str], Mapping[str, Any]], job: tuple[GridCell[Any], str]
) -> Mapping[str, Any]:
    if multiprocessing.parent_process() is not None:
        torch.set_num_threads(1)  # the cores are shared with the other workers
    return train_cell(*job)


def _cell_key(cell: GridCell[Any]) -> tuple[str, int, int]:
    return cell.name, cell.fold, cell.seed


def _row_key(row: Mapping[str, Any], path: Path) -> tuple[str, int, int]:
    try:
        return str(row["entry"]), int(row.get("fold", 0)), int(row["seed"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path}: a line is not a result of a grid ({error!r}); remove it") from error


def _describe_row(row: Mapping[str, Any]) -> str:
    fold = f", fold {row['fold'] + 1}" if "fold" in row else ""
    return f"{row['entry']}{fold}, seed {row['seed']}"
