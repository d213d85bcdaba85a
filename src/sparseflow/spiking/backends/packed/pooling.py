"""Pooling of packed spikes: the maximum is an OR of words, the mean over space a count of bits."""

# Kernels are Triton's subset of Python: tuples grow by `+`.
# ruff: noqa: RUF005
from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import PackedSpikes, allocate_packed
from sparseflow.spiking.backends.packed.format import pack as pack_reference
from sparseflow.spiking.backends.packed.format import unpack as unpack_reference
from sparseflow.spiking.backends.packed.words import (
    ceil_div,
    check_launchable,
    check_step_size,
    choose_time_chunk,
    get_activity,
    launch,
    next_power_of_2,
    padded_index,
    record_activity,
    spread_bits,
    store_activity,
    store_border,
)


def run_max_pool_reference(spikes: PackedSpikes, kernel: int, stride: int, padding: int) -> PackedSpikes:
    """Plain-torch reference of `max_pool`."""
    dense = unpack_reference(spikes)
    flat = F.max_pool2d(dense.flatten(0, 1), kernel, stride, padding)
    return pack_reference(flat.unflatten(0, dense.shape[:2]))


def run_spatial_mean_reference(spikes: PackedSpikes, dtype: torch.dtype = torch.float32) -> Tensor:
    """Plain-torch reference of `spatial_mean`."""
    return unpack_reference(spikes, torch.float64).mean(dim=(-2, -1)).to(dtype)


@triton.jit
def max_pool_kernel(
    x_ptr, out_ptr, act_ptr, pixels, tiles, x_step, out_step, G: tl.constexpr, HO: tl.constexpr,
    WO: tl.constexpr, IH: tl.constexpr, IW: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    PADDING: tl.constexpr, P: tl.constexpr, B: tl.constexpr, T: tl.constexpr, TC: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of P output pixels, B blocks of channels each, T time steps each).

    TILE as in `pack_kernel`.
    """
    pixel = (tl.program_id(0) * P + tl.arange(0, P))[:, None]
    block = tl.program_id(1) * B + tl.arange(0, B)[None, :]
    inside = (pixel < pixels) & (block < G)
    n = pixel // (HO * WO)
    y = (pixel // WO) % HO
    x = pixel % WO
    # The input's border of zeros serves as padding.
    src = padded_index(n, y * STRIDE - PADDING, x * STRIDE - PADDING, IH, IW) * G + block
    dst = padded_index(n, y, x, HO, WO) * G + block
    activity = tl.zeros([P, B], tl.int32)
    start = tl.program_id(2).to(tl.int64) * T
    for t0 in range(0, T, TC):
        chunk_values = ()
        for u in tl.static_range(TC):
            value = tl.zeros([P, B], tl.int64)
            for tap in tl.static_range(KERNEL * KERNEL):
                shift = ((tap // KERNEL) * (IW + 1) + tap % KERNEL) * G
                value |= tl.load(x_ptr + (start + t0 + u) * x_step + src + shift, mask=inside, other=0)
            chunk_values = chunk_values + (value,)
        for u in tl.static_range(TC):
            to = out_ptr + (start + t0 + u) * out_step
            tl.store(to + dst, chunk_values[u], mask=inside)
            store_border(to, dst, n, y, x, inside, HO, WO, G)
            if TILE > 0:
                activity = record_activity(activity, chunk_values[u], t0 + u)
    if TILE > 0:
        first = tl.program_id(0) * (P // TILE)
        store_activity(act_ptr, activity, first, tiles, tl.program_id(1) * B, G, P, B, 1, TILE)


def max_pool(
    spikes: PackedSpikes, kernel: int, stride: int | None = None, padding: int = 0, *, tile: int = 0
) -> PackedSpikes:
    """Max-pool packed spikes over windows (an OR of their bits).

    Args:
        spikes: [T, N, C, H, W].
        kernel: Edge of the window.
        stride: Stride; the window's edge if None.
        padding: 0 or 1, and at most half the window.
        tile: Pixels per activity word of the result, a power of two up to 32; 0 for no activity.

    Returns:
        Packed spikes [T, N, C, (H + 2 padding - kernel) // stride + 1, …].

    Raises:
        InputError: The window does not fit, or the padding or the tile is not supported.
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
    out = allocate_packed(t, n, c, ho, wo, spikes.data.device, tile=tile, zero=False)
    check_step_size(spikes.data, out.data)
    pixels, blocks_per_program = n * ho * wo, min(8, next_power_of_2(g))
    pixels_per_program = max(32, 128 // blocks_per_program)
    tile, activity = get_activity(out, pixels_per_program)
    time_chunk = choose_time_chunk(t, 2 if kernel <= 3 else 1)
    program_steps = t if tile else time_chunk
    launch(
        max_pool_kernel,
        (ceil_div(pixels, pixels_per_program), ceil_div(g, blocks_per_program), t // program_steps),
        spikes.words, out.words, spikes.words if activity is None else activity, pixels,
        0 if activity is None else activity.shape[1], spikes.words.stride(0), out.words.stride(0),
        G=g, HO=ho, WO=wo, IH=h, IW=w, KERNEL=kernel, STRIDE=stride, PADDING=padding,
        P=pixels_per_program, B=blocks_per_program, T=program_steps,
        TC=time_chunk, TILE=tile, num_warps=pixels_per_program * blocks_per_program // 32,
    )  # fmt: skip
    return out


@triton.jit
def spatial_mean_kernel(
    words_ptr, out_ptr, area, images, step, FIRST: tl.constexpr, IMAGE_SIZE: tl.constexpr, C: tl.constexpr,
    G: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Grid (T x N, blocks of channels).

    IMAGE_SIZE positions lie between the first pixels of consecutive images: pixels, and border that counts as
    zero.
    """
    image = tl.program_id(0).to(tl.int64)
    words_ptr += (image // images) * step + (FIRST + (image % images) * IMAGE_SIZE) * G
    block = tl.program_id(1)
    lane = tl.arange(0, 64)
    count = tl.zeros([64], tl.int32)
    for start in range(0, IMAGE_SIZE, P):
        offset = start + tl.arange(0, P)
        word = tl.load(words_ptr + offset * G + block, mask=offset < IMAGE_SIZE, other=0)
        count += tl.sum(spread_bits(word, lane), 0).to(tl.int32)
    c = block * 64 + lane
    mean = tl.div_rn(count.to(tl.float32), area)
    tl.store(out_ptr + image * C + c, mean.to(out_ptr.dtype.element_ty), mask=c < C)


def spatial_mean(spikes: PackedSpikes, dtype: torch.dtype = torch.float32) -> Tensor:
    """Average over rows and columns.

    Args:
        spikes: [T, N, C, H, W].
        dtype: Data type of the result; the count itself is exact.

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
        spikes.words, out, float(h * w), n, spikes.words.stride(0), FIRST=w + 2, IMAGE_SIZE=(h + 1) * (w + 1),
        C=c, G=spikes.blocks, P=32, num_warps=4,
    )  # fmt: skip
    return out
