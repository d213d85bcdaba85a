"""Kernels as operators of torch, with gradients: `sparseflow::spmm` and `sparseflow::sddmm`.

For C = A B, the gradient of B is Aᵀ times that of C, and the gradient of the values of A are products of rows
of C's gradient and of B at the elements of A, which is SDDMM. The gradients of SDDMM are two SpMM. So
gradients have gradients, too. Values of A are in the order of the matrix that was tuned, for kernels of its
transpose, too.
"""

# torch declares the methods of autograd functions with `*args`.
# pyright: reportIncompatibleMethodOverride=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from sparseflow.errors import InputError
from sparseflow.tuning.codegen.extrema import Extremum
from sparseflow.tuning.codegen.kernel import CompiledKernel, Kernel, Reduction, get_kernel

_DTYPES = {"float32": torch.float32, "float64": torch.float64}

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def multiply_directly(kernel: Kernel, dense: Tensor) -> Tensor | None:
    """Multiply by a kernel's own values if a tensor needs no conversion; None if it does.

    Small products take microseconds, so this path has few checks.
    """
    if torch.compiler.is_compiling() or _is_transformed() or not _is_plain(kernel, dense):
        return None
    return _multiply(dense, None, kernel)


def call_kernel(kernel: Kernel, inputs: list[Any], reduce: Reduction = "sum") -> Tensor:
    """Run a kernel on tensors; see `Kernel.__call__`."""
    tensors = [
        _check_tensor(kernel, name, value)
        for name, value in zip(kernel.problem.input_shapes, inputs, strict=True)
    ]
    dtype = kernel.torch_dtype
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    if dtype.is_complex:
        if kernel.problem.operator.sparse_output:
            raise InputError("sddmm does not take complex numbers")
        if reduce in ("max", "min"):
            raise InputError(f"`reduce` (={reduce!r}) needs an order, which complex numbers do not have")
        return _multiply_complex(kernel, tensors[0].to(dtype))
    tensors = [tensor.to(dtype) for tensor in tensors]
    if reduce in ("max", "min"):
        return _reduce_rows(kernel, tensors[0], reduce)
    values, is_sampled = kernel._value_tensor, kernel.problem.operator.sparse_output
    multiply: Callable[..., Tensor] = _multiply
    sample: Callable[..., Tensor] = _Samples.apply
    if torch.compiler.is_compiling():
        multiply, sample = _multiply_by_number, _sample_by_number
    elif not _is_recorded(*tensors, *(() if values is None else (values,))):
        if is_sampled:
            return _build_sparse_output(kernel, kernel.sample_tensors(*tensors))
        multiply = _compute_product
    if not is_sampled:
        return multiply(tensors[0], values, kernel)
    kernel.check_shapes(tuple(tuple(tensor.shape) for tensor in tensors))
    base = kernel.T if kernel._key.transposed else kernel
    pair = reversed(tensors) if kernel._key.transposed else tensors
    sums = sample(*pair, base)
    factors = torch.tensor(base.problem.matrix.values, device=sums.device) if values is None else values
    products = sums * factors.to(dtype)
    if kernel._key.transposed:
        products = products[kernel.transposition_tensor]
    return _build_sparse_output(kernel, products)


def _is_recorded(*tensors: Tensor) -> bool:
    """Return whether torch records or transforms operations on some tensors."""
    if _is_transformed():
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_transformed() -> bool:
    """Return whether `torch.func` or forward mode transforms operations."""
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _is_plain(kernel: Kernel, dense: Tensor) -> bool:
    """Return whether a kernel can read a tensor in place."""
    return (
        type(dense) in _PLAIN_TYPES
        and dense.dtype is _DTYPES[kernel._key.dtype]
        and dense.shape == kernel._input_shape
        and dense.is_cpu
        and dense.layout is torch.strided
        and dense.is_contiguous()
        and not dense.is_neg()
    )


def _check_tensor(kernel: Kernel, name: str, value: Any) -> Tensor:
    tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.ascontiguousarray(value))
    kernel.check_tensor(name, tensor)
    return tensor


