"""Convolution of one row of events: gather the weight rows, then sum them."""

from __future__ import annotations

from typing import Any

from sparseflow.spiking.backends.events.kernels.compiler import jit
from sparseflow.spiking.backends.events.kernels.llvm import VECTOR_BYTES
from sparseflow.spiking.backends.events.kernels.scalars import prefetch, read_int, write_int
from sparseflow.spiking.backends.events.kernels.simd import add_rows, count_parallel_sums, expand_entries


@jit
def _prefetch_row(source: Any, line: int) -> None:
    """Prefetch the start of an input row, whose address the hardware cannot predict."""
    starts = source.start + 4 * line * (source.width + 1)
    for i in range(0, 4 * (source.width + 1), VECTOR_BYTES):
        prefetch(starts + i)
    index = source.index + (4 if source.wide else 2) * line * source.row
    for i in range(0, 4 * VECTOR_BYTES, VECTOR_BYTES):
        prefetch(index + i)


@jit
def gather_weight_rows(source: Any, image: int, y: int, rows: int, ends: int) -> None:
    """Fill `rows` with the weight row numbers of the events under output row y; `image` is plane * N + n.

    `ends`, int32 [W + 1], receives the first position of each x, and last the total count.
    """
    k, stride, wide = source.kernel, source.stride, source.wide
    width, channels = source.width, source.channels
    top = y * stride - source.padding
    first, last = max(0, -top), min(k, source.height - top)
    line = image * source.height + top + first
    starts_line = 4 * (width + 1)
    index_line = (4 if wide else 2) * source.row
    starts = source.start + line * starts_line
    index = source.index + line * index_line
    for ahead in range(stride):
        if top + k + ahead < source.height:
            _prefetch_row(source, image * source.height + top + k + ahead)

    filled = rows
    write_int(ends, 0)
    for x in range(width):
        if k > 1 or (x + source.padding) % stride == 0:
            start_address, entries = starts + 4 * x, index
            row_offset = (x * (k - 1) + first) * channels
            for _ in range(first, last):
                first_entry, count = (
                    read_int(start_address),
                    read_int(start_address + 4) - read_int(start_address),
                )
                # The first sixteen are copied unconditionally, which avoids mispredicted branches.
                if wide:
                    expand_entries(entries + 4 * first_entry, row_offset, filled, 1)
                    for i in range(16, count, 16):
                        expand_entries(entries + 4 * (first_entry + i), row_offset, filled + 4 * i, 1)
                else:
                    expand_entries(entries + 2 * first_entry, row_offset, filled, 0)
                    for i in range(16, count, 16):
                        expand_entries(entries + 2 * (first_entry + i), row_offset, filled + 4 * i, 0)
                filled += 4 * count
                start_address += starts_line
                entries += index_line
                row_offset += channels
        write_int(ends + 4 * (x + 1), (filled - rows) >> 2)


def _make_convolve(vectors: int) -> Any:
    """Make `convolve_row` for weight rows of `vectors` vectors; a constant keeps the sums in registers."""
    # Long sums lose precision, so after this many rows a sum is added to the pixel's total and restarts.
    block = 16 * count_parallel_sums(vectors)

    @jit
    def convolve(
        source: Any, tile: int, rows: int, ends: int, first: int, first_step: int, out: int, out_width: int
    ) -> None:
        k, stride, width = source.kernel, source.stride, source.width
        left_column = -source.padding
        # Row numbers are relative to the weights of column 0, not of `left_column`.
        column = k * source.channels
        zero = (left_column + k) * column
        table = source.weight + tile * source.tile_bytes - left_column * column * vectors * VECTOR_BYTES
        for _ in range(out_width):
            chunk_start, end = (
                read_int(ends + 4 * max(left_column, 0)),
                read_int(ends + 4 * min(left_column + k, width)),
            )
            initial = first
            while True:
                stop = min(chunk_start + block, end)
                add_rows(rows, chunk_start, stop, table, zero, initial, out, vectors)
                if stop >= end:
                    break
                chunk_start, initial = stop, out
            left_column += stride
            zero += stride * column
            table -= stride * column * vectors * VECTOR_BYTES
            first += first_step
            out += vectors * VECTOR_BYTES

    return convolve


_convolve_1, _convolve_2, _convolve_4, _convolve_8 = (_make_convolve(vectors) for vectors in (1, 2, 4, 8))
VECTOR_CHOICES = (1, 2, 4, 8)
"""Supported tile widths, in vectors."""


@jit
def convolve_row(
    group: Any, source: Any, tile: int, rows: int, ends: int, first: int, first_step: int, out: int
) -> None:
    """out = first + convolution, one row of one tile; pixels of `first` are `first_step` bytes apart."""
    if group.vectors == 1:
        _convolve_1(source, tile, rows, ends, first, first_step, out, group.width)
    elif group.vectors == 2:
        _convolve_2(source, tile, rows, ends, first, first_step, out, group.width)
    elif group.vectors == 4:
        _convolve_4(source, tile, rows, ends, first, first_step, out, group.width)
    else:
        _convolve_8(source, tile, rows, ends, first, first_step, out, group.width)
