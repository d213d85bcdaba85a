"""Group kernel: convolutions of events, residuals, neuron and output events, one output row at a time.

A work item is one *tile* of output channels and one *block* of output rows of one image. For each row and
plane of events (`planes.py`; a plane stands for one or several time steps):

1.  `gather_weight_rows` joins the events of the k input rows under the output row into one list, ordered by
x:
    each entry becomes the number of its weight row. Weights are laid out as [dx][dy][c][lanes], so the events
    under one output pixel, of any dy and dx, are one contiguous piece of that list.
2.  `convolve_row` sums the weight rows of each pixel's piece in registers (`simd.add_rows`).
3.  When a time step is complete, `fire` steps the neurons of the row and emits spikes as bits.

The thread that finishes the last tile of a block converts its bits to events (or dense spikes). Membranes,
currents and row numbers stay in a few kilobytes of scratch memory, so main memory holds events only.

Tiles are the slower index of the work items: all threads use the same slice of the weights, which stays in
their level-2 caches for layers of any size.
"""

from __future__ import annotations

from typing import Any

from numba import carray  # pyright: ignore[reportPrivateImportUsage]

from sparseflow.spiking.backends.events.kernels.compiler import jit
from sparseflow.spiking.backends.events.kernels.convolution import convolve_row, gather_weight_rows
from sparseflow.spiking.backends.events.kernels.emit import add_step, emit_row
from sparseflow.spiking.backends.events.kernels.llvm import ALL_LANES, VECTOR_BYTES
from sparseflow.spiking.backends.events.kernels.planes import (
    MAX_SHARED,
    PLANE_BYTES,
    PLANE_PARENT_SLOT,
    PLANE_SLOT,
)
from sparseflow.spiking.backends.events.kernels.records import DENSE, EVENTS, GROUP, SOURCE, get_field_offset
from sparseflow.spiking.backends.events.kernels.scalars import (
    address_of,
    as_pointer,
    atomic_add,
    read_int,
    read_short,
    write_int,
    write_short,
)
from sparseflow.spiking.backends.events.kernels.simd import (
    add_lanes,
    copy_lanes,
    fill_lanes,
    fire,
    store_bits,
)

OUT_EVENTS, OUT_SPIKES, OUT_SUMS, OUT_EVENTS_RETRY = range(4)
"""Modes of the group kernel: events; dense spikes; sums without a neuron; events from the last run's bits."""

_NEXT_ITEM = get_field_offset(GROUP, "next_item")
_NEXT_SLOT = get_field_offset(GROUP, "next_slot")
_NEED = get_field_offset(GROUP, "need")


@jit
def _valid_lanes(group: Any, vector: int) -> int:
    """Bits of the lanes of channel vector number `vector` that are channels of the layer."""
    if vector < group.used_vectors - 1:
        return ALL_LANES
    return group.last_lanes if vector == group.used_vectors - 1 else 0


@jit
def _add_dense(group: Any, tile: int, first: int, first_step: int, data: int, out: int) -> None:
    """out = first + the row [W, C] at `data`; pixels of `first` are `first_step` bytes apart."""
    vectors = group.vectors
    for j in range(vectors):
        valid = _valid_lanes(group, tile * vectors + j)
        for x in range(group.width):
            from_ = data + 4 * x * group.channels + VECTOR_BYTES * (tile * vectors + j)
            to = out + VECTOR_BYTES * (x * vectors + j)
            add_lanes(first + x * first_step + VECTOR_BYTES * j, from_, to, valid)


@jit
def _copy_out(group: Any, tile: int, values: int, data: int) -> None:
    """Copy `values` [W, 16 * vectors] to one row [W, C] at `data`."""
    for x in range(group.width):
        for j in range(group.vectors):
            vector = tile * group.vectors + j
            valid = _valid_lanes(group, vector)
            if valid:
                to = data + 4 * x * group.channels + VECTOR_BYTES * vector
                copy_lanes(values + VECTOR_BYTES * (x * group.vectors + j), to, valid)


@jit
def _load_membrane(group: Any, tile: int, data: int, membrane: int) -> None:
    """Fill `membrane` [W, 16 * vectors] from the row [W, C] at `data`; the rest value if `data` is 0."""
    vectors, v_rest = group.vectors, group.rest
    for i in range(group.width * vectors):
        fill_lanes(membrane + VECTOR_BYTES * i, v_rest)
    if data:
        for j in range(vectors):
            valid = _valid_lanes(group, tile * vectors + j)
            for x in range(group.width):
                from_ = data + 4 * x * group.channels + VECTOR_BYTES * (tile * vectors + j)
                copy_lanes(from_, membrane + VECTOR_BYTES * (x * vectors + j), valid)


