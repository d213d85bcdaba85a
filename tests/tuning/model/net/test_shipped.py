"""The network that comes with SparseFlow."""

from __future__ import annotations

from importlib import resources

import numpy as np
import pytest

from sparseflow.tuning.measure.synthetic import KINDS, draw
from sparseflow.tuning.model.net.pretrained import FILE, prior, shipped
from sparseflow.tuning.schedule.matrices import Coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import presets
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.space import Space


def test_it_is_small_and_read_once() -> None:
    file = resources.files("sparseflow.tuning") / "data" / FILE
    assert len(file.read_bytes()) <= 8_000_000
    assert shipped() is shipped() and not shipped().training


@pytest.mark.parametrize("name", OPERATORS)
def test_it_knows_what_experts_know(name: str) -> None:
    """What they write by hand is far faster than most draws are, whatever the matrix."""
    rng = np.random.default_rng(0)
    above = []
    for kind in KINDS:
        _, pattern = draw(rng, kind=kind, rows=(500, 2000), nnz=(5000, 50_000))
        values = np.ones(len(pattern.rows), np.float32)
        matrix = Coo(rows=pattern.rows, cols=pattern.cols, values=values, shape=pattern.shape)
        operator = OPERATORS[name]
        problem = Problem(operator=operator, matrix=matrix, n_cols=64 if operator.dense_axes else None)
        space = Space(operator, problem.extents, threads=[1, 2])
        scores = prior(problem, 2)
        drawn = scores([space.sample(rng) for _ in range(100)])
        best = scores(list(presets(operator, problem.extents, 2).values())).max()
        assert np.isfinite(drawn).all()
        above.append((best > drawn).mean())
    assert np.mean(above) > 0.9
