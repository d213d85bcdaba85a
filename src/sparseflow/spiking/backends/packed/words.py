"""Bits and words in plain Triton: what every kernel around the fused group shares, and how they are launched.

A *word* is the int64 of one pixel and one block of 64 channels (`format.PackedSpikes.words`). Kernels read
words whole and write them as two int32 halves, because a reduction over 32-bit integers is the cheaper one.
"""

# Kernels are Triton's subset of Python.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sparseflow.errors import DeviceError, InputError
from sparseflow.spiking.backends.packed.format import PackedSpikes

launcher: Callable[..., Any] | None = None
"""Called with (kernel, grid, arguments, options) instead of launching; `offline_triton.py` sets it."""


@triton.jit
def channel_shift(c):
    """Where channel `c` (0 to 63) of a block sits in its half of the word."""
    return 16 * ((c >> 1) & 1) + 2 * (c >> 3) + (c & 1)


@triton.jit
def spread_bits(word, c):
    """int32 [P, len(c)]: bit of channel `c` (of its block, 0 to 63) in each of the words [P], 0 or 1."""
    low = word.to(tl.int32)
    high = (word >> 32).to(tl.int32)
    half = tl.where((c[None, :] & 4) != 0, high[:, None], low[:, None])
    # Two shifts: along a row of a matrix fragment the first is the same for all of a lane's channels.
    half = half >> (16 * ((c >> 1) & 1))[None, :]
    return (half >> (2 * (c >> 3) + (c & 1))[None, :]) & 1


@triton.jit
def gather_bits(fired, P: tl.constexpr, C: tl.constexpr):
    """bool [P, C], C a multiple of 64 -> the halves of its words, int32 [P, C / 32]."""
    c = tl.arange(0, C) & 63
    value = tl.full([C], 1, tl.int32) << channel_shift(c)
    # channel 8j + 4h + i -> [j, h, i]; the bits of a half are disjoint, so a sum is an OR
    bits = tl.where(fired, value[None, :], 0).reshape([P, C // 64, 8, 2, 4])
    return tl.sum(tl.sum(bits, 4), 2).to(tl.int32).reshape([P, C // 32])


@triton.jit
def place_of(n, y, x, H: tl.constexpr, W: tl.constexpr):
    """Place of a pixel among the pixels with their border; `y` and `x` may be one outside the image."""
    return ((H + 1) * n + y + 1) * (W + 1) + x + 1


@triton.jit
def padded_pixel(pixel, H: tl.constexpr, W: tl.constexpr):
    """Place of a pixel, counted over images, rows and columns, among the pixels with their border."""
    return place_of(pixel // (H * W), (pixel // W) % H, pixel % W, H, W)


@triton.jit
def store_border(ptr, at, n, y, x, inside, H: tl.constexpr, W: tl.constexpr, PITCH: tl.constexpr):
    """Zero what lies around pixels but outside their image; together, programs reach the whole border.

    `ptr + at` are the elements (any shape, `PITCH` of them a place) that belong to the pixels (n, y, x),
    which are shaped to broadcast against `at`.
    """
    for tap in tl.static_range(9):
        row = y + (tap // 3 - 1)
        column = x + (tap % 3 - 1)
        outside = inside & ((row < 0) | (row >= H) | (column < 0) | (column >= W))
        there = at + ((tap // 3 - 1) * (W + 1) + (tap % 3 - 1)) * PITCH
        tl.store(ptr + there, tl.zeros_like(there).to(ptr.dtype.element_ty), mask=outside)


@triton.jit
def fires_at(seen, bits, t):
    """`seen` with bit `t` added where `bits` (of `seen`'s shape) are not all zero."""
    return seen | tl.where(bits != 0, tl.full((), 1, tl.int32) << t, 0).to(tl.int32)


@triton.jit
def store_activity(
    ptr, seen, first, tiles, block, blocks,
    P: tl.constexpr, B: tl.constexpr, PER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One activity word for TILE of the P pixels and for each of B blocks, from `seen` [P, B x PER].

    `first` is the first word's place in its row of `tiles` words, `block` the first block of `blocks`.
    """
    words = tl.reduce_or(tl.reduce_or(seen.reshape([P // TILE, TILE, B, PER]), 3), 1)
    at = first + tl.arange(0, P // TILE)[:, None]
    row = block + tl.arange(0, B)[None, :]
    tl.store(ptr + row * tiles + at, words, mask=(at < tiles) & (row < blocks))


def cdiv(a: int, b: int) -> int:
    """How many `b` cover `a`."""
    return -(-a // b)


def check_launchable(*tensors: torch.Tensor) -> None:
    """Refuse tensors that Triton cannot reach here.

    Raises:
        DeviceError: A tensor is not on a CUDA GPU, and Triton does not interpret its kernels.
    """
    if launcher is None and isinstance(channel_shift, triton.JITFunction):
        for tensor in tensors:
            if not tensor.is_cuda:
                raise DeviceError(
                    f"packed spikes are handled on a CUDA GPU, got a tensor on {tensor.device} "
                    "(only with TRITON_INTERPRET=1 do these kernels run elsewhere)"
                )


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Launch a kernel. All launches come through here, so that a compile check can step in."""
    if launcher is not None:
        return launcher(kernel, grid, args, options)
    return kernel[grid](*args, **options)


def activity_of(spikes: PackedSpikes, most: int) -> tuple[int, torch.Tensor | None]:
    """Pixels of an activity word and the words, as the kernels that write them take both; (0, None) without.

    Raises:
        InputError: The tile is not a power of two up to `most`, what a program looks at.
    """
    if spikes.activity is not None and (spikes.tile > most or spikes.tile & (spikes.tile - 1)):
        raise InputError(
            f"activity words must stand for a power of two of pixels, at most {most}, got {spikes.tile}"
        )
    return (0, None) if spikes.activity is None else (spikes.tile, spikes.activity)


def check_step_size(*tensors: torch.Tensor) -> None:
    """Kernels count the elements of one time step in 32 bits.

    Raises:
        InputError: A time step of one of `tensors` ([T, ...]) has 2^31 elements or more.
    """
    for tensor in tensors:
        if tensor[0].numel() >= 1 << 31:
            raise InputError(
                f"one time step of a tensor of shape {tuple(tensor.shape)} has {tensor[0].numel()} elements; "
                f"fewer than 2^31 are needed: split the batch"
            )


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """[T, N, C, H, W] as contiguous [T, N, H, W, C]; T is 1 where `x` repeats one time step.

    A copy is made only where the memory is not already in that order.
    """
    if x.shape[0] > 1 and x.stride(0) == 0:
        x = x[:1]
    return x.permute(0, 1, 3, 4, 2).contiguous()


def time_step(x: torch.Tensor) -> int:
    """Elements from one time step to the next, 0 where there is only one."""
    return x.stride(0) if x.shape[0] > 1 else 0


def time_steps_held(steps: int, most: int = 4) -> int:
    """How many time steps to hold at once: the largest power of two up to `most` that divides `steps`."""
    held = most
    while steps % held:
        held //= 2
    return held


def as_pairs(tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Tensors [T or 1, ...] and the distances between their time steps, as kernels take them."""
    return tuple(tensors), tuple(time_step(x) for x in tensors)
