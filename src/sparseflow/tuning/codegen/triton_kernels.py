"""Triton kernels of SpMM and SDDMM for GPUs.

Sums are float32, or float64 for float64 inputs. A program computes a tile of the output or of the elements:

================  ==========================================================================================
`spmm_segments`   one segment of a row, several elements at a time; long rows have several segments
`spmm_rows`       several rows, one element of each at a time; for short rows of similar lengths
`spmm_panels`     several rows with the same columns, so that they share the rows of B
`spmm_blocks`     one row of dense blocks, on tensor cores
`spmm_extrema`    one row of the largest or smallest products
`sddmm_segments`  the elements of one segment of a row
`sddmm_elements`  elements of any rows; for short rows
================  ==========================================================================================

Two constants state what is true of the shapes: WIDE, that offsets into B or C exceed 32 bits, and EVEN, that
tiles divide the columns, which then need no masks.
"""

# Triton compiles the functions; to pyright its operators have no types.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def spmm_segments(
    rows, starts, ends, shared, crd, val, dense, out, num_cols,
    STEP: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute C = A B by segments of rows.

    Args:
        rows: Row of each segment, int32; unused if each row is one segment.
        starts, ends: First element of each segment, and the end, int32.
        shared: Whether the row has other segments, int8; unused if each row is one segment.
        crd, val: Columns (int32) and values of A.
        dense: B, row-major.
        out: C, row-major; float32 zeros if rows are split, because segments add to them.
        num_cols: Columns of B and C.
        STEP: Elements of one step.
        TILE: Columns of the tile.
        SPLIT: Whether long rows have several segments.
    """
    segment = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + segment).to(tl.int64) if SPLIT else segment
    first, end = tl.load(starts + segment), tl.load(ends + segment)
    lanes = tl.arange(0, STEP)
    inside = (columns < num_cols) | EVEN
    sums = tl.zeros([STEP, TILE], tl.float64 if val.dtype.element_ty == tl.float64 else tl.float32)
    for position in range(first, end, STEP):
        elements = position + lanes
        present = elements < end
        k = tl.load(crd + elements, mask=present, other=0)
        k = k.to(tl.int64) if WIDE else k
        a = tl.load(val + elements, mask=present, other=0.0)
        b = tl.load(
            dense + k[:, None] * num_cols + columns[None, :],
            mask=present[:, None] & inside[None, :],
            other=0.0,
        )
        sums += a.to(sums.dtype)[:, None] * b.to(sums.dtype)
    total = tl.sum(sums, 0)
    target = out + row * num_cols + columns
    if SPLIT:
        if tl.load(shared + segment) != 0:
            tl.atomic_add(target, total, mask=inside, sem="relaxed")
        else:
            tl.store(target, total, mask=inside)
    else:
        tl.store(target, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def spmm_rows(
    pos, crd, val, dense, out, num_rows, num_cols,
    ROWS: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute C = A B by tiles of rows and columns.

    Args:
        pos: First element of each row, and the end, int32 [num_rows + 1].
        crd, val, dense, out, num_cols: As in `spmm_segments`.
        num_rows: Rows of A.
        ROWS: Rows of the tile.
        TILE: Columns of the tile.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_row, inside = rows < num_rows, (columns < num_cols) | EVEN
    first = tl.load(pos + rows, mask=is_row, other=0)
    length = tl.load(pos + rows + 1, mask=is_row, other=0) - first
    sums = tl.zeros([ROWS, TILE], tl.float64 if val.dtype.element_ty == tl.float64 else tl.float32)
    for step in range(0, tl.max(length, 0)):
        present = step < length
        k = tl.load(crd + first + step, mask=present, other=0)
        k = k.to(tl.int64) if WIDE else k
        a = tl.load(val + first + step, mask=present, other=0.0)
        b = tl.load(
            dense + k[:, None] * num_cols + columns[None, :],
            mask=present[:, None] & inside[None, :],
            other=0.0,
        )
        sums += a.to(sums.dtype)[:, None] * b.to(sums.dtype)
    tl.store(
        out + rows.to(tl.int64)[:, None] * num_cols + columns[None, :],
        sums.to(out.dtype.element_ty),
        mask=is_row[:, None] & inside[None, :],
    )


@triton.jit
def spmm_panels(
    pos, crd, val, dense, out, num_rows, num_cols,
    ROWS: tl.constexpr, STEP: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute C = A B from panels of ROWS rows, each with the columns that any of its rows has.

    Args:
        pos: First column of each panel, and the end, int32.
        crd: Columns of the panels, int32.
        val: Values of the rows of a panel, for each of its columns.
        dense, out, num_cols: As in `spmm_segments`.
        num_rows: Rows of A.
        ROWS: Rows of a panel.
        STEP: Columns of one step.
        TILE: Columns of the tile.
    """
    panel = tl.program_id(0)
    lanes = tl.arange(0, ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (columns < num_cols) | EVEN
    first, end = tl.load(pos + panel), tl.load(pos + panel + 1)
    sums = tl.zeros([ROWS, TILE], tl.float64 if val.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(first, end, STEP):
        for step in tl.static_range(STEP):
            position = start + step
            present = position < end
            k = tl.load(crd + position, mask=present, other=0).to(tl.int64)
            a = tl.load(val + position.to(tl.int64) * ROWS + lanes, mask=present, other=0.0)
            b = tl.load(dense + k * num_cols + columns, mask=inside & present, other=0.0)
            sums += a.to(sums.dtype)[:, None] * b.to(sums.dtype)[None, :]
    rows = panel * ROWS + lanes
    tl.store(
        out + rows.to(tl.int64)[:, None] * num_cols + columns[None, :],
        sums.to(out.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & inside[None, :],
    )


@triton.jit
def spmm_blocks(
    pos, crd, val, dense, out, num_rows, num_inner, num_cols,
    ROWS: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute C = A B from dense blocks of A [ROWS, INNER].

    Args:
        pos: First block of each row of blocks, and the end, int32.
        crd: Column of each block, in blocks, int32.
        val: Blocks, row-major.
        dense, out, num_cols: As in `spmm_segments`.
        num_rows: Rows of A.
        num_inner: Columns of A.
        ROWS, INNER, TILE: Extents of the product of two tiles.
        PRECISION: Precision of products of float32: `"ieee"` or `"tf32"`.
    """
    block_row = tl.program_id(0)
    rows = block_row * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inner = tl.arange(0, INNER)
    inside = (columns < num_cols) | EVEN
    first, end = tl.load(pos + block_row), tl.load(pos + block_row + 1)
    block = val + first.to(tl.int64) * ROWS * INNER + tl.arange(0, ROWS)[:, None] * INNER + inner[None, :]
    sums = tl.zeros([ROWS, TILE], tl.float32)
    for position in range(first, end):
        k = tl.load(crd + position).to(tl.int64) * INNER + inner
        a = tl.load(block)
        b = tl.load(
            dense + k[:, None] * num_cols + columns[None, :],
            mask=(k < num_inner)[:, None] & inside[None, :],
            other=0.0,
        )
        sums = tl.dot(a, b, sums, input_precision=PRECISION)
        block += ROWS * INNER
    tl.store(
        out + rows.to(tl.int64)[:, None] * num_cols + columns[None, :],
        sums.to(out.dtype.element_ty),
        mask=(rows < num_rows)[:, None] & inside[None, :],
    )


@triton.jit
def spmm_extrema(
    pos, crd, val, dense, out, element, num_cols,
    TILE: tl.constexpr, EVEN: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Find the largest or smallest products of every row; see `extrema.find_extrema`.

    Args:
        pos: First element of each row, and the end, int32.
        crd, val, dense, out, num_cols: As in `spmm_segments`.
        element: Number within its row of the first element with each product, row-major; -1 in empty rows.
        TILE: Columns of the tile.
        LARGEST: Whether to find the largest products.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = (columns < num_cols) | EVEN
    first, end = tl.load(pos + row), tl.load(pos + row + 1)
    best = tl.zeros([TILE], tl.float64 if val.dtype.element_ty == tl.float64 else tl.float32)
    number = tl.full([TILE], -1, tl.int32)
    for position in range(first, end):
        k = tl.load(crd + position).to(tl.int64)
        b = tl.load(dense + k * num_cols + columns, mask=inside, other=0.0)
        product = tl.load(val + position).to(best.dtype) * b.to(best.dtype)
        better = (product > best if LARGEST else product < best) | (product != product) | (position == first)
        best = tl.where(better, product, best)
        number = tl.where(better, position - first, number)
    tl.store(out + row * num_cols + columns, best.to(out.dtype.element_ty), mask=inside)
    tl.store(element + row * num_cols + columns, number.to(element.dtype.element_ty), mask=inside)


@triton.jit
def sddmm_segments(
    rows, starts, ends, crd, val, x, y, out, num_cols,
    STEP: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
    ONCE: tl.constexpr,
):  # fmt: skip
    """Compute D = A * (X Yᵀ) at the elements of A, by segments of rows.

    Args:
        rows, starts, ends, crd, val: As in `spmm_segments`.
        x, y: Dense matrices of `num_cols` columns, row-major.
        out: Values of D, in the order of those of A.
        num_cols: Columns of X and Y.
        STEP: Elements of one step.
        TILE: Columns of one step.
        SPLIT: Whether long rows have several segments.
        ONCE: Whether one step covers all columns, so that the row of X is read once.
    """
    segment = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + segment).to(tl.int64) if SPLIT else segment
    first, end = tl.load(starts + segment), tl.load(ends + segment)
    lanes, tile = tl.arange(0, STEP), tl.arange(0, TILE)
    x_row = tl.load(x + row * num_cols + tile, mask=(tile < num_cols) | EVEN, other=0.0)
    for position in range(first, end, STEP):
        elements = position + lanes
        present = elements < end
        j = tl.load(crd + elements, mask=present, other=0)
        j = j.to(tl.int64) if WIDE else j
        sums = tl.zeros([STEP, TILE], tl.float64 if val.dtype.element_ty == tl.float64 else tl.float32)
        for start in range(0, num_cols, TILE):
            columns = start + tile
            inside = (columns < num_cols) | EVEN
            if not ONCE:
                x_row = tl.load(x + row * num_cols + columns, mask=inside, other=0.0)
            y_rows = tl.load(
                y + j[:, None] * num_cols + columns[None, :],
                mask=present[:, None] & inside[None, :],
                other=0.0,
            )
            sums += x_row.to(sums.dtype)[None, :] * y_rows.to(sums.dtype)
        a = tl.load(val + elements, mask=present, other=0.0)
        total = tl.sum(sums, 1) * a.to(sums.dtype)
        tl.store(out + elements, total.to(out.dtype.element_ty), mask=present)


@triton.jit
def sddmm_elements(
    rows, crd, val, x, y, out, num_elements, num_cols,
    STEP: tl.constexpr, TILE: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute D = A * (X Yᵀ) at the elements of A, in any rows.

    Args:
        rows, crd, val: Rows, columns (int32) and values of the elements of A.
        x, y: Dense matrices of `num_cols` columns, row-major.
        out: Values of D, in the order of those of A.
        num_elements: Elements of A.
        num_cols: Columns of X and Y.
        STEP: Elements of one program.
        TILE: Columns of one step.
    """
    elements = tl.program_id(0) * STEP + tl.arange(0, STEP)
    present = elements < num_elements
    i = tl.load(rows + elements, mask=present, other=0)
    j = tl.load(crd + elements, mask=present, other=0)
    i = i.to(tl.int64) if WIDE else i
    j = j.to(tl.int64) if WIDE else j
    sums = tl.zeros([STEP, TILE], tl.float64 if val.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(0, num_cols, TILE):
        columns = start + tl.arange(0, TILE)
        mask = present[:, None] & ((columns < num_cols) | EVEN)[None, :]
        x_rows = tl.load(x + i[:, None] * num_cols + columns[None, :], mask=mask, other=0.0)
        y_rows = tl.load(y + j[:, None] * num_cols + columns[None, :], mask=mask, other=0.0)
        sums += x_rows.to(sums.dtype) * y_rows.to(sums.dtype)
    a = tl.load(val + elements, mask=present, other=0.0)
    total = tl.sum(sums, 1) * a.to(sums.dtype)
    tl.store(out + elements, total.to(out.dtype.element_ty), mask=present)