def _multiply_complex(kernel: Kernel, dense: Tensor) -> Tensor:
    """Multiply real and imaginary parts as neighboring columns."""
    columns = torch.view_as_real(dense.unsqueeze(-1) if dense.dim() == 1 else dense).flatten(-2)
    product = call_kernel(kernel, [columns]).unflatten(-1, (-1, 2)).contiguous()
    result = torch.view_as_complex(product)
    return result[:, 0] if dense.dim() == 1 else result


def _reduce_rows(kernel: Kernel, dense: Tensor, reduce: Extremum) -> Tensor:
    """Compute the largest or smallest products; see `Kernel.find_extrema`."""
    kernel.check_shapes((tuple(dense.shape[-2:]),))
    columns = dense.unsqueeze(1) if dense.dim() == 1 else dense.movedim(-2, 0)
    values = kernel._value_tensor
    if values is not None:
        values = values.to(dense.dtype)
        values = values[kernel.transposition_tensor] if kernel._key.transposed else values
    if torch.compiler.is_compiling() or _is_recorded(dense, *(() if values is None else (values,))):
        result, _ = torch.ops.sparseflow.spmm_extrema(columns.flatten(1), values, reduce, kernel._number)
    else:
        result, _ = kernel.find_tensor_extrema(columns.flatten(1), values, reduce)
    result = result.unflatten(1, columns.shape[1:]).movedim(0, -2)
    return result[..., 0] if dense.dim() == 1 else result


