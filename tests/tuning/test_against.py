"""The benchmark of tuned kernels against libraries."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.errors import RunError
from sparseflow.tuning.codegen.compile import compile_source
from sparseflow.tuning.codegen.kernel import CompiledKernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.measure.evaluator import make_job
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "tuning"))
against: Any = importlib.import_module("against")
libraries: Any = importlib.import_module("libraries")
matrix_suite: Any = importlib.import_module("matrix_suite")
paired_times: Any = importlib.import_module("paired_times")

SHIM = """
static REAL result[1 << 10];
static void prepare(const int *offsets, const int *indices, const REAL *values, const REAL *b, REAL *c)
{
    (void)c, (void)cols, (void)nnz;
    int width = n_cols ? n_cols : 1;
    for (int block_row = 0; block_row < rows / form; block_row++)
        for (int k = offsets[block_row]; k < offsets[block_row + 1]; k++)
            for (int i = 0; i < form; i++)
                for (int j = 0; j < form; j++)
                    for (int n = 0; n < width; n++)
                        result[(block_row * form + i) * width + n] +=
                            values[(k * form + i) * form + j] * b[(indices[k] * form + j) * width + n];
}
static void multiply(const REAL *b, REAL *c)
{
    (void)b;
    memcpy(c, result, sizeof(REAL) * (size_t)(rows * (n_cols ? n_cols : 1)));
}
"""
"""A library with blocks of `form` rows; its result is right only if it is prepared exactly once."""


def make_problem(n_cols: int | None = 4) -> SparseProblem:
    """Return a product with a matrix of 25 rows."""
    matrix = matrix_suite.make_stencil(5, 2, star=True).to_matrix(np.float32)
    return SparseProblem(operator=get_operator("spmm" if n_cols else "spmv"), matrix=matrix, n_cols=n_cols)


def build_tuned(problem: SparseProblem) -> CompiledKernel:
    presets = build_presets(problem.operator, problem.extents, 1)
    return CompiledKernel(build_program(problem, presets["csr"]))


@pytest.mark.parametrize("n_cols", [4, None])
def test_strongest_compares_the_forms_that_are_right(
    n_cols: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paired_times, "CLOSE", 1e9)
    problem = make_problem(n_cols)
    inputs = problem.generate_inputs(0)
    tuned, right = make_job(build_tuned(problem).program, inputs), paired_times.checker(problem, inputs)
    source = libraries.read_shim("mkl.c", problem.dtype)
    source = source[: source.index("/* Intel MKL")] + SHIM
    shim, wrong = compile_source(source), compile_source(source.replace("+=", "="))
    forms = {
        "csr": libraries.make_library_job(shim, problem, inputs, 1, form=1),
        "bsr2": libraries.make_library_job(shim, problem, inputs, 1, form=2, block=2),
        "wrong": libraries.make_library_job(wrong, problem, inputs, 1, form=1),
    }
    result = paired_times.strongest(forms, tuned, right, 2)
    assert result["form"] in ("csr", "bsr2")
    assert 0.0 <= result["setup_s"] < 60.0
    assert [name for name, outcome in result["forms"].items() if isinstance(outcome, str)] == ["wrong"]
    with pytest.raises(RunError, match="wrong: a result is wrong"):
        paired_times.strongest({"wrong": forms["wrong"]}, tuned, right, 2)


def test_calls_from_python_are_checked() -> None:
    problem = make_problem()
    result = paired_times.strongest_call(
        libraries.scipy_calls, build_tuned(problem), problem.generate_inputs(0), 1
    )
    assert list(result["forms"]) == ["csr, 1 threads"]
    with pytest.raises(RunError, match="zeros"):
        paired_times.strongest_call(make_zeros, build_tuned(problem), problem.generate_inputs(0), 1)


def make_zeros(problem: SparseProblem, threads: int) -> dict[str, Any]:
    """Return a Python baseline that is wrong."""
    return {"zeros": lambda dense: np.zeros((problem.matrix.shape[0], *dense.shape[1:]), dense.dtype)}


def test_matrices_cover_families_and_are_the_same_in_every_run() -> None:
    matrices = matrix_suite.list_matrices([])
    families = {matrix.family for matrix in matrices}
    assert len(matrices) == len({matrix.name for matrix in matrices}) >= 30
    assert len(families) >= 8
    assert {matrix.family for matrix in matrices[: len(families)]} == families
    digests = {
        make().digest()[:8]
        for make in (
            lambda: matrix_suite.make_mesh(100, 3, unknowns=3),
            lambda: matrix_suite.make_rmat(6, 4),
            lambda: matrix_suite.make_ratings(50, 20, 100),
        )
        for _ in range(2)
    }
    assert len(digests) == 3
    stencil = matrix_suite.make_stencil(3, 3, star=False).to_matrix().to_scipy().toarray()
    assert (stencil[13] != 0).all()
    assert np.count_nonzero(stencil) == 7**3
    balanced = matrix_suite.make_balanced(4, 8, 4, 1).to_matrix().to_scipy().toarray() != 0
    assert (balanced.reshape(4, 2, 4).sum(-1) == 1).all()


def make_row(matrix: str, **ratios: float) -> dict[str, Any]:
    """Return a row of a record; the search takes 10 s and the baselines 2 ms."""
    against_rows = {
        name: {"ratio": ratio, "ms": 2.0, "setup_s": 0.0, "form": "csr", "disturbed": 0, "pairs": [[ratio]]}
        for name, ratio in ratios.items()
    }
    return {
        "matrix": matrix, "family": "stencil2d", "problem": "spmv", "dtype": "float32", "shape": [4, 4],
        "nnz": 4, "pattern": "0", "trials": 9, "seconds": {"measure": 10.0}, "break_even_scipy": 100,
        "against": against_rows | {"librsb": {"error": "it has no SpMV"}},
    }  # fmt: skip


def test_claims_are_against_the_best_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    samples: dict[str, Any] = {}
    monkeypatch.setattr(against, "write_samples", lambda name, content: samples.update(content) or name)
    record = {
        "environment": {"device": {"name": "a CPU"}},
        "settings": {"threads": 2, "budget_s": 10.0},
        "rows": [make_row("stencil5-8", mkl=2.0, scipy=4.0), make_row("mesh", mkl=8.0, scipy=0.5)],
    }
    claims = {claim.id.removeprefix("tuning/3-spmv-"): claim for claim in against.make_claims(record)}
    assert {name: claim.value for name, claim in claims.items()} == {
        "mkl": 4.0, "scipy": 1.41, "best": 1.0, "floor": 0.5, "five-points": 2.0, "break-even": "never",
    }  # fmt: skip
    assert claims["floor"].details["best_mkl"] == claims["floor"].details["slower_cases"] == 1
    assert samples["rows"][0][-1] == {
        "mkl": [2.0, 2.0, 0.0, "csr"], "scipy": [4.0, 2.0, 0.0, "csr"], "librsb": "it has no SpMV",
    }  # fmt: skip
    record["rows"] = record["rows"][:1]
    claims = {claim.id: claim for claim in against.make_claims(record)}
    assert claims["tuning/3-spmv-break-even"].value == 10_000
