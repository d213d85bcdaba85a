"""Fastest schedules of earlier sessions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.search import winners
from sparseflow.tuning.search.winners import WinnerCache, WinnerFile
from tests.conformance import check_artifact_file


def make_problem(
    rows: int = 200,
    density: float = 0.05,
    *,
    n_cols: int = 64,
    dtype: str = "float32",
    seed: int = 0,
    banded: bool = False,
) -> SparseProblem:
    rng = np.random.default_rng(seed)
    array = rng.random((rows, rows)) < density
    if banded:
        array = np.triu(np.tri(rows, k=4), -5)  # ten elements in a row, as above
    return SparseProblem(
        operator=get_operator("spmm"), matrix=as_coo(array, dtype=np.dtype(dtype)), n_cols=n_cols
    )


def blocked(problem: SparseProblem) -> Schedule:
    preset = build_presets(problem.operator, problem.extents, 2)["bcsr4x1"]
    return preset.canonicalize(problem.operator, problem.extents)


def test_find_similar_matrix_adapts_schedule(tmp_path: Path) -> None:
    cache = WinnerCache(tmp_path)
    assert cache.find(make_problem(), 2) == []
    cache.add(make_problem(), 2, blocked(make_problem()))
    similar = make_problem(230, seed=1)
    (schedule,) = WinnerCache(tmp_path).find(similar, 2)
    schedule.validate(similar.operator, similar.extents)
    assert schedule.fsplit[0].inner_size == 4 and schedule.threads == 2


@pytest.mark.parametrize(
    ("problem", "threads"),
    [
        (make_problem(1000), 2),
        (make_problem(density=0.4), 2),
        (make_problem(n_cols=8), 2),
        (make_problem(dtype="float64"), 2),
        (make_problem(), 1),
        (make_problem(banded=True), 2),
    ],
    ids=["rows", "density", "columns", "dtype", "threads", "band"],
)
def test_find_other_family_returns_nothing(problem: SparseProblem, threads: int, tmp_path: Path) -> None:
    cache = WinnerCache(tmp_path)
    cache.add(make_problem(), 2, blocked(make_problem()))
    assert cache.find(problem, threads) == []


def test_find_most_similar_first(tmp_path: Path) -> None:
    cache = WinnerCache(tmp_path)
    presets = build_presets(get_operator("spmm"), make_problem().extents, 2)
    for rows, name in ((200, "csr"), (210, "tiled_csr"), (260, "bcsr4x1")):
        cache.add(make_problem(rows), 2, presets[name])
    result = cache.find(make_problem(210), 2)
    assert len(result) == 2
    assert result[0] == presets["tiled_csr"].canonicalize(get_operator("spmm"), make_problem(210).extents)


def test_add_replaces_equal_problem_and_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "_MAX_WINNERS", 2)
    cache = WinnerCache(tmp_path)
    for rows in (64, 128, 128, 256):
        cache.add(make_problem(rows), 2, blocked(make_problem(rows)))
    stored = WinnerFile.load(cache.path).winners
    assert [round(2 ** winner.statistics["rows"]) for winner in stored] == [128, 256]


@pytest.mark.parametrize("content", ["", "{", '{"format": "other"}'])
def test_damaged_file_is_replaced(content: str, tmp_path: Path) -> None:
    cache = WinnerCache(tmp_path)
    cache.path.write_text(content)
    assert cache.find(make_problem(), 2) == []
    cache.add(make_problem(), 2, blocked(make_problem()))
    assert len(cache.find(make_problem(), 2)) == 1


def test_winner_file_conforms(tmp_path: Path) -> None:
    cache = WinnerCache(tmp_path)
    cache.add(make_problem(), 2, blocked(make_problem()))
    check_artifact_file(WinnerFile.load, cache.path, hint="remove the file")
