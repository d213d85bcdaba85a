"""Conversions between bits, events and dense rows inside kernels."""

from __future__ import annotations

from typing import Any

from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from sparseflow.spiking.backends.events.kernels.compiler import jit
from sparseflow.spiking.backends.events.kernels.llvm import ALL_LANES
from sparseflow.spiking.backends.events.kernels.planes import PLANE_BYTES, PLANE_PARENT_STEPS, PLANE_STEPS
from sparseflow.spiking.backends.events.kernels.records import EVENTS, SLACK
from sparseflow.spiking.backends.events.kernels.scalars import (
    add_one,
    as_pointer,
    atomic_max,
    count_bits,
    read_int,
    read_long,
    read_short,
    write_int,
    write_long,
)
from sparseflow.spiking.backends.events.kernels.simd import append_entries, copy_lanes


@jit
def add_plane(events: Any, line: int, width: int, values: int, channels: int, first: int, lanes: int) -> None:
    """Add 1.0 in `values` [W, lanes] for each event of row `line` with a channel in first .. first+lanes."""
    count = read_int(events.start + 4 * (line * (width + 1) + width))
    wide, row = events.wide, line * events.row
    for i in range(row, row + count):
        entry = read_int(events.index + 4 * i) if wide else read_short(events.index + 2 * i)
        if channels == lanes:
            add_one(values + 4 * entry)
        else:
            x = entry // channels
            c = entry - x * channels - first
            if 0 <= c < lanes:
                add_one(values + 4 * (x * lanes + c))


@jit
def fires_at(events: Any, plane: int, t: int) -> bool:
    """Return whether a plane's steps include t."""
    steps = events.table + PLANE_BYTES * plane + PLANE_STEPS
    lo, hi, spacing = read_int(steps), read_int(steps + 4), read_int(steps + 8)
    return lo <= t < hi and (spacing == 1 or (t - lo) % spacing == 0)


@jit
def add_step(
    events: Any,
    t: int,
    rows: int,
    row: int,
    width: int,
    values: int,
    channels: int,
    first: int,
    lanes: int,
) -> None:
    """`add_plane` for each plane that fires at step t; `row` is n * H + y and `rows` N * H."""
    for plane in range(events.planes):
        if fires_at(events, plane, t):
            add_plane(events, plane * rows + row, width, values, channels, first, lanes)


@jit
def select_plane(entry: int, bits: int, step_bytes: int, nbytes: int, masks: int) -> None:
    """Compute the bits of one plane from the bits of all time steps.

    Args:
        entry: Address of the plane's row in the plane table.
        bits: Address of a row of bits at step 0.
        step_bytes: Bytes between two steps.
        nbytes: Bytes of a row; up to seven more are read and written.
        masks: Address of the result.
    """
    steps_address, parent_address = entry + PLANE_STEPS, entry + PLANE_PARENT_STEPS
    lo, hi, spacing = read_int(steps_address), read_int(steps_address + 4), read_int(steps_address + 8)
    parent_lo, parent_hi, parent_spacing = (
        read_int(parent_address),
        read_int(parent_address + 4),
        read_int(parent_address + 8),
    )
    for i in range(0, nbytes, 8):
        plane_bits = read_long(bits + lo * step_bytes + i)
        t = lo + spacing
        while t < hi:
            plane_bits &= read_long(bits + t * step_bytes + i)
            t += spacing
        if parent_hi:
            parent_bits = read_long(bits + parent_lo * step_bytes + i)
            t = parent_lo + parent_spacing
            while t < parent_hi:
                parent_bits &= read_long(bits + t * step_bytes + i)
                t += parent_spacing
            plane_bits &= ~parent_bits
        write_long(masks + i, plane_bits)


