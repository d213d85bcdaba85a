"""Hand-written schedules: validity, lowering and results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import sparse

from sparseflow.tuning.codegen.kernel import CompiledKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import REFERENCE_PRESETS, build_matrix_presets, build_presets
from sparseflow.tuning.schedule.problem import SparseProblem

TOLERANCE = {np.dtype(np.float32): 1e-4, np.dtype(np.float64): 1e-10}
EXTENTS = [1, 2, 3, 4, 5, 31, 64, 65, 1000, 10**6]


def extents_of(name: str, rows: int, cols: int, width: int) -> dict[str, int]:
    return dict(zip(OPERATORS[name].axes, (rows, cols, width), strict=False))


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("name", OPERATORS)
def test_presets_are_valid_for_any_shape(name: str, threads: int) -> None:
    operator = OPERATORS[name]
    for rows in EXTENTS:
        for width in EXTENTS:
            extents = extents_of(name, rows, 7, width)
            for build_preset in build_presets(operator, extents, threads).values():
                assert build_preset.find_violations(operator, extents) == []
                assert build_preset.threads == threads
                assert build_preset.parallel == build_preset.lreorder[0]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", OPERATORS)
def test_presets_are_distinct(name: str, threads: int) -> None:
    # Canonical presets are distinct.
    operator = OPERATORS[name]
    for rows in (1, 3, 1000):
        for width in (1, 3, 1000):
            extents = extents_of(name, rows, 7, width)
            result = build_presets(operator, extents, threads).values()
            assert len({item.canonicalize(operator, extents) for item in result}) == len(result)


@pytest.mark.parametrize("name", OPERATORS)
def test_reference_is_a_preset(name: str) -> None:
    assert REFERENCE_PRESETS[name] in build_presets(OPERATORS[name], extents_of(name, 10, 10, 10), 2)


@pytest.mark.parametrize("shape", [(2, 3), (130, 130), (300, 500), (500, 300)])
def test_diagonal_preset_matches_reference(shape: tuple[int, int], cache: Path) -> None:
    matrix = sum(value * np.eye(*shape, offset) for offset, value in ((-1, 1.0), (0, -2.0), (1, 3.0)))
    problem = SparseProblem(operator=OPERATORS["spmv"], matrix=as_coo(matrix, dtype=np.float32))
    (schedule,) = build_matrix_presets(problem, 2).values()
    inputs = problem.generate_inputs()
    result = CompiledKernel(build_program(problem, schedule), cache_dir=cache).compute(*inputs)
    np.testing.assert_allclose(result, problem.compute_reference(inputs), rtol=1e-4, atol=1e-6)


def test_diagonal_preset_needs_full_diagonals() -> None:
    matrix = sparse.random_array((300, 300), density=0.05, rng=np.random.default_rng(0))
    assert build_matrix_presets(SparseProblem(operator=OPERATORS["spmv"], matrix=as_coo(matrix)), 2) == {}


@pytest.mark.parametrize("shape", [(1, 1, 1), (37, 21, 100), (4, 300, 3)])
@pytest.mark.parametrize("name", OPERATORS)
def test_presets_match_reference(name: str, shape: tuple[int, int, int], cache: Path) -> None:
    generator = np.random.default_rng(0)
    rows, cols, width = shape
    full = generator.standard_normal((rows, cols)) * (generator.random((rows, cols)) < 0.4)
    operator = OPERATORS[name]
    problem = SparseProblem(
        operator=operator,
        matrix=as_coo(full, dtype=np.float32 if rows != 4 else np.float64),
        n_cols=width if operator.dense_axes else None,
    )
    inputs = problem.generate_inputs()
    expected = problem.compute_reference(inputs)
    for schedule in build_presets(operator, problem.extents, 2).values():
        result = CompiledKernel(build_program(problem, schedule), cache_dir=cache).compute(*inputs)
        limit = TOLERANCE[problem.dtype] * np.abs(expected).max(initial=1e-30)
        assert np.abs(result - expected).max(initial=0.0) <= limit
