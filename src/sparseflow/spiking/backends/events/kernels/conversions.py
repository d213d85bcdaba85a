"""Kernels between events and dense tensors: encode, decode, sums over space.

A work item of encode is one row of one image at all time steps; otherwise it is one image at one time step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from sparseflow.spiking.backends.events.kernels.compiler import jit
from sparseflow.spiking.backends.events.kernels.emit import add_step, emit_row, fires_at
from sparseflow.spiking.backends.events.kernels.llvm import ALL_LANES
from sparseflow.spiking.backends.events.kernels.planes import PLANE_BYTES, PLANE_SLOT, PLANE_STEPS
from sparseflow.spiking.backends.events.kernels.records import CODEC, EVENTS, SLACK, get_field_offset
from sparseflow.spiking.backends.events.kernels.scalars import (
    add_one,
    address_of,
    as_pointer,
    atomic_add,
    atomic_max,
    read_float,
    read_int,
    read_short,
    write_int,
    write_short,
)
from sparseflow.spiking.backends.events.kernels.simd import fill_lanes, load_bits

NOT_A_COUNT = 1 << 40
"""`flag` of a tensor that holds values other than small non-negative integers."""
MAX_COUNT = 255
"""Larger values are refused; they would be faster dense."""

_NEXT_ITEM = get_field_offset(CODEC, "next_item")
_NEXT_SLOT = get_field_offset(CODEC, "next_slot")
_NEED = get_field_offset(CODEC, "need")
_FLAG = get_field_offset(CODEC, "flag")


@jit
def _write_zeros(out: int, floats: int) -> None:
    full_vectors = floats // 16
    for i in range(full_vectors):
        fill_lanes(out + 64 * i, np.float32(0.0))
    for i in range(16 * full_vectors, floats):
        write_int(out + 4 * i, 0)


@jit
def _extract_bits(row: int, pixel: int, bits: int, width: int, channels: int) -> bool:
    """Extract bits of a row of zeros and ones, pixels `pixel` floats apart; False at other values."""
    vectors = (channels + 15) // 16
    last_lanes = ALL_LANES >> (16 * vectors - channels)
    for x in range(width):
        for vector in range(vectors):
            valid = ALL_LANES if vector < vectors - 1 else last_lanes
            lane_bits = load_bits(row + 4 * (x * pixel + 16 * vector), valid)
            if lane_bits >> 16:
                return False
            write_short(bits + 2 * (x * vectors + vector), lane_bits)
    return True


@jit
def _write_counts(address: int, values: int, out: Any, line: int, width: int, channels: int) -> None:
    """Write a row of integers one by one; report invalid values and missing capacity in the record."""
    start = out.start + 4 * line * (width + 1)
    write_int(start, 0)
    length, largest = 0, 0
    for i in range(width * channels):
        value = read_float(values + 4 * i)
        if not (np.float32(0.0) <= value <= np.float32(MAX_COUNT)) or value != np.floor(value):
            atomic_max(address + _FLAG, NOT_A_COUNT)
            return
        length += np.int64(value)
        largest = max(largest, np.int64(value))
    atomic_max(address + _FLAG, largest)
    if length + SLACK > out.row:
        atomic_max(address + _NEED, length + SLACK)
        return
    filled = line * out.row
    for x in range(width):
        for entry in range(x * channels, (x + 1) * channels):
            for _ in range(np.int64(read_float(values + 4 * entry))):
                if out.wide:
                    write_int(out.index + 4 * filled, entry)
                else:
                    write_short(out.index + 2 * filled, entry)
                filled += 1
        write_int(start + 4 * (x + 1), filled - line * out.row)


@jit
def _gather_row(codec: Any, t: int, n: int, y: int, values: int) -> None:
    """Copy one row to `values` [W, C]."""
    channels, stride_c, stride_w = codec.channels, codec.stride_c, codec.stride_w
    row = codec.source + 4 * (t * codec.stride_t + n * codec.stride_n + y * codec.stride_h)
    for c in range(channels):
        for x in range(codec.width):
            write_int(values + 4 * (x * channels + c), read_int(row + 4 * (c * stride_c + x * stride_w)))


@jit
def run_encode(address: int) -> None:
    """Dense float32, any strides -> events. `flag` becomes the largest value above 1, or NOT_A_COUNT."""
    codec = carray(as_pointer(address), 1, CODEC)[0]
    out = carray(as_pointer(codec.out), 1, EVENTS)[0]
    values = codec.scratch + atomic_add(address + _NEXT_SLOT, 1) * codec.scratch_bytes
    width, channels, height = codec.width, codec.channels, codec.height
    vectors = (channels + 15) // 16
    rows, step_bytes = codec.images * height, 2 * width * vectors
    masks = values + codec.row_bytes
    bits = masks + step_bytes + 8
    while True:
        row = atomic_add(address + _NEXT_ITEM, 1)
        if row >= rows:
            break
        n, y = row // height, row % height
        binary = True
        for t in range(codec.time_steps):
            if binary:
                source_row, pixel = values, channels
                if codec.stride_c == 1:
                    source_row = codec.source + 4 * (
                        t * codec.stride_t + n * codec.stride_n + y * codec.stride_h
                    )
                    pixel = codec.stride_w
                else:
                    _gather_row(codec, t, n, y, values)
                binary = _extract_bits(source_row, pixel, bits + t * step_bytes, width, channels)
        if binary:
            emit_row(
                codec.out,
                0,
                0,
                rows,
                row,
                bits,
                step_bytes,
                masks,
                width,
                channels,
                1,
                vectors,
                address + _NEED,
            )
            continue
        # Values other than 0 and 1 do not share time steps: single-step planes hold all events.
        for plane in range(out.planes):
            line = plane * rows + row
            entry = out.table + PLANE_BYTES * plane
            if read_int(entry + PLANE_SLOT) < 0:
                _gather_row(codec, read_int(entry + PLANE_STEPS), n, y, values)
                _write_counts(address, values, out, line, width, channels)
            else:
                for x in range(width + 1):
                    write_int(out.start + 4 * (line * (width + 1) + x), 0)


@jit
def run_decode(address: int) -> None:
    """Events -> dense float32 [T, N, H, W, C]."""
    codec = carray(as_pointer(address), 1, CODEC)[0]
    events = carray(as_pointer(codec.source), 1, EVENTS)[0]
    channels = codec.channels
    size, rows = codec.width * channels, codec.images * codec.height
    while True:
        item = atomic_add(address + _NEXT_ITEM, 1)
        if item >= codec.time_steps * codec.images:
            break
        t, n = item // codec.images, item % codec.images
        for row in range(n * codec.height, (n + 1) * codec.height):
            values = codec.out + 4 * (t * rows + row) * size
            _write_zeros(values, size)
            add_step(events, t, rows, row, codec.width, values, channels, 0, channels)


@jit
def run_count(address: int) -> None:
    """Events -> float32 [T, N, C]: sums over space."""
    codec = carray(as_pointer(address), 1, CODEC)[0]
    events = carray(as_pointer(codec.source), 1, EVENTS)[0]
    width, height, channels, wide = codec.width, codec.height, codec.channels, events.wide
    while True:
        item = atomic_add(address + _NEXT_ITEM, 1)
        if item >= codec.time_steps * codec.images:
            break
        t, n = item // codec.images, item % codec.images
        sums = codec.out + 4 * item * channels
        _write_zeros(sums, channels)
        for plane in range(events.planes):
            if fires_at(events, plane, t):
                first = (plane * codec.images + n) * height
                for line in range(first, first + height):
                    start, index = events.start + 4 * line * (width + 1), line * events.row
                    for x in range(width):
                        pixel = sums - 4 * x * channels
                        for i in range(index + read_int(start), index + read_int(start + 4)):
                            entry = (
                                read_int(events.index + 4 * i) if wide else read_short(events.index + 2 * i)
                            )
                            add_one(pixel + 4 * entry)
                        start += 4


def make_encode_kernel(digest: str) -> Any:
    def encode_kernel(record):
        if digest:
            run_encode(address_of(record))

    return encode_kernel


def make_decode_kernel(digest: str) -> Any:
    def decode_kernel(record):
        if digest:
            run_decode(address_of(record))

    return decode_kernel


def make_count_kernel(digest: str) -> Any:
    def count_kernel(record):
        if digest:
            run_count(address_of(record))

    return count_kernel