@jit
def _fire_row(group: Any, tile: int, current: int, membrane: int, bits: int) -> None:
    """Run one time step of a row of neurons; `bits` is uint16 [W, vectors]."""
    alpha, beta, delta, threshold = group.alpha, group.beta, group.delta, group.threshold
    reset_value, reset_mode, vectors = group.reset_value, group.reset_mode, group.vectors
    for i in range(group.width * vectors):
        offset = VECTOR_BYTES * i
        write_short(
            bits + 2 * i,
            fire(membrane + offset, current + offset, alpha, beta, delta, threshold, reset_value, reset_mode),
        )
    # Padding lanes hold zeros, which may fire too.
    for j in range(vectors):
        valid = _valid_lanes(group, tile * vectors + j)
        if valid != ALL_LANES:
            for x in range(group.width):
                offset = bits + 2 * (x * vectors + j)
                write_short(offset, read_short(offset) & valid)


@jit
def _convolve_step(
    group: Any,
    source: Any,
    tile: int,
    n: int,
    y: int,
    rows: int,
    ends: int,
    cursor: int,
    shared: int,
    constant_start: bool,
    first: int,
    first_step: int,
    out: int,
) -> None:
    """out = first + convolution of one time step.

    Visits the planes after the last step's plane up to this step's plane. Sums of planes that later steps
    share stay at `shared`, MAX_SHARED rows plus one spare. They start from `first` if it is the same at all
    steps (`constant_start`), otherwise from zero.
    """
    pixel_bytes = VECTOR_BYTES * group.vectors
    row_bytes = group.width * pixel_bytes
    plane = read_int(cursor)
    while True:
        entry = source.table + PLANE_BYTES * plane
        parent_slot, slot = read_int(entry + PLANE_PARENT_SLOT), read_int(entry + PLANE_SLOT)
        from_, step = first, first_step
        if parent_slot >= 0:
            from_, step = shared + parent_slot * row_bytes, pixel_bytes
        elif slot >= 0 and not constant_start:
            zeros = source.kernel * source.kernel * source.channels * pixel_bytes
            from_, step = source.weight + tile * source.tile_bytes + zeros, 0
        complete = slot < 0 and (constant_start or parent_slot < 0)
        if slot < 0:
            slot = MAX_SHARED
        to = out if complete else shared + slot * row_bytes
        gather_weight_rows(source, plane * group.images + n, y, rows, ends)
        convolve_row(group, source, tile, rows, ends, from_, step, to)
        plane += 1
        if slot == MAX_SHARED:
            break
    write_int(cursor, plane)
    if not complete:
        for x in range(group.width):
            for i in range(x * pixel_bytes, (x + 1) * pixel_bytes, VECTOR_BYTES):
                add_lanes(first + x * first_step + i - x * pixel_bytes, to + i, out + i, ALL_LANES)


