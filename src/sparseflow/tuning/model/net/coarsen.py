"""A matrix's pattern, however many elements it has, as a few thousand cells with features.

A matrix is covered by cells of equal size, and those that hold an element are *active*. Two passes over the
elements, slice by slice: one finds the smallest cells of which not too many are active, the other counts
what is in them. Both hold a slice at a time, the cells, and about 10 bytes for each column of the matrix.

Notation: a cell is 2**a rows by 2**b columns; a pair of coordinates is *packed* into one integer, row above
column, whose order is that of (row, column).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sparseflow.errors import InputError

MOST = 2**14
"""Cells that are active at most, by default."""

BLOCKS = ((4, 1), (1, 4), (4, 4), (16, 16))
"""Blocks, rows by columns, of which it is told how full they are."""

CELL_FEATURES = (
    "log_count",
    "fill",
    "log_fill",
    "rows_occupied",
    "columns_occupied",
    *(f"fill_{rows}x{cols}" for rows, cols in BLOCKS),
    "row_length",
    "row_place",
    "column_place",
    "diagonal_distance",
)
"""Columns of `Cells.features`; `coarsen` says what they are."""

_GRID_BITS = 20
"""Cells start out so large that there are at most 2**20 along an axis: packed they leave room for a batch."""

_TABLE = 2**22
"""Cells of a grid that are looked up in a table; those of a larger one are searched for."""

_SLICE = {"cpu": 2**19, "cuda": 2**22}
"""Elements that are looked at together."""


@dataclass(frozen=True, kw_only=True)
class Cells:
    """The active cells of a matrix.

    Attributes:
        coords: Shape (n, 2), int64: row and column in the grid of cells, sorted by row, then column.
        features: Shape (n, len(CELL_FEATURES)), float32.
        grid: Rows and columns of cells that cover the matrix.
    """

    coords: np.ndarray
    features: np.ndarray
    grid: tuple[int, int]


def coarsen(
    rows: np.ndarray,
    cols: np.ndarray,
    shape: tuple[int, int],
    *,
    most: int = MOST,
    device: str | torch.device = "cpu",
) -> Cells:
    """Cover a pattern with cells and describe those that hold an element.

    Cells of 1x1 double along both axes until at most `most` are active; a side that covers its axis grows no
    more. The features, logarithms being to base 2:

    ==========================  ====================================================================
    log_count                   log(elements in the cell) / 8
    fill, log_fill              elements / coordinates in the cell, and log(that) / 16
    rows_, columns_occupied     share of its rows, of its columns, that hold an element
    fill_4x1, 1x4, 4x4, 16x16   log(elements / blocks that hold one) / log(block's size): 0 for one
                                element a block, 1 for full blocks. Over the smallest whole blocks
                                around the cell where these are larger than it
    row_length                  (mean log length of its occupied rows, counted over the whole matrix,
                                less the mean of all occupied rows) / 4
    row_, column_place          its centre, from -1 to 1 along the matrix
    diagonal_distance           |row_place - column_place|
    ==========================  ====================================================================

    Args:
        rows: Shape (nnz,), integers of any type; sorted, by row and then by column, nothing twice.
        cols: Likewise.
        shape: Rows and columns of the matrix.
        most: Cells that may be active.
        device: Where to count.

    Returns:
        The active cells; none where there is no element.

    Raises:
        InputError: The coordinates are no integers, out of the shape, not sorted or there twice; `most` is
            below 1; the shape is empty or needs more than 62 bits.
    """
    if most < 1:
        raise InputError(f"`most` (={most}) must be 1 or more cells")
    elements = _Elements(rows=rows, cols=cols, shape=shape, device=torch.device(device))
    keys, level = _active(elements, most)
    a, b = elements.shifts(level)
    cells = _Cover(keys=keys, shape=shape, a=a, b=b)
    features = _features(cells, elements)
    coords = torch.stack([cells.rows, cells.cols], 1)
    return Cells(coords=coords.cpu().numpy(), features=features.float().cpu().numpy(), grid=cells.grid)


@dataclass(frozen=True, kw_only=True)
class _Elements:
    """What was handed in, and how its coordinates are packed."""

    rows: np.ndarray
    cols: np.ndarray
    shape: tuple[int, int]
    device: torch.device

    def __post_init__(self) -> None:
        for name, array in (("rows", self.rows), ("cols", self.cols)):
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise InputError(
                    f"`{name}` is an array of {array.dtype} of shape {array.shape}; give a list of integers"
                )
        if len(self.rows) != len(self.cols):
            raise InputError(f"there are {len(self.rows)} `rows` and {len(self.cols)} `cols`")
        if min(self.shape) < 1:
            raise InputError(
                f"the shape {self.shape} has no coordinates; give a matrix with rows and columns"
            )
        if sum((extent - 1).bit_length() for extent in self.shape) > 62:
            raise InputError(f"the shape {self.shape} is too large: row and column need more than 62 bits")

    @property
    def bits(self) -> int:
        """Bits that the column takes when packed."""
        return (self.shape[1] - 1).bit_length()

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    def shifts(self, level: int) -> tuple[int, int]:
        """(a, b) after so many doublings."""
        a, b = (min(level, (extent - 1).bit_length()) for extent in self.shape)
        return a, b

    def slices(self) -> Iterator[tuple[Tensor, Tensor]]:
        step = _SLICE[self.device.type]
        for begin in range(0, len(self.rows), step):
            rows, cols = (
                torch.from_numpy(array[begin : begin + step].astype(np.int64)).to(self.device)
                for array in (self.rows, self.cols)
            )
            yield rows, cols

    def length(self, row: int) -> int:
        """Elements in a row."""
        # In the array's own type: of another, numpy would first convert all of the array.
        value = self.rows.dtype.type(row)
        begin, end = (np.searchsorted(self.rows, value, side) for side in ("left", "right"))
        return int(end - begin)


def _active(elements: _Elements, most: int) -> tuple[Tensor, int]:
    """The smallest cells of which at most `most` are active: these, packed and sorted, and the doublings.

    What was seen so far is active in the whole, too: once it is too much, larger cells are due, and what is
    held can be turned into them. So one pass is enough.
    """
    bits, mask = elements.bits, elements.mask
    level = max(0, (max(elements.shape) - 1).bit_length() - _GRID_BITS)
    found = torch.empty(0, dtype=torch.int64, device=elements.device)
    before = found
    for rows, cols in elements.slices():
        packed = (rows << bits) | cols
        _check(torch.cat([before, packed]), rows, cols, elements.shape)
        before = packed[-1:]
        a, b = elements.shifts(level)
        found = _unique(torch.cat([found, (rows >> a << bits) | (cols >> b)]))
        while len(found) > most:
            level += 1
            wider = elements.shifts(level)
            found = _unique((found >> bits >> wider[0] - a << bits) | ((found & mask) >> wider[1] - b))
            a, b = wider
    return found, level


def _check(packed: Tensor, rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> None:
    for name, array, extent in (("row", rows, shape[0]), ("column", cols, shape[1])):
        least, largest = (int(value) for value in torch.aminmax(array))
        if least < 0 or largest >= extent:
            wrong = least if least < 0 else largest
            raise InputError(f"an element stands in {name} {wrong} of a matrix of shape {shape}")
    if not bool((packed[1:] > packed[:-1]).all()):
        raise InputError("the elements must be sorted by row and then by column, and none be there twice")


def _unique(keys: Tensor) -> Tensor:
    # Several times as fast as torch.unique on a CPU.
    return torch.unique_consecutive(keys.sort().values)


@dataclass(frozen=True, kw_only=True)
class _Cover:
    """Cells of 2**a x 2**b: those that are active."""

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
    def _places(self) -> Tensor | None:
        """Shape (cells of the grid,), int32: each one's place in `keys`; None where that takes too much."""
        if self.grid[0] * self.grid[1] > _TABLE:
            return None
        places = torch.zeros(self.grid[0] * self.grid[1], dtype=torch.int32, device=self.keys.device)
        places[self.rows * self.grid[1] + self.cols] = torch.arange(
            len(self.keys), dtype=torch.int32, device=self.keys.device
        )
        return places

    def find(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Places in `keys` of the active cells that hold these coordinates."""
        rows, cols = rows >> self.a, cols >> self.b
        # Where the grid is large, few of its cells are active, mostly in bands: searching is quick there.
        if self._places is None:
            return torch.searchsorted(self.keys, (rows << self.bits) | cols)
        return self._places[rows * self.grid[1] + cols]

    def around(self, a: int, b: int) -> tuple[_Cover, Tensor]:
        """The smallest cells around these that are at least 2**a x 2**b, and in which of them each is."""
        a, b = max(a, self.a), max(b, self.b)
        if (a, b) == (self.a, self.b):
            return self, torch.arange(len(self.keys), device=self.keys.device)
        wider = (self.rows >> a - self.a << self.bits) | (self.cols >> b - self.b)
        keys, inside = torch.unique(wider, return_inverse=True)
        return _Cover(keys=keys, shape=self.shape, a=a, b=b), inside


class _Occupied:
    """Counts blocks of 2**a x 2**b that hold an element, cell by cell or in whole blocks around a cell.

    Blocks are met slice by slice, in the order of their rows. One that lies in two slices belongs to the last
    row of blocks in the first of them: that row is remembered, in `_met`, by column.

    Attributes:
        inside: Shape (cells,), int64: which of `counts` is a cell's.
        counts: Shape (regions,), int64.
    """

    def __init__(self, cells: _Cover, a: int, b: int) -> None:
        self._a, self._b, self._bits = a, b, cells.bits
        self._regions, self.inside = cells.around(a, b)
        device = cells.keys.device
        self.counts = torch.zeros(len(self._regions.keys), dtype=torch.int64, device=device)
        narrow = torch.int32 if cells.shape[0] < 2**31 else torch.int64
        self._met = torch.full((-(-cells.shape[1] >> b),), -1, dtype=narrow, device=device)
        self._last = -1

    def add(self, rows: Tensor, cols: Tensor, *, in_order: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Count blocks that hold these elements.

        Args:
            rows: Of elements, by rows of blocks in order from one call to the next; at least one element of
                each block.
            cols: Likewise.
            in_order: Blocks, too, come in order: no need to sort.

        Returns:
            Blocks that were not met before, in order: first row, first column, region.
        """
        keys = (rows >> self._a << self._bits) | (cols >> self._b)
        keys = torch.unique_consecutive(keys) if in_order else _unique(keys)
        mask = (1 << self._bits) - 1
        if len(keys) and self._last >= 0:
            met = int(torch.searchsorted(keys, (self._last + 1) << self._bits))
            if met:
                head = keys[:met]
                keys = torch.cat([head[self._met[head & mask] != self._last], keys[met:]])
        if len(keys):
            self._last = int(keys[-1] >> self._bits)
            tail = int(torch.searchsorted(keys, self._last << self._bits))
            self._met[keys[tail:] & mask] = self._last
        rows, cols = keys >> self._bits << self._a, (keys & mask) << self._b
        region = self._regions.find(rows, cols)
        self.counts += torch.bincount(region, minlength=len(self.counts))
        return rows, cols, region


def _features(cells: _Cover, elements: _Elements) -> Tensor:
    n, device = len(cells.keys), cells.keys.device
    blocks = {
        (tall, wide): _Occupied(cells, tall.bit_length() - 1, wide.bit_length() - 1) for tall, wide in BLOCKS
    }
    # A cell's rows are blocks of one row that are as wide as it is; so with its columns.
    row_parts = _Occupied(cells, 0, cells.b)
    column_parts = _Occupied(cells, cells.a, 0)
    counts = torch.zeros(n, dtype=torch.int64, device=device)
    lengths = torch.zeros(n, dtype=torch.float64, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    occupied, before = 0, -1
    for rows, cols in elements.slices():
        counts += torch.bincount(cells.find(rows, cols), minlength=n)
        present, length = torch.unique_consecutive(rows, return_counts=True)
        # The first and the last row may go on in other slices.
        for place in {0, len(present) - 1}:
            length[place] = elements.length(int(present[place]))
        log_length = length.double().log2()
        goes_on = int(present[0]) == before
        total += log_length[int(goes_on) :].sum()
        occupied += len(present) - goes_on
        before = int(present[-1])

        part_rows, _, cell = row_parts.add(rows, cols, in_order=True)
        weights = log_length[torch.searchsorted(present, part_rows)]
        lengths += torch.bincount(cell, weights, minlength=n)
        # What is new to small blocks is enough for larger ones around them.
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
    for (tall, wide), found in blocks.items():
        within = torch.zeros_like(found.counts).index_add_(0, found.inside, counts)
        each = (within / found.counts).log2() / np.log2(tall * wide)
        columns.append(each[found.inside])
    columns.append((lengths / by_row - total / max(1, occupied)) / 4)
    columns += [row_place, col_place, (row_place - col_place).abs()]
    return torch.stack(columns, 1)
