"""The network that comes with SparseFlow."""

from __future__ import annotations

from importlib import resources

import numpy as np
import pytest

from sparseflow.tuning.measure.synthetic import PATTERN_KINDS, sample_pattern
from sparseflow.tuning.model.net.pretrained import SHIPPED_FILE, load_shipped_network, make_shipped_prior
from sparseflow.tuning.schedule.matrices import CooMatrix
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.space import ScheduleSpace


def test_shipped_network_is_small_and_cached() -> None:
    file = resources.files("sparseflow.tuning") / "data" / SHIPPED_FILE
    assert len(file.read_bytes()) <= 8_000_000
    assert load_shipped_network() is load_shipped_network() and not load_shipped_network().training


@pytest.mark.parametrize("name", OPERATORS)
def test_shipped_network_ranks_presets(name: str) -> None:
    """What they write by hand is far faster than most draws are, whatever the matrix."""
    rng = np.random.default_rng(0)
    above = []
    for kind in PATTERN_KINDS:
        _, pattern = sample_pattern(rng, kind=kind, rows=(500, 2000), nnz=(5000, 50_000))
        values = np.ones(len(pattern.rows), np.float32)
        matrix = CooMatrix(rows=pattern.rows, cols=pattern.cols, values=values, shape=pattern.shape)
        operator = OPERATORS[name]
        problem = SparseProblem(operator=operator, matrix=matrix, n_cols=64 if operator.dense_axes else None)
        space = ScheduleSpace(operator, problem.extents, threads=[1, 2])
        scores = make_shipped_prior(problem, 2)
        samples = scores([space.sample(rng) for _ in range(100)])
        best = scores(list(build_presets(operator, problem.extents, 2).values())).max()
        assert np.isfinite(samples).all()
        above.append((best > samples).mean())
    assert np.mean(above) > 0.9
