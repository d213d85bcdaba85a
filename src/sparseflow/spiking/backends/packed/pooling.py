"""Pooling on packed spikes: the maximum is an OR of words, the mean over space a count of bits."""

# Kernels are Triton's subset of Python: tuples grow by `+`.
# ruff: noqa: RUF005
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import PackedSpikes, empty_packed
from sparseflow.spiking.backends.packed.format import pack as pack_reference
from sparseflow.spiking.backends.packed.format import unpack as unpack_reference
from sparseflow.spiking.backends.packed.words import (
    activity_of,
    cdiv,
    check_launchable,
    check_step_size,
    fires_at,
    launch,
    place_of,
    spread_bits,
    store_activity,
    store_border,
    time_steps_held,
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
    x_ptr, out_ptr, act_ptr, pixels, tiles, x_step, out_step, G: tl.constexpr, HO: tl.constexpr,
    WO: tl.constexpr, IH: tl.constexpr, IW: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, P: tl.constexpr, B: tl.constexpr, T: tl.constexpr, TC: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of P of the output's pixels, B blocks of channels each, T time steps each).

    TILE as in `pack_kernel`.
    """
    pixel = (tl.program_id(0) * P + tl.arange(0, P))[:, None]
    block = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = (pixel < pixels) & (block < G)
    n = pixel // (HO * WO)
    y = (pixel // WO) % HO
    x = pixel % WO
    # The input's border of zeros stands in for padding.
    src = place_of(n, y * STRIDE - PADDING, x * STRIDE - PADDING, IH, IW) * G + block
    dst = place_of(n, y, x, HO, WO) * G + block
    seen = tl.zeros([P, B], tl.int32)
    start = tl.program_id(2).to(tl.int64) * T
    for t0 in range(0, T, TC):
        held = ()
        for u in tl.static_range(TC):
            value = tl.zeros([P, B], tl.int64)
            for tap in tl.static_range(KERNEL * KERNEL):
                shift = ((tap // KERNEL) * (IW + 1) + tap % KERNEL) * G
                value |= tl.load(x_ptr + (start + t0 + u) * x_step + src + shift, mask=inside, other=0)
            held = held + (value,)
        for u in tl.static_range(TC):
            to = out_ptr + (start + t0 + u) * out_step
            tl.store(to + dst, held[u], mask=inside)
            store_border(to, dst, n, y, x, inside, HO, WO, G)
            if TILE > 0:
                seen = fires_at(seen, held[u], t0 + u)
    if TILE > 0:
        first = tl.program_id(0) * (P // TILE)
        store_activity(act_ptr, seen, first, tiles, tl.program_id(1) * B, G, P, B, 1, TILE)


def max_pool(
    spikes: PackedSpikes, kernel: int, stride: int | None = None, padding: int = 0, *, tile: int = 0
) -> PackedSpikes:
    """Maximum over windows, for spikes the OR of their bits.

    Args:
        spikes: [T, N, C, H, W].
        kernel: Edge of the window.
        stride: Its step; the window's edge when None.
        padding: 0 or 1, and at most half the window.
        tile: Pixels of an activity word of the result, a power of two up to 32; 0 for no activity.

    Returns:
        Packed spikes [T, N, C, (H + 2 padding - kernel) // stride + 1, …].

    Raises:
        InputError: No window fits, the padding is neither 0 nor 1, or the tile is no such number.
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
    out = empty_packed(t, n, c, ho, wo, spikes.data.device, tile=tile, border=False)
    check_step_size(spikes.data, out.data)
    pixels, held = n * ho * wo, min(8, 1 << (g - 1).bit_length())
    tiled = max(32, 128 // held)
    tile, activity = activity_of(out, tiled)
    steps = time_steps_held(t, 2 if kernel <= 3 else 1)
    ours = t if tile else steps
    launch(
        max_pool_kernel, (cdiv(pixels, tiled), cdiv(g, held), t // ours),
        spikes.words, out.words, spikes.words if activity is None else activity, pixels,
        0 if activity is None else activity.shape[1], spikes.words.stride(0), out.words.stride(0),
        G=g, HO=ho, WO=wo, IH=h, IW=w, KERNEL=kernel, STRIDE=stride, PADDING=padding, P=tiled, B=held, T=ours,
        TC=steps, TILE=tile, num_warps=tiled * held // 32,
    )  # fmt: skip
    return out


@triton.jit
def spatial_mean_kernel(
    words_ptr, out_ptr, area, images, step, FIRST: tl.constexpr, PLACES: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Grid (T x N, blocks of channels).

    From an image's first pixel to the next image's lie PLACES: its pixels and some border, which is counted
    along, for it is zero.
    """
    image = tl.program_id(0).to(tl.int64)
    words_ptr += (image // images) * step + (FIRST + (image % images) * PLACES) * G
    block = tl.program_id(1)
    lane = tl.arange(0, 64)
    count = tl.zeros([64], tl.int32)
    for start in range(0, PLACES, P):
        place = start + tl.arange(0, P)
        word = tl.load(words_ptr + place * G + block, mask=place < PLACES, other=0)
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
        spikes.words, out, float(h * w), n, spikes.words.stride(0), FIRST=w + 2, PLACES=(h + 1) * (w + 1),
        C=c, G=spikes.blocks, P=32, num_warps=4,
    )  # fmt: skip
    return out
