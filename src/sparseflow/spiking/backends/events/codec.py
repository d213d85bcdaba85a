"""Conversions between dense tensors and events, and reductions of events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sparseflow.errors import InputError
from sparseflow.spiking.backends.events.format import Events, allocate_events, get_array_address
from sparseflow.spiking.backends.events.kernels import threads
from sparseflow.spiking.backends.events.kernels.compiler import compile_kernel
from sparseflow.spiking.backends.events.kernels.conversions import (
    MAX_COUNT,
    NOT_A_COUNT,
    make_count_kernel,
    make_decode_kernel,
    make_encode_kernel,
    make_max_pool_kernel,
)
from sparseflow.spiking.backends.events.kernels.records import CODEC


def _make_record(shape: tuple[int, int, int, int, int]) -> tuple[np.ndarray, np.void]:
    codec = np.zeros(1, dtype=CODEC)
    c = codec[0]
    c["time_steps"], c["images"], c["channels"], c["height"], c["width"] = shape
    return codec, c


def _run_kernel(make: Callable[[str], Callable[[Any], None]], codec: np.ndarray) -> None:
    codec[0]["next_item"] = codec[0]["next_slot"] = codec[0]["need"] = 0
    threads.run_on_threads(compile_kernel(make), get_array_address(codec), torch.get_num_threads())


def _run_event_kernel(
    make: Callable[[str], Callable[[Any], None]],
    codec: np.ndarray,
    shape: tuple[int, int, int, int, int],
) -> Events:
    """Run a kernel that writes events of `shape`; repeat it with larger rows while some row does not fit."""
    record = codec[0]
    t, _, c, _, w = shape
    row_bytes = -(-4 * w * c // 64) * 64
    thread_bytes = -(-(row_bytes + (t + 1) * 2 * w * -(-c // 16) + 64) // 64) * 64
    scratch = np.empty(torch.get_num_threads() * thread_bytes, dtype=np.uint8)
    record["scratch"], record["scratch_bytes"] = get_array_address(scratch), thread_bytes
    record["row_bytes"] = row_bytes
    row: int | None = None
    while True:
        events = allocate_events(shape, row_capacity=row)
        record["out"] = events.address
        _run_kernel(make, codec)
        if record["flag"] >= NOT_A_COUNT or record["need"] == 0:
            return replace(events, max_value=max(1, int(record["flag"])))
        row = int(record["need"])


def encode(dense: torch.Tensor) -> Events:
    """Convert a tensor of small non-negative integers to events.

    Args:
        dense: [T, N, C, H, W], any dtype and memory format; channels last is fastest.

    Raises:
        InputError: `dense` is not five-dimensional, or holds a negative number, a fraction, a NaN or a number
            above 255.
    """
    if dense.dim() != 5:
        raise InputError(f"`dense` must be [T, N, C, H, W], got shape {tuple(dense.shape)}")
    dense = dense.detach().float()
    t, n, c, h, w = dense.shape
    codec, record = _make_record((t, n, c, h, w))
    record["source"] = dense.data_ptr()
    for name, stride in zip(("t", "n", "c", "h", "w"), dense.stride(), strict=True):
        record[f"stride_{name}"] = stride
    if c == 1:
        record["stride_c"] = 1
    events = _run_event_kernel(make_encode_kernel, codec, (t, n, c, h, w))
    if record["flag"] >= NOT_A_COUNT:
        raise InputError(
            f"`dense` must contain only integers from 0 to {MAX_COUNT} to become events; run this layer dense"
        )
    return events


def decode(events: Events) -> torch.Tensor:
    """Convert events to float32 [T, N, C, H, W] in channels-last memory."""
    out = torch.empty(events.T, events.N, events.H, events.W, events.C)
    codec, record = _make_record(events.shape)
    record["source"], record["out"] = events.address, out.data_ptr()
    _run_kernel(make_decode_kernel, codec)
    return out.movedim(-1, -3)


def sum_over_space(events: Events) -> torch.Tensor:
    """Sum events over H and W: float32 [T, N, C], exact up to 2^24."""
    out = torch.empty(events.T, events.N, events.C)
    codec, record = _make_record(events.shape)
    record["source"], record["out"] = events.address, out.data_ptr()
    _run_kernel(make_count_kernel, codec)
    return out


def max_pool(events: Events, *, kernel: int, stride: int | None = None, padding: int = 0) -> Events:
    """Max-pool spikes over square windows.

    Args:
        events: Spikes with values 0 and 1.
        kernel: Window height and width.
        stride: `kernel` if None.
        padding: Zeros on each side, at most half of the window.

    Raises:
        InputError: There are values above 1, or the window does not fit.
    """
    stride = kernel if stride is None else stride
    if events.max_value > 1:
        raise InputError(
            f"max pooling of events expects spikes (0 or 1), got values up to {events.max_value}"
        )
    height, width = ((size + 2 * padding - kernel) // stride + 1 for size in (events.H, events.W))
    if min(height, width, stride) < 1 or padding < 0 or 2 * padding > kernel:
        raise InputError(
            f"a {kernel}x{kernel} window with stride {stride} and padding {padding} does not fit "
            f"{events.H}x{events.W} pixels"
        )
    codec, record = _make_record(events.shape)
    record["source"] = events.address
    record["out_height"], record["out_width"] = height, width
    record["kernel"], record["stride"], record["padding"] = kernel, stride, padding
    return _run_event_kernel(make_max_pool_kernel, codec, (events.T, events.N, events.C, height, width))
