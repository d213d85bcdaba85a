"""BatchNorm2d in eval mode that shortcuts blocks of zeros (Triton), and its plain-torch reference.

SparseFlow does not replace BatchNorm: it moves the same bytes with or without zeros, and is folded into the
convolution in front of it instead. `not_replaced.py` measures this kernel against ATen's.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from sparseflow.errors import DeviceError, InputError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BLOCK = 1024
"""Values that one program normalises."""


@triton.jit
def batchnorm_kernel(
    x_ptr, y_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, total, eps,
    INNER: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Memory is flat; the channel of place i is (i // INNER) % CHANNELS."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    inside = index < total
    # one 64-bit division a program; those of every value are 32 bits wide and by constants
    channel = ((start % (INNER * CHANNELS)).to(tl.int32) + tl.arange(0, BLOCK)) // INNER % CHANNELS
    x = tl.load(x_ptr + index, mask=inside, other=0.0)
    mean = tl.load(mean_ptr + channel).to(tl.float32)
    scale = tl.load(weight_ptr + channel).to(tl.float32) / tl.sqrt(
        tl.load(var_ptr + channel).to(tl.float32) + eps
    )
    bias = tl.load(bias_ptr + channel).to(tl.float32)
    y = bias - mean * scale
    if tl.max((x != 0).to(tl.int32), axis=0) > 0:
        # from the difference, as ATen does: a mean much larger than the deviation must not cancel
        y = (x.to(tl.float32) - mean) * scale + bias
    tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=inside)


def sparse_batchnorm2d(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`F.batch_norm` in eval mode: one kernel launch, no host synchronisation.

    Args:
        x: [N, C, H, W], fp16, bf16 or fp32, contiguous or channels-last.
        mean, var, weight, bias: [C], floating point, contiguous.
        eps: Added to the variance.

    Returns:
        Like `x`, in its dtype and memory format.

    Raises:
        InputError: Shapes, dtypes or strides are not covered.
        DeviceError: `x` is not on a GPU (Triton's interpreter takes CPU tensors).
    """
    if x.dim() != 4 or any(t.shape != (x.shape[1],) for t in (mean, var, weight, bias)):
        raise InputError(f"an input [N, C, H, W] and four tensors [C] are expected, not {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise InputError(f"the input's dtype (={x.dtype}) must be one of {', '.join(map(str, DTYPES))}")
    if x.is_contiguous():
        inner = x.shape[2] * x.shape[3]
    elif x.is_contiguous(memory_format=torch.channels_last):
        inner = 1
    else:
        raise InputError(f"the input must be contiguous or channels-last, not of strides {x.stride()}")
    if not x.is_cuda and isinstance(batchnorm_kernel, triton.runtime.JITFunction):
        raise DeviceError(f"the Triton kernels need a CUDA device, and the input is on {x.device}")
    y = torch.empty_like(x)
    kernel: Any = batchnorm_kernel  # its launch arguments are not in its signature
    if y.numel() == 0:
        return y
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, y, mean, var, weight, bias, x.numel(), eps, INNER=inner, CHANNELS=x.shape[1], BLOCK=BLOCK,
            num_warps=4,
        )  # fmt: skip
    return y


def run_batchnorm2d_reference(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` in `dtype`; x [N, C, H, W], the others [C]."""
    mean, var, weight, bias = (t.to(dtype).view(-1, 1, 1) for t in (mean, var, weight, bias))
    return (x.to(dtype) - mean) / (var + eps).sqrt() * weight + bias
