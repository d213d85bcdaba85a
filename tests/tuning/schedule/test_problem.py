"""Problems and their library results."""

from __future__ import annotations

import numpy as np
import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.schedule import problem as module
from sparseflow.tuning.schedule.matrices import CooMatrix, as_coo
from sparseflow.tuning.schedule.operators import OPERATORS, SDDMM, SPMM, SPMV, Operator
from sparseflow.tuning.schedule.problem import SparseProblem

TOLERANCE = {np.dtype(np.float32): 1e-5, np.dtype(np.float64): 1e-12}


def samples(rows: int, cols: int, density: float, dtype: type = np.float32) -> CooMatrix:
    generator = np.random.default_rng(rows + cols)
    return as_coo(
        generator.standard_normal((rows, cols)) * (generator.random((rows, cols)) < density), dtype=dtype
    )


def dense(matrix: CooMatrix) -> np.ndarray:
    return matrix.to_scipy().toarray().astype(np.float64)


def expected(problem: SparseProblem, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    """Compute the result with numpy from dense matrices."""
    a = dense(problem.matrix)
    wide = [value.astype(np.float64) for value in inputs]
    if not problem.operator.sparse_output:
        return a @ wide[0]
    sampled = a * (wide[0] @ wide[1].T)
    return sampled[problem.matrix.rows, problem.matrix.cols]


def width(operator: Operator, n_cols: int = 5) -> int | None:
    return n_cols if operator.dense_axes else None


@pytest.mark.parametrize("n_cols", [None, 0, -3])
@pytest.mark.parametrize("operator", [SPMM, SDDMM])
def test_missing_columns_raise(operator: Operator, n_cols: int | None) -> None:
    with pytest.raises(InputError, match=rf"`n_cols` \(={n_cols}\)"):
        SparseProblem(operator=operator, matrix=samples(3, 4, 0.5), n_cols=n_cols)


@pytest.mark.parametrize("n_cols", [0, 1, 7])
def test_extra_columns_raise(n_cols: int) -> None:
    with pytest.raises(InputError):
        SparseProblem(operator=SPMV, matrix=samples(3, 4, 0.5), n_cols=n_cols)


@pytest.mark.parametrize(
    ("operator", "extents", "shapes"),
    [
        (SPMM, {"i": 3, "k": 4, "j": 5}, {"B": (4, 5)}),
        (SPMV, {"i": 3, "j": 4}, {"x": (4,)}),
        (SDDMM, {"i": 3, "j": 4, "k": 5}, {"X": (3, 5), "Y": (4, 5)}),
    ],
)
def test_input_shapes(
    operator: Operator, extents: dict[str, int], shapes: dict[str, tuple[int, ...]]
) -> None:
    problem = SparseProblem(operator=operator, matrix=samples(3, 4, 0.5), n_cols=width(operator))
    assert problem.extents == extents
    assert problem.input_shapes == shapes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPERATORS)
def test_generated_inputs_depend_on_seed_only(name: str, dtype: type) -> None:
    operator = OPERATORS[name]
    problem = SparseProblem(operator=operator, matrix=samples(3, 4, 0.5, dtype), n_cols=width(operator))
    assert problem.dtype == dtype
    first, repeated, other = (
        problem.generate_inputs(1),
        problem.generate_inputs(1),
        problem.generate_inputs(2),
    )
    for item, same, different, shape in zip(
        first, repeated, other, problem.input_shapes.values(), strict=True
    ):
        assert item.dtype == dtype and item.shape == shape and item.flags.c_contiguous
        assert np.array_equal(item, same)
        assert not np.array_equal(item, different)


@pytest.mark.parametrize("shape", [(1, 1, 1.0), (1, 40, 0.5), (40, 1, 0.5), (13, 17, 0.3), (6, 6, 0.0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OPERATORS)
def test_library_and_reference_match_dense(name: str, dtype: type, shape: tuple[int, int, float]) -> None:
    operator = OPERATORS[name]
    problem = SparseProblem(operator=operator, matrix=samples(*shape, dtype), n_cols=width(operator))
    inputs = problem.generate_inputs()
    expected_result = expected(problem, inputs)
    result, reference = problem.get_library_function()(*inputs), problem.compute_reference(inputs)
    assert result.dtype == dtype and reference.dtype == np.float64
    assert result.shape == reference.shape == expected_result.shape
    scale = np.abs(expected_result).max(initial=1e-30)
    assert np.abs(reference - expected_result).max(initial=0.0) <= 1e-13 * scale
    assert np.abs(result - expected_result).max(initial=0.0) <= TOLERANCE[problem.dtype] * scale


@pytest.mark.parametrize("elements", [1, 7, 10_000])
def test_sddmm_chunks_match(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = SparseProblem(operator=SDDMM, matrix=samples(13, 17, 0.4, np.float64), n_cols=3)
    inputs = problem.generate_inputs()
    monkeypatch.setattr(module, "_SDDMM_CHUNK", elements)
    assert np.allclose(problem.get_library_function()(*inputs), expected(problem, inputs), rtol=1e-12)


def test_reference_keeps_problem() -> None:
    problem = SparseProblem(operator=SPMM, matrix=samples(5, 6, 0.5), n_cols=2)
    inputs = problem.generate_inputs()
    before = problem.matrix.values.copy(), inputs[0].copy()
    problem.compute_reference(inputs)
    assert problem.dtype == np.float32
    assert np.array_equal(problem.matrix.values, before[0]) and np.array_equal(inputs[0], before[1])
