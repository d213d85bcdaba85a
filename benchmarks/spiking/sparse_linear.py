"""A linear layer that skips zero chunks of its input (Triton), and its plain-torch reference.

One program owns a tile of the output. It loads a chunk [ROWS, FEATURES] of the input and loads and multiplies
the weight's chunk only if the input chunk has a non-zero. SparseFlow does not replace linear layers;
`not_replaced.py` measures this kernel against cuBLAS.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from sparseflow.errors import DeviceError, InputError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ROWS, COLUMNS, FEATURES = 16, 64, 32
"""Sizes of a tile [ROWS, COLUMNS] of the output and of a chunk [ROWS, FEATURES] of the input."""


@triton.jit
def linear_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, M, N, K, xm, xk, wn, wk, columns,
    TM: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    m = (pid // columns) * TM + tl.arange(0, TM)
    n = (pid % columns) * TN + tl.arange(0, TN)
    kk = tl.arange(0, TK)
    x_at = x_ptr + (m.to(tl.int64) * xm)[:, None] + (kk * xk)[None, :]
    w_at = w_ptr + (n.to(tl.int64) * wn)[None, :] + (kk * wk)[:, None]
    acc = tl.zeros([TM, TN], tl.float32)
    for k in range(0, K, TK):
        x = tl.load(x_at + k * xk, mask=(m < M)[:, None] & (k + kk < K)[None, :], other=0.0)
        if tl.max(tl.max((x != 0).to(tl.int32), axis=1), axis=0) > 0:
            w = tl.load(w_at + k * wk, mask=(n < N)[None, :] & (k + kk < K)[:, None], other=0.0)
            acc = tl.dot(x, w, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    y_at = y_ptr + (m.to(tl.int64) * N)[:, None] + n[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def sparse_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, allow_tf32: bool = False
) -> torch.Tensor:
    """`F.linear` that skips zero chunks of `x`: one kernel launch, no host synchronisation.

    Args:
        x: [M, K], fp16, bf16 or fp32, any strides, any values.
        weight: [N, K] in x's dtype.
        bias: [N] or None.
        allow_tf32: Round fp32 operands to TF32 for the tensor cores.

    Returns:
        [M, N] in x's dtype; fp32 is accurate to fp32 unless `allow_tf32`.

    Raises:
        InputError: Shapes or dtypes do not fit.
        DeviceError: `x` is not on a GPU (Triton's interpreter takes CPU tensors).
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise InputError(
            f"an input of shape {tuple(x.shape)} and a weight of shape {tuple(weight.shape)} must be [M, K] "
            "and [N, K]"
        )
    if x.dtype not in DTYPES or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        raise InputError(
            f"input ({x.dtype}), weight ({weight.dtype}) and bias must share one dtype among "
            f"{', '.join(map(str, DTYPES))}"
        )
    if not x.is_cuda and isinstance(linear_kernel, triton.runtime.JITFunction):
        raise DeviceError(f"the Triton kernels need a CUDA device, and the input is on {x.device}")
    m, k = x.shape
    n = weight.shape[0]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    columns = triton.cdiv(n, COLUMNS)
    kernel: Any = linear_kernel  # its launch arguments are not in its signature
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        kernel[(triton.cdiv(m, ROWS) * columns,)](
            x, weight, y if bias is None else bias, y, m, n, k, *x.stride(), *weight.stride(), columns,
            TM=ROWS, TN=COLUMNS, TK=FEATURES, BIAS=bias is not None,
            PRECISION="tf32" if allow_tf32 and x.dtype == torch.float32 else "ieee", num_warps=4,
        )  # fmt: skip
    return y


def run_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """`x` [M, K] times `weight` [N, K] transposed, plus `bias` [N]: [M, N], all in `dtype`."""
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
