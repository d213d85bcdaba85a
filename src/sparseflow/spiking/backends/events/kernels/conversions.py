"""Kernels between events and dense tensors: encode, decode, sums over space, max pooling.

A work item of encode and of max pooling is one row of one image at all time steps; of the others, one image
at one time step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from sparseflow.spiking.backends.events.kernels.compiler import jit
from sparseflow.spiking.backends.events.kernels.emit import add_step, emit_row, fires_at
from sparseflow.spiking.backends.events.kernels.llvm import ALL_LANES
from sparseflow.spiking.backends.events.kernels.planes import PLANE_BYTES, PLANE_STEPS, PLANE_TO
from sparseflow.spiking.backends.events.kernels.records import CODEC, EVENTS, SLACK, field_offset
from sparseflow.spiking.backends.events.kernels.scalars import (
    add_one,
    address_of,
    as_pointer,
    atomic_add,
    atomic_max,
    read_float,
    read_int,
    read_short,
    write_float,
    write_int,
    write_short,
)
from sparseflow.spiking.backends.events.kernels.simd import fill_lanes, load_bits

NOT_A_COUNT = 1 << 40
"""`flag` of a tensor that holds something other than small whole numbers."""
LARGEST_COUNT = 255
"""Larger values are refused: they would be cheaper dense."""

_NEXT_ITEM = field_offset(CODEC, "next_item")
_NEXT_SLOT = field_offset(CODEC, "next_slot")
_NEED = field_offset(CODEC, "need")
_FLAG = field_offset(CODEC, "flag")


@jit
def _zero(out: int, floats: int) -> None:
    """Write zeros, float by float at the end."""
    whole = floats // 16
    for i in range(whole):
        fill_lanes(out + 64 * i, np.float32(0.0))
    for i in range(16 * whole, floats):
        write_int(out + 4 * i, 0)


@jit
def _find_bits(row: int, pixel: int, bits: int, width: int, channels: int) -> bool:
    """Bits of a row of zeros and ones, pixels `pixel` floats apart; False at the first other value."""
    vectors = (channels + 15) // 16
    last_lanes = ALL_LANES >> (16 * vectors - channels)
    for x in range(width):
        for vector in range(vectors):
            valid = ALL_LANES if vector < vectors - 1 else last_lanes
            found = load_bits(row + 4 * (x * pixel + 16 * vector), valid)
            if found >> 16:
                return False
            write_short(bits + 2 * (x * vectors + vector), found)
    return True


@jit
def _write_counts(address: int, values: int, out: Any, line: int, width: int, channels: int) -> None:
    """Write a row of whole numbers one by one; says in the record what cannot be done."""
    start = out.start + 4 * line * (width + 1)
    write_int(start, 0)
    length, largest = 0, 0
    for i in range(width * channels):
        value = read_float(values + 4 * i)
        if not (np.float32(0.0) <= value <= np.float32(LARGEST_COUNT)) or value != np.floor(value):
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
                at, pixel = values, channels
                if codec.stride_c == 1:
                    at = codec.source + 4 * (t * codec.stride_t + n * codec.stride_n + y * codec.stride_h)
                    pixel = codec.stride_w
                else:
                    _gather_row(codec, t, n, y, values)
                binary = _find_bits(at, pixel, bits + t * step_bytes, width, channels)
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
        # Numbers other than 0 and 1 do not share time steps: each step's plane holds all of its own.
        for plane in range(out.planes):
            line = plane * rows + row
            entry = out.table + PLANE_BYTES * plane
            if read_int(entry + PLANE_TO) < 0:
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
            _zero(values, size)
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
        _zero(sums, channels)
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


@jit
def _mark_row(codec: Any, events: Any, line: int, marks: int) -> None:
    """Set to 1.0 every output pixel whose window holds an event of this input row."""
    channels, stride, wide = codec.channels, codec.stride, events.wide
    start, index = events.start + 4 * line * (codec.width + 1), line * events.row
    for x in range(codec.width):
        reach = x + codec.padding
        first = max(0, (reach - codec.kernel) // stride + 1)
        last = min(codec.out_width - 1, reach // stride)
        for i in range(index + read_int(start + 4 * x), index + read_int(start + 4 * (x + 1))):
            entry = read_int(events.index + 4 * i) if wide else read_short(events.index + 2 * i)
            for out_x in range(first, last + 1):
                write_float(marks + 4 * ((out_x - x) * channels + entry), np.float32(1.0))


@jit
def run_max_pool(address: int) -> None:
    """Events of zeros and ones -> events of their maximum over square windows."""
    codec = carray(as_pointer(address), 1, CODEC)[0]
    events = carray(as_pointer(codec.source), 1, EVENTS)[0]
    marks = codec.scratch + atomic_add(address + _NEXT_SLOT, 1) * codec.scratch_bytes
    width, height, channels = codec.out_width, codec.out_height, codec.channels
    vectors = (channels + 15) // 16
    rows, step_bytes = codec.images * height, 2 * width * vectors
    masks = marks + codec.row_bytes
    bits = masks + step_bytes + 8
    while True:
        row = atomic_add(address + _NEXT_ITEM, 1)
        if row >= rows:
            break
        n, out_y = row // height, row % height
        top = out_y * codec.stride - codec.padding
        for t in range(codec.time_steps):
            _zero(marks, width * channels)
            for plane in range(events.planes):
                if fires_at(events, plane, t):
                    for y in range(max(0, top), min(codec.height, top + codec.kernel)):
                        _mark_row(codec, events, (plane * codec.images + n) * codec.height + y, marks)
            _find_bits(marks, channels, bits + t * step_bytes, width, channels)
        emit_row(
            codec.out, 0, 0, rows, row, bits, step_bytes, masks, width, channels, 1, vectors, address + _NEED
        )


def make_encode_kernel(digest: str) -> Any:
    """`run_encode` for `compiler.compile_kernel`."""

    def encode_kernel(record):
        if digest:
            run_encode(address_of(record))

    return encode_kernel


def make_decode_kernel(digest: str) -> Any:
    """`run_decode` for `compiler.compile_kernel`."""

    def decode_kernel(record):
        if digest:
            run_decode(address_of(record))

    return decode_kernel


def make_count_kernel(digest: str) -> Any:
    """`run_count` for `compiler.compile_kernel`."""

    def count_kernel(record):
        if digest:
            run_count(address_of(record))

    return count_kernel


def make_max_pool_kernel(digest: str) -> Any:
    """`run_max_pool` for `compiler.compile_kernel`."""

    def max_pool_kernel(record):
        if digest:
            run_max_pool(address_of(record))

    return max_pool_kernel
