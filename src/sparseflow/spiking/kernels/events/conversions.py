"""Kernels between events and dense tensors: encode, decode, sums over space, max pooling.

A work item is one plane, that is one image at one time step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from sparseflow.spiking.kernels.events.compiler import jit
from sparseflow.spiking.kernels.events.kernels import add_events
from sparseflow.spiking.kernels.events.records import CODEC, EVENTS, SLACK, field_offset
from sparseflow.spiking.kernels.events.simd import (
    ALL_LANES,
    add_one,
    address_of,
    append_entries,
    as_pointer,
    atomic_add,
    atomic_max,
    count_bits,
    fill_lanes,
    load_bits,
    read_float,
    read_int,
    read_short,
    write_float,
    write_int,
    write_short,
)

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
def _encode_counts(address: int, row: int, out: Any, line: int, width: int, channels: int) -> None:
    """Encode a row of whole numbers one by one; says in the record what cannot be done."""
    start = out.start + 4 * line * (width + 1)
    for x in range(width + 1):
        write_int(start + 4 * x, 0)
    total, largest = 0, 0
    for i in range(width * channels):
        value = read_float(row + 4 * i)
        if not (np.float32(0.0) <= value <= np.float32(LARGEST_COUNT)) or value != np.floor(value):
            atomic_max(address + _FLAG, NOT_A_COUNT)
            return
        total += np.int64(value)
        largest = max(largest, np.int64(value))
    atomic_max(address + _FLAG, largest)
    atomic_max(address + _NEED, total)
    if total > out.row - SLACK:
        return
    filled = line * out.row
    for x in range(width):
        for entry in range(x * channels, (x + 1) * channels):
            for _ in range(np.int64(read_float(row + 4 * entry))):
                if out.wide:
                    write_int(out.index + 4 * filled, entry)
                else:
                    write_short(out.index + 2 * filled, entry)
                filled += 1
        write_int(start + 4 * (x + 1), filled - line * out.row)


@jit
def _encode_row(row: int, pixel: int, out: Any, line: int, width: int, channels: int) -> bool:
    """Encode a row of zeros and ones whose pixels lie `pixel` floats apart; False at the first other value."""
    start = out.start + 4 * line * (width + 1)
    wide = out.wide
    size = 4 if wide else 2
    begin = out.index + line * out.row * size
    place = begin
    vectors = (channels + 15) // 16
    last_lanes = ALL_LANES >> (16 * vectors - channels)
    write_int(start, 0)
    for x in range(width):
        for vector in range(vectors):
            valid = ALL_LANES if vector < vectors - 1 else last_lanes
            found = load_bits(row + 4 * (x * pixel + 16 * vector), valid)
            if found >> 16:
                return False
            if wide:
                append_entries(place, x * channels + 16 * vector, found, 1)
            else:
                append_entries(place, x * channels + 16 * vector, found, 0)
            place += size * count_bits(found)
        write_int(start + 4 * (x + 1), (place - begin) // size)
    return True


@jit
def run_encode(address: int) -> None:
    """Dense float32, any strides -> events. `flag` becomes the largest value, or NOT_A_COUNT."""
    codec = carray(as_pointer(address), 1, CODEC)[0]
    out = carray(as_pointer(codec.out), 1, EVENTS)[0]
    scratch = codec.scratch + atomic_add(address + _NEXT_SLOT, 1) * codec.scratch_bytes
    width, channels, height = codec.width, codec.channels, codec.height
    stride_c, stride_w = codec.stride_c, codec.stride_w
    while True:
        plane = atomic_add(address + _NEXT_ITEM, 1)
        if plane >= codec.time_steps * codec.images:
            break
        t, n = plane // codec.images, plane % codec.images
        for y in range(height):
            row = codec.source + 4 * (t * codec.stride_t + n * codec.stride_n + y * codec.stride_h)
            line = plane * height + y
            pixel = stride_w
            if stride_c != 1:
                # Gather the row, so that its channels lie together.
                for c in range(channels):
                    for x in range(width):
                        value = read_int(row + 4 * (c * stride_c + x * stride_w))
                        write_int(scratch + 4 * (x * channels + c), value)
                row, pixel = scratch, channels
            if not _encode_row(row, pixel, out, line, width, channels):
                for x in range(width if row != scratch else 0):
                    for c in range(channels):
                        write_int(scratch + 4 * (x * channels + c), read_int(row + 4 * (x * pixel + c)))
                _encode_counts(address, scratch, out, line, width, channels)


@jit
def run_decode(address: int) -> None:
    """Events -> dense float32 [T, N, H, W, C]."""
    codec = carray(as_pointer(address), 1, CODEC)[0]
    events = carray(as_pointer(codec.source), 1, EVENTS)[0]
    channels = codec.channels
    size = codec.width * channels
    while True:
        plane = atomic_add(address + _NEXT_ITEM, 1)
        if plane >= codec.time_steps * codec.images:
            break
        for line in range(plane * codec.height, (plane + 1) * codec.height):
            _zero(codec.out + 4 * line * size, size)
            add_events(events, line, codec.width, codec.out + 4 * line * size, channels, 0, channels)


@jit
def run_count(address: int) -> None:
    """Events -> float32 [T, N, C]: sums over space."""
    codec = carray(as_pointer(address), 1, CODEC)[0]
    events = carray(as_pointer(codec.source), 1, EVENTS)[0]
    width, channels, wide = codec.width, codec.channels, events.wide
    while True:
        plane = atomic_add(address + _NEXT_ITEM, 1)
        if plane >= codec.time_steps * codec.images:
            break
        sums = codec.out + 4 * plane * channels
        _zero(sums, channels)
        for line in range(plane * codec.height, (plane + 1) * codec.height):
            first = line * events.row
            for i in range(first, first + read_int(events.start + 4 * (line * (width + 1) + width))):
                entry = read_int(events.index + 4 * i) if wide else read_short(events.index + 2 * i)
                add_one(sums + 4 * (entry % channels))


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
    out = carray(as_pointer(codec.out), 1, EVENTS)[0]
    marks = codec.scratch + atomic_add(address + _NEXT_SLOT, 1) * codec.scratch_bytes
    while True:
        plane = atomic_add(address + _NEXT_ITEM, 1)
        if plane >= codec.time_steps * codec.images:
            break
        for out_y in range(codec.out_height):
            _zero(marks, codec.out_width * codec.channels)
            top = out_y * codec.stride - codec.padding
            for y in range(max(0, top), min(codec.height, top + codec.kernel)):
                _mark_row(codec, events, plane * codec.height + y, marks)
            line = plane * codec.out_height + out_y
            _encode_row(marks, codec.channels, out, line, codec.out_width, codec.channels)


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
