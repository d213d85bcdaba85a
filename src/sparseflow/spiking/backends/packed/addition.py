"""Sum of feature maps and a bias, in one pass over memory."""

# Kernels are Triton's subset of Python.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.spiking.backends.packed.words import (
    ceil_div,
    check_launchable,
    check_step_size,
    launch,
    to_channels_last,
    with_time_strides,
)

_ELEMENTS = 1024
"""Elements that one program of the kernel adds."""


@triton.jit
def addition_kernel(
    maps, steps, bias_ptr, out_ptr, out_step, elements,
    C: tl.constexpr, BIAS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Add maps and a bias in fp32. Grid (tiles of B elements, time steps).

    Args:
        maps: Tensors [T or 1, N, H, W, C].
        steps: Elements from one time step of each to the next; 0 if it is constant.
        bias_ptr: fp32 [C]; read with BIAS.
        out_ptr: [T, N, H, W, C].
        out_step: Elements from one time step of the output to the next.
        elements: Elements of a time step.
    """
    index = tl.program_id(0) * B + tl.arange(0, B)
    t = tl.program_id(1).to(tl.int64)
    inside = index < elements
    total = tl.zeros([B], tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + index % C)
    for i in tl.static_range(len(maps)):
        total += tl.load(maps[i] + t * steps[i] + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + t * out_step + index, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_maps(maps: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Add feature maps and a bias; the sum is rounded once.

    Args:
        maps: Tensors [T, N, C, H, W], or [1, N, C, H, W] if constant over time; fp16, bf16 or fp32.
        bias: fp32 [C].

    Returns:
        [T, N, C, H, W] in the dtype of the first tensor, channels last.

    Raises:
        InputError: A time step has too many elements.
        DeviceError: The tensors are not on a GPU.
    """
    check_launchable(*maps)
    rows, steps = with_time_strides([to_channels_last(x) for x in maps])
    time = max(x.shape[0] for x in rows)
    out = torch.empty((time, *rows[0].shape[1:]), dtype=rows[0].dtype, device=rows[0].device)
    check_step_size(out)
    elements = out[0].numel()
    launch(
        addition_kernel, (ceil_div(elements, _ELEMENTS), time),
        rows, steps, rows[0] if bias is None else bias, out, out.stride(0), elements,
        C=out.shape[-1], BIAS=bias is not None, B=_ELEMENTS, num_warps=4,
    )  # fmt: skip
    return out.permute(0, 1, 4, 2, 3)