def build_csr_tensor(indptr: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """Build a CSR tensor without checks."""
    # torch 2.11 warns about `check_invariants=False` unless the checks are switched off as a whole, too.
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_csr_tensor(indptr, indices, values, size=shape, check_invariants=False)


def _build_sparse_output(kernel: Kernel, values: Tensor) -> Tensor:
    return build_csr_tensor(*kernel.csr_tensors, values, kernel.shape)


def _multiply(dense: Tensor, values: Tensor | None, kernel: Kernel) -> Tensor:
    """Compute a product, and record it if necessary."""
    if _is_transformed():
        return _Product.apply(dense, values, kernel)
    if torch.is_grad_enabled() and (dense.requires_grad or (values is not None and values.requires_grad)):
        return _RecordedProduct.apply(dense, values, kernel)
    return _compute_product(dense, values, kernel)


def _compute_product(dense: Tensor, values: Tensor | None, kernel: Kernel) -> Tensor:
    if values is None and isinstance(kernel, CompiledKernel) and _is_plain(kernel, dense):
        return torch.from_numpy(kernel.compute_at((dense.data_ptr(),)))
    return kernel.multiply_tensor(dense, values)


def _compute_samples(x: Tensor, y: Tensor, kernel: Kernel) -> Tensor:
    return kernel.sample_products(x, y)


class _Product(torch.autograd.Function):
    """Product of a kernel's matrix and a dense tensor; values are None for the kernel's own."""

    @staticmethod
    def forward(dense: Tensor, values: Tensor | None, kernel: Kernel) -> Tensor:
        return _compute_product(dense, values, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        dense, values, ctx.kernel = inputs
        ctx.save_for_backward(dense if ctx.needs_input_grad[1] else None, values)
        ctx.save_for_forward(dense, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _differentiate_product(ctx, gradient, _multiply, _Samples.apply)

    @staticmethod
    def jvp(ctx: Any, dense_tangent: Tensor | None, values_tangent: Tensor | None, _: None) -> Tensor:
        return _compute_tangent(ctx, _Product.apply, dense_tangent, values_tangent)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], dense: Tensor, values: Tensor | None, kernel: Kernel
    ) -> Any:
        pairs = _unbind(info.batch_size, in_dims[:2], (dense, values))
        return torch.stack([_Product.apply(*pair, kernel) for pair in pairs]), 0


class _RecordedProduct(torch.autograd.Function):
    """`_Product` without transformations; their protocol takes longer than small products."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, values: Tensor | None, kernel: Kernel) -> Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(dense if ctx.needs_input_grad[1] else None, values)
        return _compute_product(dense, values, kernel)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _differentiate_product(ctx, gradient, _multiply, _Samples.apply)


class _Samples(torch.autograd.Function):
    """Products of rows of two matrices at the elements of a kernel's matrix."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, kernel: Kernel) -> Tensor:
        return _compute_samples(x, y, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, y, ctx.kernel = inputs
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _differentiate_samples(ctx, gradient, _multiply)

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor | None, y_tangent: Tensor | None, _: None) -> Tensor:
        return _compute_tangent(ctx, _Samples.apply, x_tangent, y_tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, y: Tensor, kernel: Kernel) -> Any:
        pairs = _unbind(info.batch_size, in_dims[:2], (x, y))
        return torch.stack([_Samples.apply(*pair, kernel) for pair in pairs]), 0


def _compute_tangent(
    ctx: Any, apply: Callable[..., Tensor], first_tangent: Tensor | None, second_tangent: Tensor | None
) -> Tensor:
    """Compute the tangent of a function that is linear in both of its saved tensors."""
    first, second = ctx.saved_tensors
    terms: list[Tensor] = []
    if first_tangent is not None:
        terms.append(apply(first_tangent, second, ctx.kernel))
    if second_tangent is not None:
        terms.append(apply(first, second_tangent, ctx.kernel))
    return sum(terms[1:], terms[0])


def _unbind(size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...]) -> Any:
    """Split the tensors that have a batch dimension, and repeat the others."""
    parts = [
        [tensor] * size if tensor is None or dim is None else tensor.unbind(dim)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    return list(zip(*parts, strict=True))


def _differentiate_product(ctx: Any, gradient: Tensor, multiply: Any, sample: Any) -> tuple[Any, Any, None]:
    """Return the gradients of a product, computed by `multiply` and `sample`."""
    dense, values = ctx.saved_tensors
    kernel: Kernel = ctx.kernel
    dense_gradient = values_gradient = None
    if ctx.needs_input_grad[0]:
        dense_gradient = multiply(gradient, values, kernel.T)
    if ctx.needs_input_grad[1]:
        pair = (dense, gradient) if kernel._key.transposed else (gradient, dense)
        if dense.dim() == 1:
            pair = tuple(part.unsqueeze(-1) for part in pair)
        base = kernel.T if kernel._key.transposed else kernel
        batches = [part.flatten(0, -3) if dense.dim() > 2 else part.unsqueeze(0) for part in pair]
        samples = [sample(x, y, base) for x, y in zip(*batches, strict=True)]
        values_gradient = sum(samples[1:], samples[0])
    return dense_gradient, values_gradient, None


def _differentiate_samples(ctx: Any, gradient: Tensor, multiply: Any) -> tuple[Any, Any, None]:
    """Return the gradients of sampled products, computed by `multiply`."""
    x, y = ctx.saved_tensors
    dtype = str(x.dtype).removeprefix("torch.")
    product: Kernel = ctx.kernel._get_variant(operator="spmm", n_cols=x.shape[1], dtype=dtype)
    x_gradient = multiply(y, gradient, product) if ctx.needs_input_grad[0] else None
    y_gradient = multiply(x, gradient, product.T) if ctx.needs_input_grad[1] else None
    return x_gradient, y_gradient, None


# torch.compile traces these operators, whose kernel is a number, instead of the functions above.


@torch.library.custom_op("sparseflow::spmm", mutates_args=())
def _spmm(dense: Tensor, values: Tensor | None, kernel: int) -> Tensor:
    return _compute_product(dense, values, get_kernel(kernel))


@torch.library.custom_op("sparseflow::sddmm", mutates_args=())
def _sddmm(x: Tensor, y: Tensor, kernel: int) -> Tensor:
    return _compute_samples(x, y, get_kernel(kernel))


@_spmm.register_fake
def _(dense: Tensor, values: Tensor | None, kernel: int) -> Tensor:
    rows, cols = get_kernel(kernel).shape
    size = list(dense.shape)
    axis = 0 if dense.dim() == 1 else dense.dim() - 2
    torch._check(dense.dim() > 0 and size[axis] == cols, lambda: f"expected {cols} rows, got shape {size}")
    size[axis] = rows
    return dense.new_empty(size)


@_sddmm.register_fake
def _(x: Tensor, y: Tensor, kernel: int) -> Tensor:
    return x.new_empty(get_kernel(kernel).problem.matrix.nnz)


def _setup_spmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dense, values, number = inputs
    ctx.kernel = get_kernel(number)
    ctx.save_for_backward(dense if ctx.needs_input_grad[1] else None, values)


def _setup_sddmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y, number = inputs
    ctx.kernel = get_kernel(number)
    ctx.save_for_backward(x, y)


def _multiply_by_number(dense: Tensor, values: Tensor | None, kernel: Kernel) -> Tensor:
    return torch.ops.sparseflow.spmm(dense, values, kernel._number)


def _sample_by_number(x: Tensor, y: Tensor, kernel: Kernel) -> Tensor:
    return torch.ops.sparseflow.sddmm(x, y, kernel._number)


_spmm.register_autograd(
    lambda ctx, gradient: _differentiate_product(ctx, gradient, _multiply_by_number, _sample_by_number),
    setup_context=_setup_spmm,
)
_sddmm.register_autograd(
    lambda ctx, gradient: _differentiate_samples(ctx, gradient, _multiply_by_number),
    setup_context=_setup_sddmm,
)


@torch.library.custom_op("sparseflow::spmm_extrema", mutates_args=(), device_types=("cpu", "cuda"))
def _spmm_extrema(dense: Tensor, values: Tensor | None, reduce: str, kernel: int) -> tuple[Tensor, Tensor]:
    return get_kernel(kernel).find_tensor_extrema(dense, values, "max" if reduce == "max" else "min")


@_spmm_extrema.register_fake
def _(dense: Tensor, values: Tensor | None, reduce: str, kernel: int) -> tuple[Tensor, Tensor]:
    result = dense.new_empty(get_kernel(kernel).shape[0], dense.shape[1])
    return result, torch.empty_like(result, dtype=torch.int64 if dense.itemsize == 8 else torch.int32)


@_spmm_extrema.register_vmap
def _(
    info: Any,
    in_dims: tuple[Any, ...],
    dense: Tensor,
    values: Tensor | None,
    reduce: str,
    kernel: int,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    pairs = _unbind(info.batch_size, in_dims[:2], (dense, values))
    results = [torch.ops.sparseflow.spmm_extrema(*pair, reduce, kernel) for pair in pairs]
    return (torch.stack([result for result, _ in results]), torch.stack([part for _, part in results])), (
        0,
        0,
    )


def _setup_spmm_extrema(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    dense, values, _, number = inputs
    ctx.kernel = get_kernel(number)
    ctx.save_for_backward(dense, values, output[1])


def _differentiate_extrema(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients: a result depends on one element of its row only."""
    dense, values, elements = ctx.saved_tensors
    gradient = gradient.masked_fill(elements < 0, 0)
    indptr, indices = (torch.from_numpy(part).to(dense.device) for part in ctx.kernel._csr_indices)
    elements = indptr[:-1, None] + elements.clamp(min=0).long()
    elements = elements.clamp(max=len(indices) - 1)  # of rows without elements
    columns = indices[elements].long()
    dense_gradient = values_gradient = None
    if ctx.needs_input_grad[0]:
        factors = torch.tensor(ctx.kernel.problem.matrix.values).to(dense) if values is None else values
        dense_gradient = torch.zeros_like(dense).scatter_add(0, columns, gradient * factors[elements])
    if values is not None and ctx.needs_input_grad[1]:
        products = gradient * dense.gather(0, columns)
        values_gradient = torch.zeros_like(values).index_add(0, elements.flatten(), products.flatten())
    return dense_gradient, values_gradient, None, None


_spmm_extrema.register_autograd(_differentiate_extrema, setup_context=_setup_spmm_extrema)
