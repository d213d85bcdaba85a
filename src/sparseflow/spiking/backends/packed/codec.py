"""Triton kernels that pack and unpack spikes; `format.pack` and `format.unpack` are the reference.

Both kernels read memory once and need no host work, so they can be captured into a CUDA graph.

A SEW shortcut (spike-element-wise ResNet, Fang et al. 2021) adds the values of several spike tensors.
"""

# Kernels are Triton's subset of Python: tuples grow by `+`.
# ruff: noqa: RUF005
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.spiking.backends.packed.format import BLOCK, PackedSpikes, allocate_packed, count_blocks
from sparseflow.spiking.backends.packed.words import (
    ceil_div,
    check_launchable,
    check_step_size,
    choose_time_chunk,
    flat_to_padded_index,
    gather_bits,
    get_activity,
    launch,
    padded_index,
    record_activity,
    spread_bits,
    store_activity,
    store_border,
    to_channels_last,
    with_time_strides,
)

_PIXELS = 32
"""Pixels that one program of a kernel processes."""


@triton.jit
def pack_kernel(
    x_ptr, out_ptr, act_ptr, pixels, tiles, out_step, t_stride, n_stride, c_stride, y_stride, x_stride,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, T: tl.constexpr, TC: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Pack spikes. Grid (tiles of P pixels, blocks of 64 channels, chunks of T time steps).

    Args:
        x_ptr: Spikes, addressed by the strides.
        out_ptr: Words as int32 halves; see `format.py`.
        act_ptr: Activity words, [blocks, tiles].
        pixels: Pixels of all images of a time step.
        tiles: Activity words of a block.
        out_step: Words from one time step to the next.
        t_stride, n_stride, c_stride, y_stride, x_stride: Strides of the spikes, in elements.
        C: Channels.
        H: Rows of an image.
        W: Columns of an image.
        P: Pixels of a program.
        T: Time steps of a program; all time steps if it stores activity.
        TC: Time steps whose values a program loads before it stores any.
        TILE: Pixels per activity word; 0 for no activity.
    """
    G: tl.constexpr = (C + 63) // 64
    pixel = tl.program_id(0) * P + tl.arange(0, P)
    block = tl.program_id(1)
    inside = pixel < pixels
    n = pixel // (H * W)
    y = (pixel // W) % H
    x = pixel % W
    c = block * 64 + tl.arange(0, 64)
    src = n.to(tl.int64) * n_stride + y * y_stride + x * x_stride
    src = src[:, None] + (c.to(tl.int64) * c_stride)[None, :]
    real = inside[:, None] & (c < C)[None, :]
    half_index = (padded_index(n, y, x, H, W) * G + block)[:, None] * 2 + tl.arange(0, 2)[None, :]
    activity = tl.zeros([P, 2], tl.int32)
    start = tl.program_id(2).to(tl.int64) * T
    for t0 in range(0, T, TC):
        chunk_values = ()
        for u in tl.static_range(TC):
            chunk_values = chunk_values + (
                tl.load(x_ptr + (start + t0 + u) * t_stride + src, mask=real, other=0),
            )
        for u in tl.static_range(TC):
            half = gather_bits(chunk_values[u] != 0, P, 64)
            to = out_ptr + (start + t0 + u) * (out_step * 2)
            tl.store(to + half_index, half, mask=inside[:, None])
            store_border(to, half_index, n[:, None], y[:, None], x[:, None], inside[:, None], H, W, 2 * G)
            if TILE > 0:
                activity = record_activity(activity, half, t0 + u)
    if TILE > 0:
        store_activity(act_ptr, activity, tl.program_id(0) * (P // TILE), tiles, block, G, P, 1, 2, TILE)


def pack(spikes: Tensor, out: PackedSpikes | None = None, *, tile: int = 0) -> PackedSpikes:
    """Pack spikes; any value but 0 is a spike.

    Args:
        spikes: [T, N, C, H, W] of any real dtype and any strides.
        out: Destination of the same shape; its activity words are written if it has any. By default, a new
            one is allocated.
        tile: Pixels per activity word of a new destination; 0 for no activity.

    Returns:
        The packed spikes; their border is written, too.

    Raises:
        InputError: `spikes` is not five-dimensional, `out` has another shape, or the activity's tile is not
            a power of two up to 32.
        DeviceError: `spikes` is not on a GPU.
    """
    if spikes.dim() != 5:
        raise InputError(f"spikes must be [T, N, C, H, W], got a tensor of shape {tuple(spikes.shape)}")
    check_launchable(spikes)
    t, n, c, h, w = spikes.shape
    if out is None:
        out = allocate_packed(t, n, c, h, w, spikes.device, tile=tile, zero=False)
    elif out.shape != tuple(spikes.shape):
        raise InputError(f"`out` has shape {out.shape}, expected {tuple(spikes.shape)}")
    check_step_size(out.data)
    if spikes.dtype == torch.bool:
        spikes = spikes.view(torch.uint8)
    pixels, words = n * h * w, out.data.view(torch.int32)
    tile, activity = get_activity(out, _PIXELS)
    time_chunk = choose_time_chunk(t, 2)
    program_steps = t if tile else time_chunk
    launch(
        pack_kernel, (ceil_div(pixels, _PIXELS), count_blocks(c), t // program_steps),
        spikes, words, words if activity is None else activity, pixels,
        0 if activity is None else activity.shape[1], out.words.stride(0), *spikes.stride(),
        C=c, H=h, W=w, P=_PIXELS, T=program_steps, TC=time_chunk, TILE=tile, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def unpack_kernel(
    words_ptr, out_ptr, skips, denses, dense_steps, pixels, word_step,
    out_step, n_stride, pixel_stride, c_stride,
    C: tl.constexpr, G: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Unpack spikes and add shortcuts. Grid (tiles of P pixels, blocks of 64 channels, time steps).

    Args:
        words_ptr: Words of the spikes; see `format.py`.
        out_ptr: Result, addressed by the strides.
        skips: Words of the packed shortcuts.
        denses: Dense shortcuts, [T or 1, N, H, W, C].
        dense_steps: Elements from one time step of a dense shortcut to the next; 0 if it is constant.
        pixels: Pixels of all images of a time step.
        word_step: Words from one time step to the next.
        out_step, n_stride, pixel_stride, c_stride: Strides of the result, in elements.
        C: Channels.
        G: Blocks of 64 channels.
        H: Rows of an image.
        W: Columns of an image.
        P: Pixels of a program.
    """
    pixel = tl.program_id(0) * P + tl.arange(0, P)
    block = tl.program_id(1)
    t = tl.program_id(2).to(tl.int64)
    inside = pixel < pixels
    lane = tl.arange(0, 64)
    c = block * 64 + lane
    real = inside[:, None] & (c < C)[None, :]
    src = t * word_step + flat_to_padded_index(pixel, H, W) * G + block
    value = spread_bits(tl.load(words_ptr + src, mask=inside, other=0), lane).to(tl.float32)
    for i in tl.static_range(len(skips)):
        value += spread_bits(tl.load(skips[i] + src, mask=inside, other=0), lane).to(tl.float32)
    for i in tl.static_range(len(denses)):
        flat = t * dense_steps[i] + (pixel * C)[:, None] + c[None, :]
        value += tl.load(denses[i] + flat, mask=real, other=0.0).to(tl.float32)
    n = pixel // (H * W)
    out_index = (n * n_stride + (pixel % (H * W)) * pixel_stride)[:, None] + (c * c_stride)[None, :]
    tl.store(out_ptr + t * out_step + out_index, value.to(out_ptr.dtype.element_ty), mask=real)


def unpack(
    spikes: PackedSpikes,
    dtype: torch.dtype = torch.float32,
    *,
    add: Sequence[PackedSpikes | Tensor] = (),
) -> Tensor:
    """Unpack spikes, and add SEW shortcuts to them.

    Args:
        spikes: Packed spikes.
        dtype: Data type of the result.
        add: Shortcuts: packed spikes of the same shape, or tensors [T or 1, N, C, H, W]. Sums are in fp32.

    Returns:
        [T, N, C, H, W] of `dtype`, channels last.

    Raises:
        InputError: An entry of `add` has another shape.
        DeviceError: `spikes` are not on a GPU.
    """
    check_launchable(spikes.data)
    t, n, c, h, w = spikes.shape
    for other in add:
        shape = tuple(other.shape)
        if shape != spikes.shape and (isinstance(other, PackedSpikes) or shape != (1, *spikes.shape[1:])):
            raise InputError(f"cannot add a tensor of shape {shape} to spikes of shape {spikes.shape}")
    flat = torch.empty((t, n, h, w, c), dtype=dtype, device=spikes.data.device)
    skips = tuple(other.words for other in add if isinstance(other, PackedSpikes))
    denses, steps = with_time_strides([to_channels_last(other) for other in add if isinstance(other, Tensor)])
    words = spikes.words
    check_step_size(flat, *denses)
    pixels = n * h * w
    launch(
        unpack_kernel, (ceil_div(pixels, _PIXELS), spikes.blocks, t),
        words, flat, skips, denses, steps, pixels, words.stride(0), flat.stride(0),
        c * h * w, c, 1, C=c, G=spikes.blocks, H=h, W=w, P=_PIXELS, num_warps=4,
    )  # fmt: skip
    return flat.permute(0, 1, 4, 2, 3)


assert BLOCK == 64