def _make_write_row(wide: int) -> Any:
    """Make `write_row` for int32 (1) or uint16 (0) entries."""
    size = 4 if wide else 2

    @jit
    def write_plain_row(
        row_start: int, end: int, start: int, masks: int, width: int, channels: int, pairs: int, odd: int
    ) -> bool:
        """`write_row` for one tile without additions."""
        cursor, entry = row_start, 0
        for x in range(width):
            if cursor > end:
                return False
            first = entry
            for _ in range(pairs):
                fired = read_int(masks) & 0xFFFFFFFF
                append_entries(cursor, first, fired, 32, wide)
                cursor += size * count_bits(fired)
                first += 32
                masks += 4
            if odd:
                fired = read_short(masks)
                append_entries(cursor, first, fired, 16, wide)
                cursor += size * count_bits(fired)
                masks += 2
            entry += channels
            write_int(start + 4 * (x + 1), (cursor - row_start) // size)
        return True

    @jit
    def write_row(
        out: Any, posts: Any, line: int, masks: int, width: int, channels: int, tiles: int, vectors: int
    ) -> bool:
        """Write one row of one plane; return False if it does not fit."""
        post_count, tile_bytes = posts.size, 2 * vectors * width
        row_start = out.index + size * line * out.row
        start = out.start + 4 * line * (width + 1)
        end = row_start + size * (out.row - SLACK)
        # Latest start of a pixel for which all its channels fit.
        latest = end - size * 16 * tiles * vectors
        write_int(start, 0)
        if tiles == 1 and post_count == 0:
            return write_plain_row(
                row_start, latest, start, masks, width, channels, vectors >> 1, vectors & 1
            )
        cursor = row_start
        for x in range(width):
            if cursor > latest:
                return False
            entry, address = x * channels, masks + 2 * x * vectors
            for _ in range(tiles):
                for j in range(0, 2 * vectors, 2):
                    fired = read_short(address + j)
                    append_entries(cursor, entry, fired, 16, wide)
                    cursor += size * count_bits(fired)
                    entry += 16
                address += tile_bytes
            for i in range(post_count):
                post = posts[i]
                address = post.start + 4 * (line * (width + 1) + x)
                first, count = read_int(address), read_int(address + 4) - read_int(address)
                source = post.index + size * (line * post.row + first)
                if cursor + size * count > end:
                    return False
                # Sixteen are copied unconditionally, which avoids mispredicted branches.
                copy_lanes(source, cursor, ALL_LANES if wide else ALL_LANES >> 8)
                for j in range(16 * size, size * count, 16 * size):
                    copy_lanes(source + j, cursor + j, ALL_LANES if wide else ALL_LANES >> 8)
                cursor += size * count
            write_int(start + 4 * (x + 1), (cursor - row_start) // size)
        return True

    return write_row


_write_row_narrow, _write_row_wide = _make_write_row(0), _make_write_row(1)


@jit
def emit_row(
    out_address: int,
    post_list: int,
    post_count: int,
    rows: int,
    row: int,
    bits: int,
    step_bytes: int,
    masks: int,
    width: int,
    channels: int,
    tiles: int,
    vectors: int,
    required_length: int,
) -> None:
    """Write one row of all planes.

    Args:
        out_address: Address of the output's `records.EVENTS`.
        post_list: Address of event tensors of the output's shape, which are added to the bits.
        post_count: Number of these tensors.
        rows: N * H.
        row: n * H + y.
        bits: Address of the row's bits at step 0, uint16 [tiles, W, vectors].
        step_bytes: Bytes between two steps.
        masks: Address of scratch memory for one step of bits plus eight bytes.
        width: W.
        channels: C.
        tiles: See `bits`.
        vectors: See `bits`.
        required_length: Address of an int64 that receives the length of the longest row that did not fit.
    """
    out = carray(as_pointer(out_address), 1, EVENTS)[0]
    posts = carray(as_pointer(post_list), post_count, EVENTS)
    nbytes = 2 * tiles * width * vectors
    for plane in range(out.planes):
        select_plane(out.table + PLANE_BYTES * plane, bits, step_bytes, nbytes, masks)
        line = plane * rows + row
        if out.wide:
            fits = _write_row_wide(out, posts, line, masks, width, channels, tiles, vectors)
        else:
            fits = _write_row_narrow(out, posts, line, masks, width, channels, tiles, vectors)
        if not fits:
            length = SLACK + 16 * tiles * vectors
            for i in range(0, nbytes, 2):
                length += count_bits(read_short(masks + i))
            for i in range(post_count):
                length += read_int(posts[i].start + 4 * (line * (width + 1) + width))
            atomic_max(required_length, length)
