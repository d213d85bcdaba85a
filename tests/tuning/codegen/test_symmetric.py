"""Symmetric storage: half of the elements are stored, and other values than symmetric ones are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import sparse

from sparseflow.errors import InputError
from sparseflow.tuning.codegen.kernel import CompiledKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.schedule import presets
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from tests.tuning.codegen.test_export import check_export, get_sanitizing_compiler


def make_line(threads: int) -> Schedule:
    loop, chunk = ("i", 0) if threads > 1 else ("None", 1)
    return Schedule.parse(f"0 1 A 2 i j A 2 i 0 j 6 0 2 i j {loop} None None 0 {threads} {chunk}")


def make_problem(size: int, density: float, dtype: type = np.float64) -> SparseProblem:
    half = sparse.random_array((size, size), density=density, rng=np.random.default_rng(size))
    return SparseProblem(operator=OPERATORS["spmv"], matrix=as_coo(half + half.T, dtype=dtype))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("size", "density"), [(1, 1.0), (3, 0.0), (7, 0.3), (500, 0.01), (100, 0.5)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_product_matches_reference(size: int, density: float, threads: int, dtype: type, cache: Path) -> None:
    problem = make_problem(size, density, dtype)
    kernel = CompiledKernel(build_program(problem, make_line(threads)), cache_dir=cache)
    (x,) = problem.generate_inputs()
    np.testing.assert_allclose(kernel(x), problem.compute_reference((x,)), rtol=1e-4, atol=1e-5)
    num_diagonal = int((problem.matrix.rows == problem.matrix.cols).sum())
    assert 2 * len(kernel.program.packed.values) == problem.matrix.nnz + num_diagonal


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("i 0 j 6", "i 1 j 6", "symmetric"),
        ("i None None 0 2 0", "i None None 0 2 4", "symmetric-parallel"),
        ("i None None 0 2 0", "i j None 0 2 0", "symmetric-loops"),
    ],
)
def test_other_schedules_are_refused(old: str, new: str, rule: str) -> None:
    schedule = Schedule.parse(str(make_line(2)).replace(old, new))
    (problem, *_) = schedule.find_violations(OPERATORS["spmv"], {"i": 8, "j": 8})
    assert problem.startswith(f"{rule}: ")
    assert make_line(2).find_violations(OPERATORS["spmv"], {"i": 8, "j": 9})[0].startswith("symmetric-shape")


@pytest.mark.parametrize("change", ["value", "pattern", "shape"])
def test_other_matrices_are_refused(change: str) -> None:
    matrix = make_problem(20, 0.3).matrix.to_scipy().tolil()
    if change == "value":
        row, col = (int(part[0]) for part in sparse.triu(matrix, 1).nonzero())
        matrix[row, col] += 1.0
    elif change == "pattern":
        row, col = np.argwhere(np.triu(matrix.toarray() == 0, 1))[0]
        matrix[row, col] = 1.0
    else:
        matrix = matrix[:, :-1]
    problem = SparseProblem(operator=OPERATORS["spmv"], matrix=as_coo(matrix))
    with pytest.raises(InputError, match="symmetric"):
        build_program(problem, make_line(2))


@pytest.mark.parametrize("symmetric", [True, False])
def test_new_values_give_the_product_of_the_new_matrix(symmetric: bool, cache: Path) -> None:
    problem = make_problem(60, 0.1)
    kernel = CompiledKernel(build_program(problem, make_line(2)), cache_dir=cache)
    matrix = problem.matrix.to_scipy()
    new = matrix.copy()
    new.data = new.data * 2.0 if symmetric else np.arange(1.0, matrix.nnz + 1)
    (x,) = problem.generate_inputs()
    changed = kernel.with_values(new.data)
    np.testing.assert_allclose(changed(x), new @ x)
    assert changed.schedule is not None and changed.schedule.is_symmetric == symmetric
    # A tensor that changes after `with_values`, and gradients.
    values = torch.tensor(matrix.data, requires_grad=True)
    trained = kernel.with_values(values)
    with torch.no_grad():
        values.copy_(torch.from_numpy(new.data))
    result = trained(torch.from_numpy(x))
    np.testing.assert_allclose(result.detach().numpy(), new @ x)
    result.sum().backward()
    assert values.grad is not None
    np.testing.assert_allclose(values.grad.numpy(), x[problem.matrix.cols])
    np.testing.assert_allclose(kernel.T(x), matrix @ x)


def test_preset_is_for_large_symmetric_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(200, 0.05)
    assert presets.build_matrix_presets(problem, 2) == {}
    monkeypatch.setattr(presets, "_MIN_SYMMETRIC_BYTES", 0)
    assert presets.build_matrix_presets(problem, 2) == {"symmetric": make_line(2)}
    other = sparse.random_array((200, 200), density=0.05, rng=np.random.default_rng(0))
    assert (
        presets.build_matrix_presets(SparseProblem(operator=OPERATORS["spmv"], matrix=as_coo(other)), 2) == {}
    )


@pytest.mark.parametrize("threads", [1, 3])
def test_export_passes_its_test_under_sanitizers(threads: int, tmp_path: Path) -> None:
    compiler = get_sanitizing_compiler("gcc", tmp_path)
    check_export(make_problem(90, 0.1, np.float32), make_line(threads), tmp_path / "c", compiler)
