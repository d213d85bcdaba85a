"""Pooling on packed spikes: the maximum is an OR of words, the mean over space a count of bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.kernels.packed.format import PackedSpikes
from sparseflow.spiking.kernels.packed.format import pack as pack_reference
from sparseflow.spiking.kernels.packed.format import unpack as unpack_reference
from sparseflow.spiking.kernels.packed.words import (
    cdiv,
    check_launchable,
    check_step_size,
    launch,
    spread_bits,
)


def max_pool_reference(spikes: PackedSpikes, kernel: int, stride: int, padding: int) -> PackedSpikes:
    """See `max_pool` (plain torch)."""
    dense = unpack_reference(spikes)
    flat = F.max_pool2d(dense.flatten(0, 1), kernel, stride, padding)
    return pack_reference(flat.unflatten(0, dense.shape[:2]))


def spatial_mean_reference(spikes: PackedSpikes, dtype: torch.dtype = torch.float32) -> Tensor:
    """See `spatial_mean` (plain torch)."""
    return unpack_reference(spikes, torch.float64).mean(dim=(-2, -1)).to(dtype)


@triton.jit
def max_pool_kernel(
    x_ptr, out_ptr, words, G: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr, IH: tl.constexpr,
    IW: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of P of the output's words, border included, over images and time steps)."""
    at = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    block = at % G
    pixel = at // G
    x = (pixel % (WO + 2)).to(tl.int32) - 1
    y = ((pixel // (WO + 2)) % (HO + 2)).to(tl.int32) - 1
    image = pixel // ((WO + 2) * (HO + 2))
    inside = (at < words) & (x >= 0) & (x < WO) & (y >= 0) & (y < HO)
    # The input's border of zeros stands in for padding.
    corner = image * ((IH + 2) * (IW + 2)) + (y * STRIDE + 1 - PADDING) * (IW + 2) + x * STRIDE + 1 - PADDING
    src = corner * G + block
    value = tl.zeros([P], tl.int64)
    for tap in tl.static_range(KERNEL * KERNEL):
        shift = ((tap // KERNEL) * (IW + 2) + tap % KERNEL) * G
        value |= tl.load(x_ptr + src + shift, mask=inside, other=0)
    tl.store(out_ptr + at, value, mask=at < words)


def max_pool(spikes: PackedSpikes, kernel: int, stride: int | None = None, padding: int = 0) -> PackedSpikes:
    """Maximum over windows, for spikes the OR of their bits.

    Args:
        spikes: [T, N, C, H, W].
        kernel: Edge of the window.
        stride: Its step; the window's edge when None.
        padding: 0 or 1, and at most half the window.

    Returns:
        Packed spikes [T, N, C, (H + 2 padding - kernel) // stride + 1, …].

    Raises:
        InputError: No window fits, or the padding is neither 0 nor 1.
        DeviceError: `spikes` are not on a GPU.
    """
    check_launchable(spikes.data)
    t, n, c, h, w = spikes.shape
    stride = stride or kernel
    if padding not in (0, 1) or 2 * padding > kernel or min(h, w) + 2 * padding < kernel:
        raise InputError(
            f"cannot pool {h}x{w} packed spikes with a window of {kernel} and a padding of {padding}: "
            "the padding must be 0 or 1 and at most half the window, and the window must fit"
        )
    ho, wo = (h + 2 * padding - kernel) // stride + 1, (w + 2 * padding - kernel) // stride + 1
    g = spikes.blocks
    data = torch.empty((t, n, ho + 2, wo + 2, g, 4), dtype=torch.int16, device=spikes.data.device)
    out = PackedSpikes(data=data, channels=c)
    words = out.words.numel()
    launch(
        max_pool_kernel, (cdiv(words, 256),),
        spikes.words, out.words, words,
        G=g, HO=ho, WO=wo, IH=h, IW=w, KERNEL=kernel, STRIDE=stride, PADDING=padding, P=256, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def spatial_mean_kernel(
    words_ptr, out_ptr, area, PIXELS: tl.constexpr, C: tl.constexpr, G: tl.constexpr, P: tl.constexpr
):  # fmt: skip
    """Grid (T x N, blocks of channels). The border is counted along: it is zero."""
    image = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lane = tl.arange(0, 64)
    count = tl.zeros([64], tl.int32)
    for start in range(0, PIXELS, P):
        pixel = start + tl.arange(0, P)
        word = tl.load(words_ptr + (image * PIXELS + pixel) * G + block, mask=pixel < PIXELS, other=0)
        count += tl.sum(spread_bits(word, lane), 0).to(tl.int32)
    c = block * 64 + lane
    mean = tl.div_rn(count.to(tl.float32), area)
    tl.store(out_ptr + image * C + c, mean.to(out_ptr.dtype.element_ty), mask=c < C)


def spatial_mean(spikes: PackedSpikes, dtype: torch.dtype = torch.float32) -> Tensor:
    """Mean over rows and columns.

    Args:
        spikes: [T, N, C, H, W].
        dtype: The result's; the count itself is exact.

    Returns:
        [T, N, C] of `dtype`.

    Raises:
        DeviceError: `spikes` are not on a GPU.
    """
    check_launchable(spikes.data)
    t, n, c, h, w = spikes.shape
    out = torch.empty((t, n, c), dtype=dtype, device=spikes.data.device)
    check_step_size(spikes.data)
    launch(
        spatial_mean_kernel, (t * n, spikes.blocks),
        spikes.words, out, float(h * w), PIXELS=(h + 2) * (w + 2), C=c, G=spikes.blocks, P=32, num_warps=4,
    )  # fmt: skip
    return out
