"""Counts of nonempty blocks of a sparse matrix, computed on demand and cached."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sparseflow.tuning.schedule.formats import count_diagonals
from sparseflow.tuning.schedule.matrices import CooMatrix, are_sorted

BlockSize = tuple[int | None, int | None]
"""Rows and columns of a block; None for all."""


class BlockCounts:
    """Exact block counts of one matrix.

    Blocks are aligned to row 0 and column 0. A new block size requires a sort of the elements, about 20 ms
    for a million; sizes that are requested together share it.

    Args:
        matrix: Matrix without duplicate coordinates.
    """

    def __init__(self, matrix: CooMatrix) -> None:
        self._matrix, self.nnz = matrix, matrix.nnz
        self.shape = matrix.shape
        self._rows, self._cols = matrix.rows, matrix.cols
        if not are_sorted(self._rows, self._cols):
            order = np.lexsort((self._cols, self._rows))
            self._rows, self._cols = self._rows[order], self._cols[order]
        self._counts: dict[BlockSize, int] = {(None, None): min(self.nnz, 1), (1, 1): self.nnz}
        self._max_in_strip: dict[tuple[int, int], int] = {}
        self._padded_counts: dict[tuple[int, int | None], int] = {}
        self._diagonal_counts: dict[int, int] = {}
        self._ends: list[np.ndarray | None] = [None, None]

    def count(self, rows: int | None, cols: int | None) -> int:
        """Count the blocks of `rows` x `cols` that contain an element."""
        if (rows, cols) not in self._counts:
            self.prepare([(rows, cols)])
        return self._counts[rows, cols]

    def prepare(self, sizes: Iterable[BlockSize]) -> None:
        """Count the blocks of several sizes at once."""
        by_rows: dict[int | None, set[int | None]] = {}
        for rows, cols in sizes:
            if (rows, cols) not in self._counts:
                by_rows.setdefault(rows, set()).add(cols)
        for rows, widths in by_rows.items():
            # One more than the columns, so that adjacent keys of different block rows differ.
            row_stride = self.shape[1] + 1
            blocks = np.zeros_like(self._rows) if rows is None else self._rows // rows
            # Rows are sorted, so only the columns within a row of blocks need sorting.
            keys = blocks * row_stride + self._cols
            if rows != 1:
                keys.sort(kind="stable")
            blocks, columns = np.divmod(keys, row_stride)
            for cols in widths:
                if cols is None:
                    changes = blocks[1:] != blocks[:-1]
                else:
                    block_columns = columns // cols
                    changes = (blocks[1:] != blocks[:-1]) | (block_columns[1:] != block_columns[:-1])
                self._counts[rows, cols] = int(np.count_nonzero(changes)) + min(self.nnz, 1)

    def max_in_strip(self, axis: int, width: int) -> int:
        """Return the largest number of elements in a strip.

        Args:
            axis: 0 for strips of rows, 1 for strips of columns.
            width: Rows or columns of a strip.
        """
        if (axis, width) not in self._max_in_strip:
            starts = np.arange(0, self.shape[axis] + width, width).clip(max=self.shape[axis])
            self._max_in_strip[axis, width] = int(np.diff(self._count_before(axis)[starts]).max())
        return self._max_in_strip[axis, width]

    def count_padded(self, lanes: int, cols: int | None) -> int:
        """Count the stored positions if groups of rows are padded to their longest row.

        Args:
            lanes: Rows in a group.
            cols: Columns of the strips that are padded separately; None for one strip.
        """
        if (lanes, cols) not in self._padded_counts:
            if cols is None:
                lengths = self.count_per_line(0)
                groups = np.arange(self.shape[0]) // lanes
            else:
                strips = self._cols // cols
                first = np.ones(self.nnz, bool)
                first[1:] = (self._rows[1:] != self._rows[:-1]) | (strips[1:] != strips[:-1])
                run_starts = np.flatnonzero(first)
                lengths = np.diff(run_starts, append=self.nnz)
                groups = self._rows[run_starts] // lanes * (self.shape[1] + 1) + strips[run_starts]
                order = np.argsort(groups, kind="stable")
                lengths, groups = lengths[order], groups[order]
            starts = np.flatnonzero(np.diff(groups, prepend=-1))
            longest = np.maximum.reduceat(lengths, starts) if len(starts) else lengths
            self._padded_counts[lanes, cols] = lanes * int(longest.sum())
        return self._padded_counts[lanes, cols]

    def count_diagonals(self, rows: int) -> int:
        """Count the diagonals of all blocks of `rows` rows; see `formats.count_diagonals`."""
        if rows not in self._diagonal_counts:
            self._diagonal_counts[rows] = count_diagonals(self._matrix, rows)
        return self._diagonal_counts[rows]

    def count_per_line(self, axis: int) -> np.ndarray:
        """Count the elements of each row (0) or column (1), int64."""
        return np.diff(self._count_before(axis))

    def _count_before(self, axis: int) -> np.ndarray:
        """Count the elements before each row or column, with the total at the end."""
        ends = self._ends[axis]
        if ends is None:
            lengths = np.bincount((self._rows, self._cols)[axis], minlength=self.shape[axis])
            ends = self._ends[axis] = np.concatenate([[0], np.cumsum(lengths)])
        return ends
