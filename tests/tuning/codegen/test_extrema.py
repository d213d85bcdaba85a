"""Reductions of SpMM other than sums: values, gradients, and rows without elements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparseflow.errors import InputError
from sparseflow.tuning.codegen.extrema import find_extrema
from sparseflow.tuning.codegen.kernel import REDUCTIONS, CompiledKernel, Kernel, LibraryKernel, Reduction
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem

ROWS, COLS = 12, 9
MATRIX = sp.random_array(
    (ROWS, COLS),
    density=0.3,
    rng=np.random.default_rng(0),
    format="csr",
    data_sampler=np.random.default_rng(1).normal,
)  # row 11 is empty
TORCH_REDUCTIONS = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}

Make = Callable[..., Kernel]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


@pytest.fixture
def make(cache: Path) -> Make:
    """Create a float64 kernel with blocks, or of the library."""

    def create(name: str = "spmm", n_cols: int | None = 3, library: bool = False) -> Kernel:
        problem = SparseProblem(operator=OPERATORS[name], matrix=as_coo(MATRIX), n_cols=n_cols)
        if library:
            return LibraryKernel(problem)
        presets = build_presets(problem.operator, problem.extents, 2)
        schedule = presets.get("bcsr4x1", presets["csr"])
        return CompiledKernel(build_program(problem, schedule), cache_dir=cache)

    return create


def sample(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


VALUES = sample(MATRIX.nnz)


def compute_expected(dense: torch.Tensor, reduce: Reduction, *, transposed: bool = False) -> torch.Tensor:
    matrix = torch.from_numpy((MATRIX.T if transposed else MATRIX).toarray()).to(dense.dtype).to_sparse_csr()
    return torch.sparse.mm(matrix, dense.detach().contiguous(), TORCH_REDUCTIONS[reduce])


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n_cols", [1, 3, 16, 33, 64, 70, 200])
def test_reductions_match_torch(reduce: Reduction, dtype: torch.dtype, n_cols: int, make: Make) -> None:
    kernel, dense = make(n_cols=n_cols), sample(COLS, n_cols).detach().to(dtype)
    expected = compute_expected(dense.double(), reduce)
    torch.testing.assert_close(kernel(dense, reduce=reduce), expected)
    np.testing.assert_allclose(kernel(dense.numpy(), reduce=reduce), expected, rtol=1e-12)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("library", [False, True])
def test_reductions_of_vectors_batches_and_transposes(reduce: Reduction, library: bool, make: Make) -> None:
    kernel, dense = make(library=library), sample(2, 4, COLS, 5).detach()
    expected = torch.stack([compute_expected(part, reduce) for part in dense.flatten(0, 1)]).unflatten(
        0, (2, 4)
    )
    torch.testing.assert_close(kernel(dense, reduce=reduce), expected)
    np.testing.assert_allclose(kernel(dense.numpy(), reduce=reduce), expected, atol=1e-12)
    torch.testing.assert_close(kernel(dense[0, 0, :, 0], reduce=reduce), expected[0, 0, :, 0])
    np.testing.assert_allclose(
        kernel(dense[0, 0, :, 0].numpy(), reduce=reduce), expected[0, 0, :, 0], atol=1e-12
    )
    other = sample(ROWS, 3).detach()
    torch.testing.assert_close(
        kernel.T(other, reduce=reduce), compute_expected(other, reduce, transposed=True)
    )
    batched = torch.func.vmap(lambda part: kernel(part, reduce=reduce))(dense[0])
    torch.testing.assert_close(batched, expected[0])


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_reductions(reduce: Reduction, transposed: bool, make: Make) -> None:
    kernel = make()

    def multiply(values: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        other = kernel.with_values(values)
        return (other.T if transposed else other)(dense, reduce=reduce)

    dense = sample(ROWS if transposed else COLS, 2)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(multiply, (VALUES, dense))
        assert check(lambda dense: (kernel.T if transposed else kernel)(dense, reduce=reduce), (dense,))


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_reductions_with_values_that_change_in_place(reduce: Reduction, make: Make) -> None:
    values, dense = torch.from_numpy(MATRIX.data.copy()), sample(COLS, 3).detach()
    kernel, expected = make().with_values(values), compute_expected(dense, reduce)
    torch.testing.assert_close(kernel(dense, reduce=reduce), expected)
    values *= 2
    torch.testing.assert_close(kernel(dense, reduce=reduce), 2 * expected)
    np.testing.assert_allclose(kernel(dense.numpy(), reduce=reduce), 2 * expected)
    torch.testing.assert_close(
        kernel.T(sample(ROWS, 3).detach(), reduce=reduce),
        2 * compute_expected(sample(ROWS, 3), reduce, transposed=True),
    )


def test_gradient_of_equal_elements_goes_to_the_first() -> None:
    ones = np.ones(3)
    result, elements = find_extrema(np.array([0, 3, 3]), np.arange(3), ones, np.ones((3, 2)), "max")
    np.testing.assert_array_equal(result, [[1, 1], [0, 0]])
    np.testing.assert_array_equal(elements, [[0, 0], [-1, -1]])


def test_nan_and_infinity_are_extrema(make: Make) -> None:
    dense = torch.ones(COLS, 3, dtype=torch.float64)
    dense[4, 0], dense[4, 1] = np.nan, -np.inf
    for reduce in ("max", "min"):
        torch.testing.assert_close(
            make()(dense, reduce=reduce), compute_expected(dense, reduce), equal_nan=True
        )


def test_mean_with_other_options_and_dtypes(make: Make) -> None:
    kernel, dense = make(), sample(COLS, 2).detach()
    expected = compute_expected(dense, "mean")
    out = torch.ones(ROWS, 2, dtype=torch.float64)
    torch.testing.assert_close(kernel(dense, reduce="mean", out=out, alpha=3.0, beta=2.0), 3 * expected + 2)
    torch.testing.assert_close(kernel(1j * dense, reduce="mean"), 1j * expected)
    assert "mean" in kernel.explain()


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["max", "min"])
def test_extrema_compile_without_graph_breaks(reduce: Reduction, make: Make) -> None:
    kernel, dense = make(), sample(COLS, 3)
    result = torch.compile(lambda value: kernel(value, reduce=reduce) * 2, fullgraph=True)(dense)
    torch.testing.assert_close(result, 2 * compute_expected(dense, reduce))
    (gradient,) = torch.autograd.grad(result.sum(), dense)
    (expected,) = torch.autograd.grad(2 * kernel(dense, reduce=reduce).sum(), dense)
    torch.testing.assert_close(gradient, expected)


def test_operator_passes_the_checks_of_torch(make: Make) -> None:
    kernel, check = make(), torch.library.opcheck
    arguments: Any = (sample(COLS, 3), VALUES, "max", kernel._number)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    check(torch.ops.sparseflow.spmm_extrema, arguments, test_utils=tests)


def test_wrong_reductions_raise(make: Make) -> None:
    dense: Any = sample(COLS, 3).detach()
    with pytest.raises(InputError, match=r"'prod'.*sum, mean, max, min"):
        make()(dense, reduce="prod")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"'mean'.*sddmm"):
        make("sddmm")(sample(ROWS, 3), dense, reduce="mean")
    for value in (1j * dense, 1j * dense.numpy()):
        with pytest.raises(InputError, match="complex"):
            make()(value, reduce="max")
    for value in (dense[:-1], dense[:-1].numpy()):
        with pytest.raises(InputError, match="`B` has shape"):
            make()(value, reduce="max")