@jit
def _run_row(group: Any, tile: int, n: int, y: int, scratch: int) -> None:
    """Run all time steps of one output row of one tile."""
    lanes = 16 * group.vectors
    row_bytes = 4 * lanes * group.width
    pixel_bytes = 4 * lanes
    rows = scratch
    base = scratch + group.rows_bytes
    current = base + row_bytes
    membrane = current + row_bytes
    shared = membrane + row_bytes
    cursors = shared + (MAX_SHARED + 1) * group.sources * row_bytes
    ends = cursors + VECTOR_BYTES * group.sources
    sources = carray(as_pointer(group.source_list), group.sources, SOURCE)
    skips = carray(as_pointer(group.skip_list), group.skips, EVENTS)
    denses = carray(as_pointer(group.dense_list), group.denses, DENSE)
    pixels = 4 * (n * group.height + y) * group.width * group.channels
    out_rows, out_row = group.images * group.height, n * group.height + y

    # `first` is the start of the sum: the bias of each pixel, plus what is constant over time.
    first, first_step = group.bias + tile * pixel_bytes, 0
    for i in range(group.denses):
        if denses[i].time == 0:
            _add_dense(group, tile, first, first_step, denses[i].data + pixels, base)
            first, first_step = base, pixel_bytes
    if group.mode != OUT_SUMS:
        _load_membrane(group, tile, group.v_in + pixels if group.v_in else 0, membrane)
    for i in range(group.sources):
        write_int(cursors + VECTOR_BYTES * i, 0)

    for t in range(group.time_steps):
        partial, step = first, first_step
        for i in range(group.sources):
            source_shared, cursor = shared + (MAX_SHARED + 1) * row_bytes * i, cursors + VECTOR_BYTES * i
            _convolve_step(
                group,
                sources[i],
                tile,
                n,
                y,
                rows,
                ends,
                cursor,
                source_shared,
                i == 0,
                partial,
                step,
                current,
            )
            partial, step = current, pixel_bytes
        for i in range(group.denses):
            if denses[i].time != 0:
                _add_dense(
                    group, tile, partial, step, denses[i].data + 4 * t * denses[i].time + pixels, current
                )
                partial, step = current, pixel_bytes
        if group.skips and partial != current:
            for i in range(0, row_bytes, VECTOR_BYTES):
                copy_lanes(partial + i, current + i, ALL_LANES)
            partial = current
        for i in range(group.skips):
            add_step(
                skips[i], t, out_rows, out_row, group.width, current, group.channels, tile * lanes, lanes
            )
        line = t * out_rows + out_row
        if group.mode == OUT_SUMS:
            _copy_out(group, tile, partial, group.out + 4 * line * group.width * group.channels)
        else:
            vectors = group.width * group.vectors
            bits = group.bits + 2 * (line * group.tiles + tile) * vectors
            _fire_row(group, tile, partial, membrane, bits)
    if group.v_out and group.mode != OUT_SUMS:
        _copy_out(group, tile, membrane, group.v_out + pixels)


@jit
def _emit_spikes(group: Any, t: int, n: int, y: int) -> None:
    """Convert one row's bits, plus the additions to the output, to dense float32."""
    posts = carray(as_pointer(group.post_list), group.posts, EVENTS)
    width, vectors, tiles, channels = group.width, group.vectors, group.tiles, group.channels
    line = (t * group.images + n) * group.height + y
    row = group.out + 4 * line * width * channels
    for tile in range(tiles):
        for j in range(vectors):
            vector = tile * vectors + j
            valid = _valid_lanes(group, vector)
            bits = group.bits + 2 * ((line * tiles + tile) * width * vectors + j)
            for x in range(width):
                fired = read_short(bits + 2 * x * vectors)
                store_bits(fired, row + 4 * x * channels + VECTOR_BYTES * vector, valid)
    rows = group.images * group.height
    for i in range(group.posts):
        add_step(posts[i], t, rows, n * group.height + y, width, row, channels, 0, channels)


@jit
def _emit(group: Any, address: int, n: int, y: int, masks: int) -> None:
    """Convert one row's bits at all time steps to the output."""
    if group.mode == OUT_SPIKES:
        for t in range(group.time_steps):
            _emit_spikes(group, t, n, y)
        return
    rows, row = group.images * group.height, n * group.height + y
    row_bytes = 2 * group.tiles * group.width * group.vectors
    emit_row(
        group.out,
        group.post_list,
        group.posts,
        rows,
        row,
        group.bits + row * row_bytes,
        rows * row_bytes,
        masks,
        group.width,
        group.channels,
        group.tiles,
        group.vectors,
        address + _NEED,
    )


@jit
def run_group(address: int) -> None:
    """Process work items of the `records.GROUP` at `address` until none is left."""
    group = carray(as_pointer(address), 1, GROUP)[0]
    scratch = group.scratch + atomic_add(address + _NEXT_SLOT, 1) * group.scratch_bytes
    per_image = (group.height + group.block_rows - 1) // group.block_rows
    tiles = 1 if group.mode == OUT_EVENTS_RETRY else group.tiles
    while True:
        item = atomic_add(address + _NEXT_ITEM, 1)
        if item >= tiles * group.blocks:
            break
        tile, block = item // group.blocks, item % group.blocks
        n = block // per_image
        first = (block - n * per_image) * group.block_rows
        last = min(first + group.block_rows, group.height)
        if group.mode != OUT_EVENTS_RETRY:
            for y in range(first, last):
                _run_row(group, tile, n, y, scratch)
        if group.mode == OUT_SUMS or atomic_add(group.finished + 8 * block, 1) != tiles - 1:
            continue
        for y in range(first, last):
            _emit(group, address, n, y, scratch + group.rows_bytes - group.masks_bytes)


def make_group_kernel(digest: str) -> Any:
    """Make the group kernel for `compile_kernel`; its record is `records.GROUP`."""

    def group_kernel(record):
        if digest:
            run_group(address_of(record))

    return group_kernel
