"""`EventBackend` runs groups of a plan on a CPU; `encode` and `decode` convert spikes to events and back."""

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
from sparseflow.spiking.backends.events.format import Events, allocate_events, get_array_address
from sparseflow.spiking.backends.events.group import EventGroup
from sparseflow.spiking.backends.events.kernels.compiler import compile_kernel, run_on_threads
from sparseflow.spiking.backends.events.kernels.conversions import (
    MAX_COUNT,
    NOT_A_COUNT,
    make_count_kernel,
    make_decode_kernel,
    make_encode_kernel,
)
from sparseflow.spiking.backends.events.kernels.records import CODEC
from sparseflow.spiking.backends.spec import GroupSpec


def _make_record(shape: tuple[int, ...], **fields: int) -> np.ndarray:
    codec = np.zeros(1, dtype=CODEC)
    record = codec[0]
    record["time_steps"], record["images"], record["channels"], record["height"], record["width"] = shape
    for name, value in fields.items():
        record[name] = value
    return codec


def _run_kernel(make: Callable[[str], Callable[[Any], None]], codec: np.ndarray) -> None:
    codec[0]["next_item"] = codec[0]["next_slot"] = codec[0]["need"] = 0
    run_on_threads(compile_kernel(make), get_array_address(codec), torch.get_num_threads())


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
    row_bytes = -(-4 * w * c // 64) * 64
    thread_bytes = -(-(row_bytes + (t + 1) * 2 * w * -(-c // 16) + 64) // 64) * 64
    scratch = np.empty(torch.get_num_threads() * thread_bytes, dtype=np.uint8)
    stride_t, stride_n, stride_c, stride_h, stride_w = dense.stride()
    codec = _make_record(
        dense.shape, source=dense.data_ptr(), stride_t=stride_t, stride_n=stride_n,
        stride_c=1 if c == 1 else stride_c, stride_h=stride_h, stride_w=stride_w,
        scratch=get_array_address(scratch), scratch_bytes=thread_bytes, row_bytes=row_bytes,
    )  # fmt: skip
    record = codec[0]
    row: int | None = None
    while True:
        events = allocate_events((t, n, c, h, w), row_capacity=row)
        record["out"] = events.address
        _run_kernel(make_encode_kernel, codec)
        if record["flag"] >= NOT_A_COUNT:
            raise InputError(
                f"`dense` must contain only integers from 0 to {MAX_COUNT} to become events; "
                "run this layer dense"
            )
        if record["need"] == 0:
            return replace(events, max_value=max(1, int(record["flag"])))
        row = int(record["need"])  # some row did not fit


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
    """CPU backend: spikes as sorted lists of events, groups in Numba."""

    name = "events"
    dtype = torch.float32
    channel_block = None
    shape_agnostic = True
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
                f"a tensor of shape {tuple(dense.shape)} must contain spikes by the analysis, but contains "
                "other values"
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
