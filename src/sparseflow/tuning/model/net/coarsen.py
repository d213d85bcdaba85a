"""Coarsening of a sparsity pattern to a few thousand cells with features.

A matrix is covered by cells of equal size; cells that contain an element are *active*. Two passes process the
elements in slices: the first finds the smallest cell size with few enough active cells, the second counts the
elements. Memory holds one slice, the cells, and about 10 bytes for each column of the matrix.

Notation: a cell is 2**a rows by 2**b columns. A coordinate pair is *packed* into one integer with the row in
the high bits, so packed order is (row, column) order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sparseflow.core.checks import check_at_least
from sparseflow.errors import InputError

MAX_CELLS = 2**14
"""Default limit of active cells."""

BLOCK_SHAPES = ((4, 1), (1, 4), (4, 4), (16, 16))
"""Rows and columns of the blocks whose fill is a feature."""

CELL_FEATURES = (
    "log_count",
    "fill",
    "log_fill",
    "rows_occupied",
    "columns_occupied",
    *(f"fill_{rows}x{cols}" for rows, cols in BLOCK_SHAPES),
    "row_length",
    "row_place",
    "column_place",
    "diagonal_distance",
)
"""Columns of `Cells.features`; `coarsen` describes them."""

_GRID_BITS = 20
"""Initial cells are so large that there are at most 2**20 along an axis, which leaves bits for a batch index.
"""

_MAX_TABLE_CELLS = 2**22
"""Grids with at most this many cells use a lookup table; larger grids use a binary search."""

_SLICE_ELEMENTS = {"cpu": 2**19, "cuda": 2**22}
"""Elements of a slice."""


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Active cells of a matrix.

    Attributes:
        coords: Row and column in the grid of cells, sorted, shape [n, 2], int64.
        features: Shape [n, len(CELL_FEATURES)], float32.
        grid: Rows and columns of the grid.
    """

    coords: np.ndarray
    features: np.ndarray
    grid: tuple[int, int]


def coarsen(
    rows: np.ndarray,
    cols: np.ndarray,
    shape: tuple[int, int],
    *,
    max_cells: int = MAX_CELLS,
    device: str | torch.device = "cpu",
) -> Cells:
    """Cover a pattern with cells and compute the features of active cells.

    Cells of 1x1 are doubled along both axes until at most `max_cells` are active; a side that covers its axis
    stops growing. Features, with base-2 logarithms:

    ==========================  ====================================================================
    log_count                   log(elements in the cell) / 8
    fill, log_fill              elements / coordinates in the cell, and its log / 16
    rows_, columns_occupied     fraction of nonempty rows, of nonempty columns
    fill_4x1, 1x4, 4x4, 16x16   log(elements / nonempty blocks) / log(block size): 0 for one element
                                per block, 1 for full blocks. Blocks larger than the cell are
                                counted over the smallest set of full blocks around it
    row_length                  (mean log length of its nonempty rows in the full matrix, minus the
                                mean over all nonempty rows) / 4
    row_, column_place          center, from -1 to 1 along the matrix
    diagonal_distance           |row_place - column_place|
    ==========================  ====================================================================

    Args:
        rows: Row indices, integers, shape [nnz], sorted by row and column, without duplicates.
        cols: Column indices, integers, shape [nnz].
        shape: Rows and columns of the matrix.
        max_cells: Limit of active cells.
        device: Device of the computation.

    Returns:
        Active cells; empty for an empty pattern.

    Raises:
        InputError: `max_cells` is below 1, or the shape needs more than 62 bits.
    """
    check_at_least(1, max_cells=max_cells)
    if sum((extent - 1).bit_length() for extent in shape) > 62:
        raise InputError(f"`shape` (={shape}) needs more than 62 bits for row and column")
    elements = _Elements(rows=rows, cols=cols, shape=shape, device=torch.device(device))
    keys, level = _find_active_cells(elements, max_cells)
    a, b = elements.shifts(level)
    cells = _CellCover(keys=keys, shape=shape, a=a, b=b)
    features = _compute_features(cells, elements)
    coords = torch.stack([cells.rows, cells.cols], 1)
    return Cells(coords=coords.cpu().numpy(), features=features.float().cpu().numpy(), grid=cells.grid)


