"""Bit and word operations shared by the Triton kernels, and their launcher.

A *word* is the int64 of one pixel and one block of 64 channels (`PackedSpikes.words`). Kernels read whole
words and write them as two int32 halves, because reductions over 32-bit integers are cheaper.
"""

# Kernels are Triton's subset of Python.
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from sparseflow.core.kernel_compilation import compile_kernels
from sparseflow.errors import DeviceError, InputError
from sparseflow.spiking.backends.packed.format import PackedSpikes

launcher: Callable[..., Any] | None = None
"""Called with (kernel, grid, arguments, options) instead of launching, to compile only."""


@triton.jit
def compute_channel_shift(c):
    """Bit position of channel `c` (0 to 63) of a block in its half of the word."""
    return 16 * ((c >> 1) & 1) + 2 * (c >> 3) + (c & 1)


@triton.jit
def spread_bits(word, c):
    """int32 [P, len(c)]: bit of channel `c` (of its block, 0 to 63) in each of the words [P], 0 or 1."""
    low = word.to(tl.int32)
    high = (word >> 32).to(tl.int32)
    half = tl.where((c[None, :] & 4) != 0, high[:, None], low[:, None])
    # Two shifts: along a row of a matrix fragment the first is the same for all channels of a lane.
    half = half >> (16 * ((c >> 1) & 1))[None, :]
    return (half >> (2 * (c >> 3) + (c & 1))[None, :]) & 1


@triton.jit
def gather_bits(fired, P: tl.constexpr, C: tl.constexpr):
    """bool [P, C], C a multiple of 64 -> the halves of its words, int32 [P, C / 32]."""
    c = tl.arange(0, C) & 63
    value = tl.full([C], 1, tl.int32) << compute_channel_shift(c)
    # channel 8j + 4h + i -> [j, h, i]; the bits of a half are disjoint, so a sum is an OR
    bits = tl.where(fired, value[None, :], 0).reshape([P, C // 64, 8, 2, 4])
    return tl.sum(tl.sum(bits, 4), 2).to(tl.int32).reshape([P, C // 32])


@triton.jit
def padded_index(n, y, x, H: tl.constexpr, W: tl.constexpr):
    """Position of a pixel in padded memory; `y` and `x` may be one outside the image."""
    return ((H + 1) * n + y + 1) * (W + 1) + x + 1


@triton.jit
def flat_to_padded_index(pixel, H: tl.constexpr, W: tl.constexpr):
    """Position in padded memory of a pixel counted over images, rows and columns."""
    return padded_index(pixel // (H * W), (pixel // W) % H, pixel % W, H, W)


@triton.jit
def store_border(ptr, offset, n, y, x, inside, H: tl.constexpr, W: tl.constexpr, PITCH: tl.constexpr):
    """Zero the border positions around pixels; together, programs cover the whole border.

    `ptr + offset` are the elements (any shape, `PITCH` per position) of the pixels (n, y, x), which are
    shaped to broadcast against `offset`.
    """
    for tap in tl.static_range(9):
        row = y + (tap // 3 - 1)
        column = x + (tap % 3 - 1)
        outside = inside & ((row < 0) | (row >= H) | (column < 0) | (column >= W))
        neighbor = offset + ((tap // 3 - 1) * (W + 1) + (tap % 3 - 1)) * PITCH
        tl.store(ptr + neighbor, tl.zeros_like(neighbor).to(ptr.dtype.element_ty), mask=outside)


@triton.jit
def record_activity(activity, bits, t):
    """Set bit `t` of `activity` where `bits` (of the same shape) are not all zero."""
    return activity | tl.where(bits != 0, tl.full((), 1, tl.int32) << t, 0).to(tl.int32)


@triton.jit
def store_activity(
    ptr, activity, first, tiles, block, blocks,
    P: tl.constexpr, B: tl.constexpr, PER: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store one activity word per TILE of the P pixels and per block, from `activity` [P, B x PER].

    `first` is the index of the first word in its row of `tiles` words, `block` the first block of `blocks`.
    """
    words = tl.reduce_or(tl.reduce_or(activity.reshape([P // TILE, TILE, B, PER]), 3), 1)
    word_index = first + tl.arange(0, P // TILE)[:, None]
    row = block + tl.arange(0, B)[None, :]
    tl.store(ptr + row * tiles + word_index, words, mask=(word_index < tiles) & (row < blocks))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def check_launchable(*tensors: torch.Tensor) -> None:
    """Raise a DeviceError if a tensor is not on a CUDA GPU and Triton does not interpret its kernels."""
    if launcher is None and isinstance(compute_channel_shift, triton.JITFunction):
        for tensor in tensors:
            if not tensor.is_cuda:
                raise DeviceError(
                    f"packed spikes need a CUDA GPU, got a tensor on {tensor.device} "
                    "(set TRITON_INTERPRET=1 to interpret the kernels elsewhere)"
                )


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Launch a kernel, or pass it to `launcher`."""
    if launcher is not None:
        return launcher(kernel, grid, args, options)
    return kernel[grid](*args, **options)


def compile_launches(run: Callable[[], object]) -> int:
    """Compile the kernels that a function launches; see `compile_kernels`.

    Args:
        run: Launches kernels by `launch`; results of kernels are undefined while it runs.
    """

    def request_compilation(
        kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        return kernel.warmup(*args, grid=grid, **options)

    def request() -> None:
        global launcher
        launcher = request_compilation
        try:
            run()
        finally:
            launcher = None

    return compile_kernels(request)


def get_activity(spikes: PackedSpikes, max_tile: int) -> tuple[int, torch.Tensor | None]:
    """Return the pixels per activity word and the words, as kernels take them; (0, None) without activity.

    Raises:
        InputError: The tile is not a power of two up to `max_tile`, the pixels of a program.
    """
    if spikes.activity is not None and (spikes.tile > max_tile or spikes.tile & (spikes.tile - 1)):
        raise InputError(
            f"the tile of activity words must be a power of two of at most {max_tile}, got {spikes.tile}"
        )
    return (0, None) if spikes.activity is None else (spikes.tile, spikes.activity)


def check_step_size(*tensors: torch.Tensor) -> None:
    """Raise an InputError if a time step of a tensor [T, ...] has 2^31 elements or more."""
    for tensor in tensors:
        if tensor[0].numel() >= 1 << 31:
            raise InputError(
                f"one time step of a tensor of shape {tuple(tensor.shape)} has {tensor[0].numel()} elements; "
                f"the limit is 2^31 - 1; split the batch"
            )


def to_channels_last(x: torch.Tensor) -> torch.Tensor:
    """Convert [T, N, C, H, W] to contiguous [T, N, H, W, C]; T is 1 if `x` repeats one time step.

    Copies only if the memory is not already in that order.
    """
    if x.shape[0] > 1 and x.stride(0) == 0:
        x = x[:1]
    return x.permute(0, 1, 3, 4, 2).contiguous()


def choose_time_chunk(steps: int, limit: int = 4) -> int:
    """Choose the time steps to hold at once: the largest power of two up to `limit` that divides `steps`."""
    chunk = limit
    while steps % chunk:
        chunk //= 2
    return chunk


def with_time_strides(tensors: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """Return tensors [T or 1, ...] and their time strides, as kernels take them."""
    return tuple(tensors), tuple(x.stride(0) if x.shape[0] > 1 else 0 for x in tensors)
