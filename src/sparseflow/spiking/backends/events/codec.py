"""Between dense tensors and events, and the reductions that need no neuron."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparseflow.errors import InputError
from sparseflow.spiking.backends.events.format import Events, address_of_array, allocate_events
from sparseflow.spiking.backends.events.kernels import threads
from sparseflow.spiking.backends.events.kernels.compiler import compile_kernel
from sparseflow.spiking.backends.events.kernels.conversions import (
    LARGEST_COUNT,
    NOT_A_COUNT,
    make_count_kernel,
    make_decode_kernel,
    make_encode_kernel,
    make_max_pool_kernel,
)
from sparseflow.spiking.backends.events.kernels.records import CODEC


def _record(shape: tuple[int, int, int, int, int]) -> tuple[np.ndarray, np.void]:
    codec = np.zeros(1, dtype=CODEC)
    c = codec[0]
    c["time_steps"], c["images"], c["channels"], c["height"], c["width"] = shape
    return codec, c


def _run(make: Callable[[str], Callable[[Any], None]], codec: np.ndarray) -> None:
    codec[0]["next_item"] = codec[0]["next_slot"] = codec[0]["need"] = 0
    threads.run(compile_kernel(make), address_of_array(codec), torch.get_num_threads())


def _run_to_events(
    make: Callable[[str], Callable[[Any], None]],
    codec: np.ndarray,
    shape: tuple[int, int, int, int, int],
) -> Events:
    """Run a kernel whose output is events of `shape`, again with more room where some row did not fit."""
    record = codec[0]
    t, _, c, _, w = shape
    row_bytes = -(-4 * w * c // 64) * 64
    each = -(-(row_bytes + (t + 1) * 2 * w * -(-c // 16) + 64) // 64) * 64
    scratch = np.empty(torch.get_num_threads() * each, dtype=np.uint8)
    record["scratch"], record["scratch_bytes"] = address_of_array(scratch), each
    record["row_bytes"] = row_bytes
    row: int | None = None
    while True:
        events = allocate_events(shape, row=row)
        record["out"] = events.address
        _run(make, codec)
        if record["flag"] >= NOT_A_COUNT or record["need"] == 0:
            return replace(events, max_value=max(1, int(record["flag"])))
        row = int(record["need"])


def encode(dense: torch.Tensor) -> Events:
    """Events of a tensor of small whole numbers.

    Args:
        dense: [T, N, C, H, W], any dtype and memory format; channels last is fastest.

    Returns:
        Its events.

    Raises:
        InputError: It has not five dimensions, or holds a negative number, a fraction, a NaN or a number over
        255.
    """
    if dense.dim() != 5:
        raise InputError(f"`dense` must be [T, N, C, H, W], got shape {tuple(dense.shape)}")
    dense = dense.detach().float()
    t, n, c, h, w = dense.shape
    codec, record = _record((t, n, c, h, w))
    record["source"] = dense.data_ptr()
    for name, stride in zip(("t", "n", "c", "h", "w"), dense.stride(), strict=True):
        record[f"stride_{name}"] = stride
    if c == 1:
        record["stride_c"] = 1
    events = _run_to_events(make_encode_kernel, codec, (t, n, c, h, w))
    if record["flag"] >= NOT_A_COUNT:
        raise InputError(
            f"`dense` must hold whole numbers from 0 to {LARGEST_COUNT} to become events, and it holds "
            "others; run this layer dense"
        )
    return events


def decode(events: Events) -> torch.Tensor:
    """The dense tensor: float32 [T, N, C, H, W] whose memory is channels last."""
    out = torch.empty(events.T, events.N, events.H, events.W, events.C)
    codec, record = _record(events.shape)
    record["source"], record["out"] = events.address, out.data_ptr()
    _run(make_decode_kernel, codec)
    return out.movedim(-1, -3)


def sum_over_space(events: Events) -> torch.Tensor:
    """Sums over H and W: float32 [T, N, C]. Exact up to 2^24; divide by H * W for average pooling to 1x1."""
    out = torch.empty(events.T, events.N, events.C)
    codec, record = _record(events.shape)
    record["source"], record["out"] = events.address, out.data_ptr()
    _run(make_count_kernel, codec)
    return out


def max_pool(events: Events, *, kernel: int, stride: int | None = None, padding: int = 0) -> Events:
    """Max pooling of spikes over square windows.

    Args:
        events: Spikes; values above 1 are refused.
        kernel: Window height and width.
        stride: `kernel` when None.
        padding: Zeros on every side, at most half of the window.

    Raises:
        InputError: Values above 1, or a window that does not fit.
    """
    stride = kernel if stride is None else stride
    if events.max_value > 1:
        raise InputError(f"max pooling of events takes spikes (0 or 1), got values up to {events.max_value}")
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (events.H, events.W))
    if min(height, width, stride) < 1 or padding < 0 or 2 * padding > kernel:
        raise InputError(
            f"a {kernel}x{kernel} window with stride {stride} and padding {padding} does not fit "
            f"{events.H}x{events.W} pixels"
        )
    codec, record = _record(events.shape)
    record["source"] = events.address
    record["out_height"], record["out_width"] = height, width
    record["kernel"], record["stride"], record["padding"] = kernel, stride, padding
    return _run_to_events(make_max_pool_kernel, codec, (events.T, events.N, events.C, height, width))
