"""Kernels as operators of torch: gradients, transformations and compilation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from sparseflow.errors import InputError, RunError
from sparseflow.tuning.codegen.kernel import CompiledKernel, Kernel, LibraryKernel, get_kernel
from sparseflow.tuning.codegen.program import build_program
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem

ROWS, COLS = 8, 6
MATRIX = sp.random_array((ROWS, COLS), density=0.3, rng=np.random.default_rng(0), format="csr")
DENSE = torch.from_numpy(MATRIX.toarray())

Make = Callable[..., Kernel]

# Transformations and the compiler of torch use it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


@pytest.fixture
def make(cache: Path) -> Make:
    """Create a float64 kernel of a preset, or of the library."""

    def create(name: str, n_cols: int | None = None, preset: str | None = None) -> Kernel:
        problem = SparseProblem(operator=OPERATORS[name], matrix=as_coo(MATRIX), n_cols=n_cols)
        if preset == "library":
            return LibraryKernel(problem)
        presets = build_presets(problem.operator, problem.extents, 2)
        schedule = presets[preset or next(iter(presets))]
        return CompiledKernel(build_program(problem, schedule), cache_dir=cache)

    return create


def sample(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


VALUES = sample(MATRIX.nnz)


def check_gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize(
    ("preset", "shape"),
    [("csr", ()), ("csr", (3,)), ("csr", (4,)), ("bcsr4x1", (3,)), ("bcsr4x1", (4,)), ("library", (3,))],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_products(preset: str, transposed: bool, shape: tuple[int, ...], make: Make) -> None:
    kernel = make("spmm", 3, preset)

    def multiply(values: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        other = kernel.with_values(values)
        return (other.T if transposed else other)(dense)

    dense = sample(ROWS if transposed else COLS, *shape)
    check_gradients(kernel.T if transposed else kernel, dense)
    check_gradients(multiply, VALUES, dense)


@pytest.mark.parametrize("batch", [(2,), (2, 2)])
def test_gradients_of_batches(batch: tuple[int, ...], make: Make) -> None:
    kernel = make("spmm", 3)
    check_gradients(lambda values, dense: kernel.with_values(values)(dense), VALUES, sample(*batch, COLS, 3))


def test_gradients_of_vectors(make: Make) -> None:
    kernel = make("spmv")
    check_gradients(lambda values, x: kernel.with_values(values)(x), VALUES, sample(COLS))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_sampled_products(transposed: bool, make: Make) -> None:
    kernel = make("sddmm", 3)

    def multiply(values: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        other = kernel.with_values(values)
        return other.T(y, x).to_dense() if transposed else other(x, y).to_dense()

    x, y = sample(ROWS, 3), sample(COLS, 3)
    assert torch.autograd.gradcheck(multiply, (VALUES, x, y))
    with torch.no_grad():
        expected = torch.zeros(ROWS, COLS, dtype=torch.float64)
        expected[DENSE != 0] = VALUES
        expected *= x @ y.T
        torch.testing.assert_close(multiply(VALUES, x, y), expected.T if transposed else expected)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_gradients_of_bias_and_activation(reduce: Any, make: Make) -> None:
    kernel = make("spmm", 3, "bcsr4x1")

    def apply_layer(values: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return kernel.with_values(values)(dense, reduce=reduce, bias=bias, activation="relu")

    values, dense, bias = VALUES, sample(2, COLS, 4), sample(4)
    check_gradients(apply_layer, values, dense, bias)
    expected = torch.relu(kernel.with_values(values)(dense, reduce=reduce) + bias)
    torch.testing.assert_close(apply_layer(values, dense, bias), expected)


def test_complex_gradients(make: Make) -> None:
    dense = torch.complex(sample(COLS, 2), sample(COLS, 2)).detach().requires_grad_()
    assert torch.autograd.gradcheck(make("spmm", 2), (dense,))


def test_gradient_reaches_the_layers_below(make: Make) -> None:
    kernel, layer = make("spmm", 4), torch.nn.Linear(5, 4, dtype=torch.float64)
    inputs = sample(COLS, 5).detach()
    kernel(layer(inputs)).square().sum().backward()
    actual = layer.weight.grad
    layer.zero_grad()
    (DENSE @ layer(inputs)).square().sum().backward()
    torch.testing.assert_close(actual, layer.weight.grad)


def test_gradient_after_the_kernel_is_deleted(make: Make) -> None:
    dense = sample(COLS, 3)
    result = make("spmm", 3)(dense)
    result.sum().backward()
    torch.testing.assert_close(dense.grad, (DENSE.T @ torch.ones(ROWS, 3, dtype=torch.float64)))


def test_transformations_of_torch_func(make: Make) -> None:
    kernel, dense, values = make("spmm", 3), sample(COLS, 3).detach(), VALUES.detach()

    def compute_loss(dense: torch.Tensor) -> torch.Tensor:
        return kernel(dense).square().sum()

    torch.testing.assert_close(torch.func.grad(compute_loss)(dense), 2 * DENSE.T @ (DENSE @ dense))
    batch = torch.stack([dense, 2 * dense], dim=1)
    torch.testing.assert_close(torch.func.vmap(kernel, in_dims=1)(batch), DENSE @ batch.movedim(1, 0))
    tangent = torch.func.jvp(kernel, (dense,), (3 * dense,))[1]
    torch.testing.assert_close(tangent, 3 * DENSE @ dense)
    rows = torch.func.vmap(torch.func.grad(compute_loss))(torch.stack([dense, 2 * dense]))
    torch.testing.assert_close(rows[1], 4 * DENSE.T @ (DENSE @ dense))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(values, 2 * values)
        result = torch.autograd.forward_ad.unpack_dual(kernel.with_values(dual)(dense))
        torch.testing.assert_close(result.tangent, 2 * result.primal)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_values_that_change_in_place(make: Make) -> None:
    values, dense = VALUES.detach().clone(), sample(COLS, 3).detach()
    kernel = make("spmm", 3).with_values(values)
    sampled = make("sddmm", 3).with_values(values)
    expected, x = kernel(dense), sample(ROWS, 3).detach()
    samples = sampled(x, dense).to_dense()
    values *= 2
    torch.testing.assert_close(kernel(dense), 2 * expected)
    np.testing.assert_allclose(kernel(dense.numpy()), 2 * expected)
    np.testing.assert_allclose(kernel(1j * dense.numpy()), 2j * expected)
    np.testing.assert_allclose(sampled(x.numpy(), dense.numpy()).toarray(), 2 * samples)
    np.testing.assert_allclose(sampled.T(dense.numpy(), x.numpy()).toarray(), 2 * samples.T)
    torch.testing.assert_close(kernel.T(expected), 2 * make("spmm", 3).with_values(VALUES).T(expected))


def test_inference_mode_and_autocast(make: Make) -> None:
    kernel, dense = make("spmm", 3), sample(COLS, 3).detach()
    with torch.inference_mode():
        torch.testing.assert_close(kernel(dense), DENSE @ dense)
    with torch.autocast("cpu", torch.bfloat16):
        layer = torch.nn.Linear(3, 3)
        assert kernel(layer(dense.float())).dtype == torch.float64


@pytest.mark.slow
def test_compiled_without_graph_breaks(make: Make) -> None:
    kernel, dense = make("spmm", 3), sample(COLS, 3)
    compiled = torch.compile(lambda value: kernel(value) * 2, fullgraph=True)
    result = compiled(dense)
    torch.testing.assert_close(result, 2 * (DENSE @ dense))
    result.sum().backward()
    torch.testing.assert_close(dense.grad, 2 * DENSE.T @ torch.ones(ROWS, 3, dtype=torch.float64))


def test_operators_pass_the_checks_of_torch(make: Make) -> None:
    kernel = make("spmm", 3)
    checks: Any = torch.library.opcheck
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    checks(torch.ops.sparseflow.spmm, (sample(COLS, 3), VALUES, kernel._number), test_utils=tests)
    checks(torch.ops.sparseflow.sddmm, (sample(ROWS, 3), sample(COLS, 3), kernel._number), test_utils=tests)


def test_kernels_of_one_step_are_freed_without_the_collector(make: Make) -> None:
    template, dense = make("spmm", 3), sample(COLS, 3)
    gc.collect()
    gc.disable()
    try:
        kernel = template.with_values(VALUES)
        kernel(dense).square().sum().backward()
        assert len(kernel.explain().splitlines()) == 1, "the transposed kernel was used once"
        transposed, reference = kernel.T, weakref.ref(kernel)
        del kernel
        torch.testing.assert_close(transposed.T(dense), template.with_values(VALUES)(dense))
        del transposed
        assert reference() is None
    finally:
        gc.enable()


def test_sampled_products_without_gradients_use_the_tuned_kernel(make: Make) -> None:
    kernel = make("sddmm", 3)
    kernel(sample(ROWS, 3).detach(), sample(COLS, 3).detach())
    assert len(kernel.explain().splitlines()) == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_wrong_shapes_of_sampled_products_raise(recorded: bool, make: Make) -> None:
    kernel, x, y = make("sddmm", 3), sample(ROWS, 3), sample(COLS, 3)
    with torch.set_grad_enabled(recorded):
        for arguments, name in (((x, y[:-1]), "Y"), ((x[:-1], y), "X"), ((x, y[:, :-1]), "Y")):
            with pytest.raises(InputError, match=f"`{name}` has shape"):
                kernel(*arguments)
        with pytest.raises(InputError, match="`X` has shape"):
            kernel.T(x, y)


def test_kinds_of_tensors_give_the_same_product(make: Make) -> None:
    kernel, dense = make("spmm", 3), sample(COLS, 3).detach()
    negated = torch.complex(dense, -dense).conj().imag
    views = (torch.nn.Parameter(dense), dense.T.contiguous().T, negated, dense.expand(1, COLS, 3)[0])
    for view in views:
        torch.testing.assert_close(kernel(view), DENSE @ dense)
        recorded = view.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(kernel(recorded).sum(), recorded)
        torch.testing.assert_close(gradient, DENSE.T @ torch.ones(ROWS, 3, dtype=torch.float64))
    first, second = kernel(dense), kernel(2 * dense)
    torch.testing.assert_close(2 * first, second)


def test_wrong_tensors_raise(make: Make) -> None:
    kernel = make("spmm", 3)
    for tensor in (torch.ones(COLS, 3).to_sparse(), torch.ones(COLS, 3, device="meta")):
        with pytest.raises(InputError, match="`B` is"):
            kernel(tensor)
    with pytest.raises(InputError, match=r"`B` has shape \(8, 3\)"):
        kernel(torch.ones(8, 3))
    with pytest.raises(RunError, match="was deleted"):
        get_kernel(-1)
