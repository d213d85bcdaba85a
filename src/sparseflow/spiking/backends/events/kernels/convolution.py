"""Kernel parts that convolve one row of events: find the weight rows, then sum them."""

from __future__ import annotations

from typing import Any

from sparseflow.spiking.backends.events.kernels.compiler import jit
from sparseflow.spiking.backends.events.kernels.llvm import VECTOR_BYTES
from sparseflow.spiking.backends.events.kernels.scalars import prefetch, read_int, write_int
from sparseflow.spiking.backends.events.kernels.simd import add_rows, expand_entries, sums_side_by_side


@jit
def _prefetch_row(source: Any, line: int) -> None:
    """Ask for the beginning of an input row that is needed soon; the hardware cannot guess where it lies."""
    starts = source.start + 4 * line * (source.width + 1)
    for i in range(0, 4 * (source.width + 1), VECTOR_BYTES):
        prefetch(starts + i)
    index = source.index + (4 if source.wide else 2) * line * source.row
    for i in range(0, 4 * VECTOR_BYTES, VECTOR_BYTES):
        prefetch(index + i)


@jit
def gather(source: Any, image: int, y: int, rows: int, ends: int) -> None:
    """Fill `rows` with the weight rows of the events under output row y; `image` is plane * N + n.

    `ends`, int32 [W + 1], becomes where the events of each x begin, and at last how many there are.
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
            at, entries = starts + 4 * x, index
            add = (x * (k - 1) + first) * channels
            for _ in range(first, last):
                begin, count = read_int(at), read_int(at + 4) - read_int(at)
                # The first sixteen are copied whether there are any or not: no branch to mispredict.
                if wide:
                    expand_entries(entries + 4 * begin, add, filled, 1)
                    for i in range(16, count, 16):
                        expand_entries(entries + 4 * (begin + i), add, filled + 4 * i, 1)
                else:
                    expand_entries(entries + 2 * begin, add, filled, 0)
                    for i in range(16, count, 16):
                        expand_entries(entries + 2 * (begin + i), add, filled + 4 * i, 0)
                filled += 4 * count
                at += starts_line
                entries += index_line
                add += channels
        write_int(ends + 4 * (x + 1), (filled - rows) >> 2)


def _make_convolve(vectors: int) -> Any:
    """`convolve_row` for weight rows of `vectors` vectors, a constant: only then are the sums registers."""
    # Long sums lose digits one by one, so after this many rows a sum joins the pixel's total and starts anew.
    block = 16 * sums_side_by_side(vectors)

    @jit
    def convolve(
        source: Any, tile: int, rows: int, ends: int, first: int, first_step: int, out: int, out_width: int
    ) -> None:
        k, stride, width = source.kernel, source.stride, source.width
        left = -source.padding
        # The numbers count from the row of weights that belongs to column 0, not to column `left`.
        column = k * source.channels
        zero = (left + k) * column
        table = source.weight + tile * source.tile_bytes - left * column * vectors * VECTOR_BYTES
        for _ in range(out_width):
            begin, end = read_int(ends + 4 * max(left, 0)), read_int(ends + 4 * min(left + k, width))
            so_far = first
            while True:
                stop = min(begin + block, end)
                add_rows(rows, begin, stop, table, zero, so_far, out, vectors)
                if stop >= end:
                    break
                begin, so_far = stop, out
            left += stride
            zero += stride * column
            table -= stride * column * vectors * VECTOR_BYTES
            first += first_step
            out += vectors * VECTOR_BYTES

    return convolve


_convolve_1, _convolve_2, _convolve_4, _convolve_8 = (_make_convolve(vectors) for vectors in (1, 2, 4, 8))
VECTOR_CHOICES = (1, 2, 4, 8)
"""Tile widths, in vectors, that a convolution may have."""


@jit
def convolve_row(
    group: Any, source: Any, tile: int, rows: int, ends: int, first: int, first_step: int, out: int
) -> None:
    """out = first + convolution, one row of one tile; `first_step` lies between two pixels of `first`."""
    if group.vectors == 1:
        _convolve_1(source, tile, rows, ends, first, first_step, out, group.width)
    elif group.vectors == 2:
        _convolve_2(source, tile, rows, ends, first, first_step, out, group.width)
    elif group.vectors == 4:
        _convolve_4(source, tile, rows, ends, first, first_step, out, group.width)
    else:
        _convolve_8(source, tile, rows, ends, first, first_step, out, group.width)
