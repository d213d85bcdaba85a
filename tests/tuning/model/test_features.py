"""Schedule features against packed matrices and loop nests."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.codegen.loop_nest import lower
from sparseflow.tuning.model.features import ScheduleFeatures
from sparseflow.tuning.schedule.formats import pack
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace


def problem_of(operator: str = "spmm", rows: int = 70, cols: int = 53, share: float = 0.08) -> SparseProblem:
    matrix = as_coo((np.random.default_rng(0).random((rows, cols)) < share).astype(np.float32))
    wide = 20 if OPERATORS[operator].dense_axes else None
    return SparseProblem(operator=OPERATORS[operator], matrix=matrix, n_cols=wide)


def samples(problem: SparseProblem, count: int, seed: int = 0) -> list[Schedule]:
    space, rng = ScheduleSpace(problem.operator, problem.extents, threads=(1, 2)), np.random.default_rng(seed)
    return [space.sample(rng) for _ in range(count)]


def compute_features(problem: SparseProblem, line: str, threads: int = 2) -> dict[str, float]:
    (row,) = ScheduleFeatures(problem, threads).compute([Schedule.parse(line)])
    return dict(zip(ScheduleFeatures.names, row.tolist(), strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
def test_features_are_finite_and_named(operator: str) -> None:
    problem = problem_of(operator)
    features = ScheduleFeatures(problem, 2)
    result = features.compute(samples(problem, 300))
    assert result.shape == (300, len(ScheduleFeatures.names)) and result.dtype == np.float32
    assert len(set(ScheduleFeatures.names)) == len(ScheduleFeatures.names)
    assert np.isfinite(result).all()
    assert len(np.unique(result, axis=0)) > 250, "different schedules have different features"
    assert features.compute([]).shape == (0, len(ScheduleFeatures.names))


def test_features_are_independent_of_batch() -> None:
    problem = problem_of()
    subset = samples(problem, 50)
    combined = ScheduleFeatures(problem, 2).compute([*subset, *subset])
    assert (combined[:50] == combined[50:]).all()
    features = ScheduleFeatures(problem, 2)
    separate = np.concatenate([features.compute([item]) for item in reversed(subset)])
    assert (separate[::-1] == combined[:50]).all()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("share", [0.005, 0.3])
def test_stored_features_match_pack(operator: str, share: float) -> None:
    problem = problem_of(operator, share=share)
    schedules = samples(problem, 150)
    result = ScheduleFeatures(problem, 2).compute(schedules)
    nnz, column = problem.matrix.nnz, ScheduleFeatures.names.index
    for schedule, row in zip(schedules, result, strict=True):
        nest = lower(schedule, problem.operator, problem.extents, problem.dtype)
        packed = pack(problem.matrix, nest.levels)
        values = 2.0 ** row[column("log2 values per element")] * nnz
        stored = 2.0 ** row[column("log2 stored over coordinates")] * nnz * 12
        assert values == pytest.approx(len(packed.values), rel=1e-5)
        assert stored == pytest.approx(packed.nbytes, rel=1e-5)


def test_csr_features() -> None:
    """100 rows with 4 elements each, 32 columns in vectors of 16."""
    matrix = as_coo(np.kron(np.eye(25), np.ones((4, 4))).astype(np.float32))
    problem = SparseProblem(operator=OPERATORS["spmm"], matrix=matrix, n_cols=32)
    row = compute_features(problem, "0 1 A 2 i k A 2 i 0 k 1 1 j 2 j0 2 j1 16 4 i j0 k j1 i j1 k 4 2 8")
    assert row["split r"] == row["split c"] == 0.0 and (row["split d"], row["log2 inner d"]) == (1.0, 4.0)
    assert (row["mode r0"], row["mode c0"], row["mode r1"], row["mode c1"]) == (0.0, 1.0, -1.0, -1.0)
    assert [row[f"place {role}"] for role in ("r0", "r1", "c0", "c1", "d0", "d1")] == [3, -1, 1, -1, 2, 0]
    assert [row[f"log2 steps {position}"] for position in range(6)] == pytest.approx(
        [4.0, 2.0, 1.0, math.log2(100), 0.0, 0.0]
    )
    assert row["log2 bodies 0 per element"] == 5.0 and row["log2 bodies 3 per element"] == -2.0
    assert row["log2 positions r0 per element"] == -2.0 and row["log2 positions c0 per element"] == 0.0
    assert row["log2 values per element"] == 0.0
    assert row["log2 walks"] == 1.0
    assert (row["sums in variables"], row["sums in an array"], row["written once"]) == (1.0, 0.0, 1.0)
    assert row["log2 sums kept"] == 4.0 and row["log2 results written per element"] == 3.0
    assert (row["vector of results"], row["lanes used"]) == (1.0, 1.0)
    assert row["log2 vectors per element"] == 1.0
    assert (row["place unrolled"], row["log2 unrolled"]) == (1.0, 2.0)
    assert (row["parallel r"], row["place parallel"], row["log2 chunk"]) == (1.0, 3.0, 3.0)
    # 13 chunks, 7 of them for one of two threads, against 12.5 / 2.
    assert row["log2 imbalance"] == pytest.approx(math.log2(7 / 6.25))
    # One row of B's tile is a cache line; a row of A has four such rows and one line of the output.
    assert row["log2 bytes touched 0"] == pytest.approx(math.log2(2 * 64))
    assert row["log2 bytes touched 1"] == pytest.approx(math.log2(5 * 64))


def test_full_row_increases_imbalance() -> None:
    dense = np.eye(64, dtype=np.float32)
    dense[5] = 1.0
    problem = SparseProblem(operator=OPERATORS["spmv"], matrix=as_coo(dense))
    line = "0 1 A 2 i j A 2 i 0 j 1 0 2 i j i None None 0 2 {}"
    even, fine_grid, coarse = (
        compute_features(item, line.format(chunk))["log2 imbalance"]
        for item, chunk in ((problem_of("spmv", 64, 64, 1.0), 1), (problem, 1), (problem, 64))
    )
    # 64 of 127 elements are in one row.
    assert even == 0.0 and coarse == 1.0
    assert fine_grid == pytest.approx(math.log2(2 * 64 / 127))


def test_threads_are_limited_by_cpus() -> None:
    line = "0 1 A 2 i j A 2 i 0 j 1 0 2 i j i None None 0 8 1"
    row = compute_features(problem_of("spmv", 64, 64, 1.0), line, threads=2)
    assert row["log2 threads"] == 3.0 and row["log2 chunks a thread"] == 5.0


def test_block_padding_is_counted() -> None:
    """Blocks of 4x1 with 3 of 4 elements store a quarter of zeros."""
    dense = np.kron(np.eye(16), np.array([[1], [1], [1], [0]])).astype(np.float32)
    problem = SparseProblem(operator=OPERATORS["spmm"], matrix=as_coo(dense), n_cols=16)
    blocked = build_presets(problem.operator, problem.extents, 1)["bcsr4x1"]
    row = dict(
        zip(ScheduleFeatures.names, ScheduleFeatures(problem, 1).compute([blocked])[0].tolist(), strict=True)
    )
    assert row["log2 values per element"] == pytest.approx(math.log2(4 / 3))


def test_oversized_storage_has_features() -> None:
    side = 2**20
    ends = np.array([0, side - 1])
    matrix = CooMatrix(rows=ends, cols=ends, values=np.ones(2, np.float32), shape=(side, side))
    problem = SparseProblem(operator=OPERATORS["spmv"], matrix=matrix)
    row = compute_features(problem, "0 1 A 2 i j A 2 i 0 j 0 0 2 i j i j None 0 2 16")
    assert row["log2 values per element"] == 39.0
    assert row["log2 stored over coordinates"] > 35.0


def test_more_than_two_parts() -> None:
    problem = problem_of(rows=64, cols=64)
    row = compute_features(
        problem,
        "1 i 3 i0 4 i1 4 i2 4 1 A 4 i0 i1 k i2 A 4 i0 0 i1 1 k 1 i2 0 0 5 i0 i1 k i2 j i0 j None 0 2 1",
    )
    assert row["log2 inner r"] == 4.0 and row["mode r0"] == row["mode r1"] == 0.0
    assert row["place r0"] == 4.0 and row["place r1"] == 1.0


@pytest.mark.parametrize("operator", OPERATORS)
def test_empty_matrix(operator: str) -> None:
    problem = problem_of(operator, share=0.0)
    assert problem.matrix.nnz == 0
    assert np.isfinite(ScheduleFeatures(problem, 2).compute(samples(problem, 50))).all()


def test_invalid_schedule_raises() -> None:
    spmv = Schedule.parse("0 1 A 2 i j A 2 i 0 j 1 0 2 i j i j None 0 2 16")
    with pytest.raises(InputError):
        ScheduleFeatures(problem_of("spmm"), 2).compute([spmv])


def test_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparseflow.tuning.model.features._MAX_CACHED_SCHEDULES", 10)
    problem = problem_of()
    features, subset = ScheduleFeatures(problem, 2), samples(problem, 40)
    started = [features.compute(subset[index : index + 8]) for index in range(0, 40, 8)]
    assert (np.concatenate(started) == ScheduleFeatures(problem, 2).compute(subset)).all()
    assert len(features._cache) <= 10