@dataclass(frozen=True, kw_only=True)
class _Elements:
    """Coordinates and their packing."""

    rows: np.ndarray
    cols: np.ndarray
    shape: tuple[int, int]
    device: torch.device

    @property
    def bits(self) -> int:
        """Bits of the column in a packed coordinate."""
        return (self.shape[1] - 1).bit_length()

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    def shifts(self, level: int) -> tuple[int, int]:
        """Return (a, b) after `level` doublings."""
        a, b = (min(level, (extent - 1).bit_length()) for extent in self.shape)
        return a, b

    def slices(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = _SLICE_ELEMENTS[self.device.type]
        for start in range(0, len(self.rows), step):
            rows, cols = (
                torch.from_numpy(array[start : start + step].astype(np.int64)).to(self.device)
                for array in (self.rows, self.cols)
            )
            yield rows, cols

    def length(self, row: int) -> int:
        """Return the number of elements in a row."""
        # A scalar of another dtype would make numpy convert the full array.
        value = self.rows.dtype.type(row)
        start, end = (np.searchsorted(self.rows, value, side) for side in ("left", "right"))
        return int(end - start)


def _find_active_cells(elements: _Elements, max_cells: int) -> tuple[Tensor, int]:
    """Find the smallest cells with at most `max_cells` active; return their packed keys and the doublings.

    The active cells of a prefix are active in the full matrix. When they are too many, the cells are enlarged
    and the existing keys converted, so one pass suffices.
    """
    bits, mask = elements.bits, elements.mask
    level = max(0, (max(elements.shape) - 1).bit_length() - _GRID_BITS)
    keys = torch.empty(0, dtype=torch.int64, device=elements.device)
    for rows, cols in elements.slices():
        a, b = elements.shifts(level)
        keys = _unique(torch.cat([keys, (rows >> a << bits) | (cols >> b)]))
        while len(keys) > max_cells:
            level += 1
            wider = elements.shifts(level)
            keys = _unique((keys >> bits >> wider[0] - a << bits) | ((keys & mask) >> wider[1] - b))
            a, b = wider
    return keys, level


def _unique(keys: Tensor) -> Tensor:
    # Several times as fast as torch.unique on a CPU.
    return torch.unique_consecutive(keys.sort().values)


@dataclass(frozen=True, kw_only=True)
class _CellCover:
    """Active cells of 2**a x 2**b."""

    keys: Tensor
    shape: tuple[int, int]
    a: int
    b: int

    @property
    def bits(self) -> int:
        return (self.shape[1] - 1).bit_length()

    @property
    def rows(self) -> Tensor:
        return self.keys >> self.bits

    @property
    def cols(self) -> Tensor:
        return self.keys & ((1 << self.bits) - 1)

    @property
    def grid(self) -> tuple[int, int]:
        return -(-self.shape[0] >> self.a), -(-self.shape[1] >> self.b)

    @cached_property
    def _key_index(self) -> Tensor | None:
        """Index in `keys` of each cell of the grid, int32; None for large grids."""
        if self.grid[0] * self.grid[1] > _MAX_TABLE_CELLS:
            return None
        index = torch.zeros(self.grid[0] * self.grid[1], dtype=torch.int32, device=self.keys.device)
        index[self.rows * self.grid[1] + self.cols] = torch.arange(
            len(self.keys), dtype=torch.int32, device=self.keys.device
        )
        return index

    def find(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the index in `keys` of the active cells that contain these coordinates."""
        rows, cols = rows >> self.a, cols >> self.b
        # Large grids have few active cells, mostly in bands, which makes the binary search fast.
        if self._key_index is None:
            return torch.searchsorted(self.keys, (rows << self.bits) | cols)
        return self._key_index[rows * self.grid[1] + cols]

    def enclose(self, a: int, b: int) -> tuple[_CellCover, Tensor]:
        """Return the smallest enclosing cells of at least 2**a x 2**b, and the index of each cell's enclosing
        cell.
        """
        a, b = max(a, self.a), max(b, self.b)
        if (a, b) == (self.a, self.b):
            return self, torch.arange(len(self.keys), device=self.keys.device)
        wider = (self.rows >> a - self.a << self.bits) | (self.cols >> b - self.b)
        keys, inside = torch.unique(wider, return_inverse=True)
        return _CellCover(keys=keys, shape=self.shape, a=a, b=b), inside


class _OccupiedBlocks:
    """Counts of nonempty blocks of 2**a x 2**b for each cell, or for the full blocks around a cell.

    Blocks arrive in slices, ordered by row. A block in two slices belongs to the last row of blocks of the
    first slice; `_last_block_row` has that row by column.

    Attributes:
        region_index: Index in `counts` of each cell, shape [cells], int64.
        counts: Nonempty blocks, shape [regions], int64.
    """

    def __init__(self, cells: _CellCover, a: int, b: int) -> None:
        self._a, self._b, self._bits = a, b, cells.bits
        self._regions, self.region_index = cells.enclose(a, b)
        device = cells.keys.device
        self.counts = torch.zeros(len(self._regions.keys), dtype=torch.int64, device=device)
        narrow = torch.int32 if cells.shape[0] < 2**31 else torch.int64
        self._last_block_row = torch.full((-(-cells.shape[1] >> b),), -1, dtype=narrow, device=device)
        self._last = -1

    def add(self, rows: Tensor, cols: Tensor, *, in_order: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Count the blocks that contain these elements.

        Args:
            rows: Row indices, ordered by row of blocks across calls, with at least one element of each block.
            cols: Column indices.
            in_order: Whether blocks are already sorted.

        Returns:
            First row, first column and region of the new blocks, in order.
        """
        keys = (rows >> self._a << self._bits) | (cols >> self._b)
        keys = torch.unique_consecutive(keys) if in_order else _unique(keys)
        mask = (1 << self._bits) - 1
        if len(keys) and self._last >= 0:
            num_known = int(torch.searchsorted(keys, (self._last + 1) << self._bits))
            if num_known:
                head = keys[:num_known]
                keys = torch.cat([head[self._last_block_row[head & mask] != self._last], keys[num_known:]])
        if len(keys):
            self._last = int(keys[-1] >> self._bits)
            tail = int(torch.searchsorted(keys, self._last << self._bits))
            self._last_block_row[keys[tail:] & mask] = self._last
        rows, cols = keys >> self._bits << self._a, (keys & mask) << self._b
        region = self._regions.find(rows, cols)
        self.counts += torch.bincount(region, minlength=len(self.counts))
        return rows, cols, region


def _compute_features(cells: _CellCover, elements: _Elements) -> Tensor:
    n, device = len(cells.keys), cells.keys.device
    blocks = {
        (tall, wide): _OccupiedBlocks(cells, tall.bit_length() - 1, wide.bit_length() - 1)
        for tall, wide in BLOCK_SHAPES
    }
    # The rows of a cell are blocks of one row with the width of the cell; likewise its columns.
    row_parts = _OccupiedBlocks(cells, 0, cells.b)
    column_parts = _OccupiedBlocks(cells, cells.a, 0)
    counts = torch.zeros(n, dtype=torch.int64, device=device)
    lengths = torch.zeros(n, dtype=torch.float64, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    occupied, last_row = 0, -1
    for rows, cols in elements.slices():
        counts += torch.bincount(cells.find(rows, cols), minlength=n)
        present, length = torch.unique_consecutive(rows, return_counts=True)
        # The first and the last row may continue in other slices.
        for index in {0, len(present) - 1}:
            length[index] = elements.length(int(present[index]))
        log_length = length.double().log2()
        continues = int(present[0]) == last_row
        total += log_length[int(continues) :].sum()
        occupied += len(present) - continues
        last_row = int(present[-1])

        part_rows, _, cell = row_parts.add(rows, cols, in_order=True)
        weights = log_length[torch.searchsorted(present, part_rows)]
        lengths += torch.bincount(cell, weights, minlength=n)
        # The new small blocks suffice to count the larger blocks around them.
        blocks[1, 4].add(rows, cols, in_order=True)
        fours = blocks[4, 1].add(rows, cols)[:2]
        larger = blocks[4, 4].add(*fours, in_order=True)[:2]
        blocks[16, 16].add(*larger)
        column_parts.add(*(fours if cells.a >= 2 else (rows, cols)))

    row, col = cells.rows, cells.cols
    height = torch.clamp(elements.shape[0] - (row << cells.a), max=1 << cells.a).double()
    width = torch.clamp(elements.shape[1] - (col << cells.b), max=1 << cells.b).double()
    fill = counts / (height * width)
    by_row, by_column = row_parts.counts, column_parts.counts
    row_place = (2 * (row << cells.a) + height) / elements.shape[0] - 1
    col_place = (2 * (col << cells.b) + width) / elements.shape[1] - 1
    columns = [counts.double().log2() / 8, fill, fill.log2() / 16, by_row / height, by_column / width]
    for (tall, wide), nonempty in blocks.items():
        block_elements = torch.zeros_like(nonempty.counts).index_add_(0, nonempty.region_index, counts)
        log_fill = (block_elements / nonempty.counts).log2() / np.log2(tall * wide)
        columns.append(log_fill[nonempty.region_index])
    columns.append((lengths / by_row - total / max(1, occupied)) / 4)
    columns += [row_place, col_place, (row_place - col_place).abs()]
    return torch.stack(columns, 1)
