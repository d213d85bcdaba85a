"""Triton kernels for the entropies of temporal windows and spatial cells.

The distributions are never written to memory. A program of the window kernel handles one patch: the
distributions of all its frames stay in registers, and each window is a weighted sum of them. A program of the
cell kernel handles one cell of one frame and loops over its patches. The window kernel reads x once, the cell
kernel once for each level; both write one number for each window or cell.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.pruning.selectors.entropy.reference import TINY

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

MAX_TILE_SIZE = 32768
"""Maximum elements of a tile [frames, channels], each rounded up to a power of two, held in registers."""

PATCH_BLOCK = 4
"""Patches that a program of the cell kernel loads at once."""


@triton.jit
def window_kernel(
    x_ptr, windows_ptr, kept_ptr, scale_ptr, out_ptr, T, N, C, W, xb, xt, xn,
    BT: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr, DIVERGENCE: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    b, n = (pid // N).to(tl.int64), pid % N
    scale = tl.load(scale_ptr + b)
    t, c = tl.arange(0, BT), tl.arange(0, BC)
    x_ptrs = x_ptr + b * xb + (t * xt)[:, None] + n * xn + c[None, :]
    x = tl.load(x_ptrs, mask=(t < T)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32) * scale
    x = tl.where((c < C)[None, :], x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    p = e / tl.sum(e, axis=1)[:, None]
    weight = (t < T).to(tl.float32)
    if MASKED:
        weight *= tl.load(kept_ptr + (b * T + t) * N + n, mask=t < T, other=0).to(tl.float32)
    token_entropy = weight
    if DIVERGENCE:
        token_entropy = -tl.sum(p * tl.log(p + TINY), axis=1) * weight
    for w in range(0, W):
        member = tl.load(windows_ptr + w * T + t, mask=t < T, other=0.0)
        count = tl.maximum(tl.sum(member * weight, axis=0), 1.0)
        q = tl.sum(p * (member * weight)[:, None], axis=0) / count
        h = -tl.sum(q * tl.log(q + TINY), axis=0)
        if DIVERGENCE:
            h -= tl.sum(member * token_entropy, axis=0) / count
        tl.store(out_ptr + (b * W + w) * N + n, h)


@triton.jit
def cell_kernel(
    x_ptr, starts_ptr, patches_ptr, kept_ptr, scale_ptr, out_ptr, T, N, C, K, xb, xt, xn,
    BP: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr, DIVERGENCE: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    frame, k = tl.program_id(0), tl.program_id(1)
    b, t = (frame // T).to(tl.int64), frame % T
    scale = tl.load(scale_ptr + b)
    i, c = tl.arange(0, BP), tl.arange(0, BC)
    start, end = tl.load(starts_ptr + k), tl.load(starts_ptr + k + 1)
    total = tl.zeros([BC], tl.float32)
    count = tl.zeros([BP], tl.float32)
    token_entropy = tl.zeros([BP], tl.float32)
    for first in range(start, end, BP):
        inside = first + i < end
        n = tl.load(patches_ptr + first + i, mask=inside, other=0)
        x_ptrs = x_ptr + b * xb + t * xt + (n * xn)[:, None] + c[None, :]
        x = tl.load(x_ptrs, mask=inside[:, None] & (c < C)[None, :], other=0.0).to(tl.float32) * scale
        x = tl.where((c < C)[None, :], x, float("-inf"))
        e = tl.exp(x - tl.max(x, axis=1)[:, None])
        p = e / tl.sum(e, axis=1)[:, None]
        weight = inside.to(tl.float32)
        if MASKED:
            weight *= tl.load(kept_ptr + frame * N + n, mask=inside, other=0).to(tl.float32)
        total += tl.sum(p * weight[:, None], axis=0)
        count += weight
        if DIVERGENCE:
            token_entropy -= tl.sum(p * tl.log(p + TINY), axis=1) * weight
    area = tl.maximum(tl.sum(count, axis=0), 1.0)
    q = total / area
    h = -tl.sum(q * tl.log(q + TINY), axis=0)
    if DIVERGENCE:
        h -= tl.sum(token_entropy, axis=0) / area
    tl.store(out_ptr + frame * K + k, h)


def supports_input(x: Tensor) -> bool:
    """Whether the kernels support the dtype and layout of features and all frames of a patch fit."""
    return (
        x.dtype in DTYPES
        and _next_power_of_two(x.shape[1]) * _next_power_of_two(x.shape[3]) <= MAX_TILE_SIZE
        and x.stride(3) == 1
    )


def _next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


@torch.library.custom_op("sparseflow::entropies", mutates_args=())
def compute_entropies(
    x: Tensor,
    windows: Tensor,
    starts: Tensor,
    patches: Tensor,
    retained: Tensor | None,
    scale: Tensor,
    divergence: bool,
) -> tuple[Tensor, Tensor]:
    """Compute the entropy of each window and of each cell, see the reference. Not differentiable.

    Args:
        x: Features, [B, T, N, C], float16, bfloat16 or float32, contiguous in C; see `supports_input`.
        windows: Membership of frames in windows (1 or 0), float32, [W, T].
        starts: Offset of each cell in `patches`, and the end of the last one, int32, [K + 1].
        patches: Patches of all cells, cell by cell, int32.
        retained: Tokens to include, bool, [B, T, N]; None includes all.
        scale: Factor of the features of each sample before the softmax, float32, [B].
        divergence: Subtract the mean entropy of the tokens of a group.

    Returns:
        float32, [B, W, N] and [B, T, K].
    """
    b, t, n, c = x.shape
    window_entropy = x.new_empty(b, len(windows), n, dtype=torch.float32)
    cell_entropy = x.new_empty(b, t, len(starts) - 1, dtype=torch.float32)
    mask = x if retained is None else retained.contiguous()
    constants = {
        "BC": _next_power_of_two(c),
        "MASKED": retained is not None,
        "DIVERGENCE": divergence,
        "TINY": TINY,
        "num_warps": 4,
    }
    strides = x.stride()[:3]
    launch_windows: Any = window_kernel
    launch_cells: Any = cell_kernel
    with torch.cuda.device_of(x):
        if window_entropy.numel():
            launch_windows[(b * n,)](
                x, windows, mask, scale, window_entropy, t, n, c, len(windows), *strides,
                BT=_next_power_of_two(t), **constants,
            )  # fmt: skip
        if cell_entropy.numel():
            launch_cells[(b * t, cell_entropy.shape[2])](
                x, starts, patches, mask, scale, cell_entropy, t, n, c, cell_entropy.shape[2], *strides,
                BP=PATCH_BLOCK, **constants,
            )  # fmt: skip
    return window_entropy, cell_entropy


@compute_entropies.register_fake
def _(x, windows, starts, patches, retained, scale, divergence):
    b, t, n, _ = x.shape
    wide = {"dtype": torch.float32}
    return x.new_empty(b, len(windows), n, **wide), x.new_empty(b, t, len(starts) - 1, **wide)
