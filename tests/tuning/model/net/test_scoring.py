"""Scoring of schedules in batches."""

from __future__ import annotations

import numpy as np
import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.model.net import scoring
from sparseflow.tuning.model.net.coarsen import coarsen
from sparseflow.tuning.model.net.network import AutoSparseNet, NetConfig
from sparseflow.tuning.model.net.statistics import (
    NUM_FEATURES,
    compute_pattern_statistics,
    compute_task_statistics,
)
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import SPMM, SPMV
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.space import ScheduleSpace
from tests.tuning.synthetic_labels import NO_PATTERN, SMALL, pattern_of, score_schedules

EXTENTS = {"i": 60, "k": 40, "j": 32}


def test_scores_are_independent_of_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    net, pattern = AutoSparseNet(SMALL), pattern_of(0)
    context = net.embed_task(
        coarsen(pattern.rows, pattern.cols, pattern.shape, max_cells=64), np.ones(NUM_FEATURES, np.float32)
    )
    random = np.random.default_rng(0)
    schedules = [ScheduleSpace(SPMM, EXTENTS, threads=[1, 2]).sample(random) for _ in range(20)]
    scores = score_schedules(net, schedules, SPMM, EXTENTS, context)
    assert scores.shape == (20,) and scores.dtype == np.float32
    monkeypatch.setitem(scoring._BATCH_SIZE, "cpu", 3)
    repeated = score_schedules(net, schedules, SPMM, EXTENTS, context)
    np.testing.assert_allclose(repeated, scores, rtol=1e-4, atol=1e-5)
    single = score_schedules(net, schedules[7:8], SPMM, EXTENTS, context)
    np.testing.assert_allclose(single, scores[7:8], rtol=1e-4, atol=1e-5)
    assert score_schedules(net, [], SPMM, EXTENTS, context).shape == (0,)
    with pytest.raises(InputError):
        score_schedules(net, schedules, SPMV, {"i": 60, "j": 40}, context)


@pytest.mark.parametrize("config", [SMALL, NO_PATTERN], ids=["pattern", "bare"])
def test_scorer_matches_score_schedules(config: NetConfig) -> None:
    net, pattern = AutoSparseNet(config), pattern_of(0)
    mask = np.zeros(pattern.shape)
    mask[pattern.rows, pattern.cols] = 1.0
    problem = SparseProblem(operator=SPMM, matrix=as_coo(mask), n_cols=32)
    random = np.random.default_rng(0)
    schedules = [ScheduleSpace(SPMM, EXTENTS, threads=[1, 2]).sample(random) for _ in range(5)]
    statistics = compute_task_statistics(
        operator="spmm",
        shape=pattern.shape,
        nnz=pattern.nnz,
        n_cols=32,
        dtype="float64",
        threads=2,
        pattern=compute_pattern_statistics(pattern.rows, pattern.cols, pattern.shape),
    )
    context = net.embed_task(coarsen(pattern.rows, pattern.cols, pattern.shape, max_cells=64), statistics)
    result = scoring.make_scorer(net, problem, 2)
    for _ in range(2):
        np.testing.assert_array_equal(
            result(schedules), score_schedules(net, schedules, SPMM, EXTENTS, context)
        )
