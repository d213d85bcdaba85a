"""Entropies of windows in time and of cells in space, without ever writing a distribution to memory.

Two kernels. In time, a program owns a patch: all frames of it fit into registers, and every window is a
weighted sum of their distributions. In space, a program owns a frame's cell and goes through its patches.
Both read x (that in space once for each level) and write one number a part.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.pruning.selectors.entropy.reference import TINY

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

MOST = 32768
"""Numbers of a tile [frames, channels], both rounded up to powers of two, that are kept in registers."""

PATCHES = 4
"""Patches that a program looks at at a time in space."""


@triton.jit
def time_kernel(
    x_ptr, windows_ptr, there_ptr, out_ptr, T, N, C, W, xb, xt, xn, scale,
    BT: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr, DIVERGENCE: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    b, n = (pid // N).to(tl.int64), pid % N
    t, c = tl.arange(0, BT), tl.arange(0, BC)
    at = x_ptr + b * xb + (t * xt)[:, None] + n * xn + c[None, :]
    x = tl.load(at, mask=(t < T)[:, None] & (c < C)[None, :], other=0.0).to(tl.float32) * scale
    x = tl.where((c < C)[None, :], x, float("-inf"))
    e = tl.exp(x - tl.max(x, axis=1)[:, None])
    p = e / tl.sum(e, axis=1)[:, None]
    weight = (t < T).to(tl.float32)
    if MASKED:
        weight *= tl.load(there_ptr + (b * T + t) * N + n, mask=t < T, other=0).to(tl.float32)
    own = weight
    if DIVERGENCE:
        own = -tl.sum(p * tl.log(p + TINY), axis=1) * weight
    for w in range(0, W):
        member = tl.load(windows_ptr + w * T + t, mask=t < T, other=0.0)
        count = tl.maximum(tl.sum(member * weight, axis=0), 1.0)
        q = tl.sum(p * (member * weight)[:, None], axis=0) / count
        h = -tl.sum(q * tl.log(q + TINY), axis=0)
        if DIVERGENCE:
            h -= tl.sum(member * own, axis=0) / count
        tl.store(out_ptr + (b * W + w) * N + n, h)


@triton.jit
def space_kernel(
    x_ptr, starts_ptr, patches_ptr, there_ptr, out_ptr, T, N, C, K, xb, xt, xn, scale,
    BP: tl.constexpr, BC: tl.constexpr, MASKED: tl.constexpr, DIVERGENCE: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    frame, k = tl.program_id(0), tl.program_id(1)
    b, t = (frame // T).to(tl.int64), frame % T
    i, c = tl.arange(0, BP), tl.arange(0, BC)
    start, end = tl.load(starts_ptr + k), tl.load(starts_ptr + k + 1)
    total = tl.zeros([BC], tl.float32)
    count = tl.zeros([BP], tl.float32)
    own = tl.zeros([BP], tl.float32)
    for first in range(start, end, BP):
        inside = first + i < end
        n = tl.load(patches_ptr + first + i, mask=inside, other=0)
        at = x_ptr + b * xb + t * xt + (n * xn)[:, None] + c[None, :]
        x = tl.load(at, mask=inside[:, None] & (c < C)[None, :], other=0.0).to(tl.float32) * scale
        x = tl.where((c < C)[None, :], x, float("-inf"))
        e = tl.exp(x - tl.max(x, axis=1)[:, None])
        p = e / tl.sum(e, axis=1)[:, None]
        weight = inside.to(tl.float32)
        if MASKED:
            weight *= tl.load(there_ptr + frame * N + n, mask=inside, other=0).to(tl.float32)
        total += tl.sum(p * weight[:, None], axis=0)
        count += weight
        if DIVERGENCE:
            own -= tl.sum(p * tl.log(p + TINY), axis=1) * weight
    area = tl.maximum(tl.sum(count, axis=0), 1.0)
    q = total / area
    h = -tl.sum(q * tl.log(q + TINY), axis=0)
    if DIVERGENCE:
        h -= tl.sum(own, axis=0) / area
    tl.store(out_ptr + frame * K + k, h)


def fits(x: Tensor) -> bool:
    """Whether the kernels take such features: their dtype, and all frames of a patch in registers."""
    return x.dtype in DTYPES and _power(x.shape[1]) * _power(x.shape[3]) <= MOST and x.stride(3) == 1


def _power(size: int) -> int:
    """The power of two that holds so many."""
    return 1 << (size - 1).bit_length()


@torch.library.custom_op("sparseflow::entropies", mutates_args=())
def entropies(
    x: Tensor,
    windows: Tensor,
    starts: Tensor,
    patches: Tensor,
    there: Tensor | None,
    temperature: float,
    divergence: bool,
) -> tuple[Tensor, Tensor]:
    """The entropy of each window and of each cell; see the reference. Not differentiable.

    Args:
        x: Features, [B, T, N, C], fp16, bf16 or fp32, C without gaps; see `fits`.
        windows: 1 where a frame is in a window, else 0, float32, [W, T].
        starts: Where each cell's patches begin in `patches`, and the end, int32, [K + 1].
        patches: Patches of all cells, one cell after the other, int32.
        there: bool, [B, T, N]; None where all are.
        temperature: Of the softmax.
        divergence: Take the mean entropy of a part's tokens off that of their mean.

    Returns:
        float32, [B, W, N] and [B, T, K].
    """
    b, t, n, c = x.shape
    in_time = x.new_empty(b, len(windows), n, dtype=torch.float32)
    in_space = x.new_empty(b, t, len(starts) - 1, dtype=torch.float32)
    mask = x if there is None else there.contiguous()
    settings = {
        "BC": _power(c), "MASKED": there is not None, "DIVERGENCE": divergence, "TINY": TINY, "num_warps": 4,
    }  # fmt: skip
    strides = x.stride()[:3]
    over_time: Any = time_kernel
    over_space: Any = space_kernel
    with torch.cuda.device_of(x):
        if in_time.numel():
            over_time[(b * n,)](
                x, windows, mask, in_time, t, n, c, len(windows), *strides, 1.0 / temperature,
                BT=_power(t), **settings,
            )  # fmt: skip
        if in_space.numel():
            over_space[(b * t, in_space.shape[2])](
                x, starts, patches, mask, in_space, t, n, c, in_space.shape[2], *strides, 1.0 / temperature,
                BP=PATCHES, **settings,
            )  # fmt: skip
    return in_time, in_space


@entropies.register_fake
def _(x, windows, starts, patches, there, temperature, divergence):
    b, t, n, _ = x.shape
    wide = {"dtype": torch.float32}
    return x.new_empty(b, len(windows), n, **wide), x.new_empty(b, t, len(starts) - 1, **wide)
