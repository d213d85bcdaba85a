"""CPU backend `EventBackend`, and conversions between dense spikes and events."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from sparseflow.errors import InputError, RunError
from sparseflow.spiking.backends.base import (
    NATURAL_LAYOUT,
    ChannelLayout,
    ConvolutionKind,
    GroupShape,
    PreparedGroup,
)
from sparseflow.spiking.backends.events.format import (
    Events,
    allocate_events,
    get_array_address,
    round_up_to_cache_line,
)
from sparseflow.spiking.backends.events.group import EventGroup
from sparseflow.spiking.backends.events.kernels.compiler import compile_kernel, run_on_threads
from sparseflow.spiking.backends.events.kernels.conversions import (
    MAX_COUNT,
    NOT_A_COUNT,
    make_count_kernel,
    make_decode_kernel,
    make_encode_kernel,
)
from sparseflow.spiking.backends.events.kernels.llvm import LANES
from sparseflow.spiking.backends.events.kernels.records import CODEC
from sparseflow.spiking.backends.spec import GroupSpec


def _make_record(shape: tuple[int, ...], **fields: int) -> np.ndarray:
    """Make a CODEC record, [1], for spikes of shape (T, N, C, H, W); other fields are 0."""
    record = np.zeros(1, dtype=CODEC)
    sizes = dict(zip(("time_steps", "images", "channels", "height", "width"), shape, strict=True))
    for name, value in {**sizes, **fields}.items():
        record[0][name] = value
    return record


def _run_kernel(make_kernel: Callable[[str], Callable[[Any], None]], record: np.ndarray) -> None:
    """Run a kernel on all threads; it reads and writes the record, whose counters are reset first."""
    record[0]["next_item"] = record[0]["next_slot"] = record[0]["need"] = 0
    run_on_threads(compile_kernel(make_kernel), get_array_address(record), torch.get_num_threads())


def encode(dense: torch.Tensor) -> Events:
    """Convert a tensor of small non-negative integers to events.

    The rows of the events have a fixed capacity. If a row does not fit, the conversion is repeated with the
    capacity that it needs.

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
    # Each thread holds one row of floats, one row of masks, and the row's bits at all time steps.
    row_bytes = round_up_to_cache_line(4 * w * c)
    bits_bytes = 2 * w * -(-c // LANES)
    scratch_bytes = round_up_to_cache_line(row_bytes + (t + 1) * bits_bytes + 64)
    scratch = np.empty(torch.get_num_threads() * scratch_bytes, dtype=np.uint8)
    stride_t, stride_n, stride_c, stride_h, stride_w = dense.stride()
    record = _make_record(
        dense.shape,
        source=dense.data_ptr(),
        stride_t=stride_t,
        stride_n=stride_n,
        stride_c=1 if c == 1 else stride_c,
        stride_h=stride_h,
        stride_w=stride_w,
        scratch=get_array_address(scratch),
        scratch_bytes=scratch_bytes,
        row_bytes=row_bytes,
    )
    row_capacity: int | None = None
    while True:
        events = allocate_events((t, n, c, h, w), row_capacity=row_capacity)
        record[0]["out"] = events.address
        _run_kernel(make_encode_kernel, record)
        max_value, needed_capacity = int(record[0]["flag"]), int(record[0]["need"])
        if max_value >= NOT_A_COUNT:
            raise InputError(
                f"`dense` must contain only integers from 0 to {MAX_COUNT} to become events; "
                "run this layer dense"
            )
        if needed_capacity == 0:
            return replace(events, max_value=max(1, max_value))
        row_capacity = needed_capacity


def decode(events: Events) -> torch.Tensor:
    """Convert events to float32 [T, N, C, H, W] in channels-last memory."""
    out = torch.empty(events.T, events.N, events.H, events.W, events.C)
    _run_kernel(make_decode_kernel, _make_record(events.shape, source=events.address, out=out.data_ptr()))
    return out.movedim(-1, -3)


def sum_over_space(events: Events) -> torch.Tensor:
    """Sum events over H and W: float32 [T, N, C], exact up to 2^24."""
    out = torch.empty(events.T, events.N, events.C)
    _run_kernel(make_count_kernel, _make_record(events.shape, source=events.address, out=out.data_ptr()))
    return out


class EventBackend:
    """CPU backend: spikes are sorted lists of events, and Numba kernels run the groups."""

    name = "events"
    dtype = torch.float32
    channel_block = None
    shape_agnostic = True
    runs_bare_convolutions = True
    fused_kernels = None
    adds_dense_spikes = False

    def get_unsupported_reason(self, spec: GroupSpec, shape: GroupShape) -> str | None:
        return None if spec.sources else "the group has no convolution of spikes"

    def prepare(
        self,
        spec: GroupSpec,
        shape: GroupShape,
        convolution: ConvolutionKind,
        layout: ChannelLayout = NATURAL_LAYOUT,
    ) -> PreparedGroup:
        assert layout.output is None, "the event backend does not reorder channels"
        return EventGroup(spec, convolution)

    def encode(self, dense: torch.Tensor, max_value: int) -> Any:
        try:
            return encode(dense)
        except InputError as error:
            raise RunError(
                f"a tensor of shape {tuple(dense.shape)} contains values that are not spikes, but the "
                "analysis of the network expects spikes"
            ) from error

    encode_addend = encode

    def decode(self, native: Any) -> torch.Tensor:
        return decode(native)

    def spatial_mean(self, native: Any) -> torch.Tensor:
        return sum_over_space(native) / (native.H * native.W)

    def max_pool(self, native: Any, kernel: int, stride: int, padding: int) -> Any:
        dense = self.decode(native)
        pooled = F.max_pool2d(dense.flatten(0, 1), kernel, stride, padding)
        return self.encode(pooled.unflatten(0, dense.shape[:2]), max_value=1)
