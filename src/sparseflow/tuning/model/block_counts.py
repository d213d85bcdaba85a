"""How the elements of a sparse matrix fall into blocks: counted when first asked for, and remembered."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sparseflow.tuning.schedule.matrices import Coo

Size = tuple[int | None, int | None]
"""Rows and columns of a block; None for all of them."""


class Blocks:
    """Counts of one matrix's blocks, exact.

    Blocks lie side by side from row 0 and column 0 on. A size that was not asked for before takes a sort of
    the elements, which is some 20 ms for a million; sizes that are asked for together share it.

    Args:
        matrix: Its elements, none of them twice.
    """

    def __init__(self, matrix: Coo) -> None:
        self.nnz = matrix.nnz
        self.shape = matrix.shape
        order = np.lexsort((matrix.cols, matrix.rows))
        if (order[1:] > order[:-1]).all():
            self._rows, self._cols = matrix.rows, matrix.cols
        else:
            self._rows, self._cols = matrix.rows[order], matrix.cols[order]
        self._counts: dict[Size, int] = {(None, None): min(self.nnz, 1), (1, 1): self.nnz}
        self._most: dict[tuple[int, int], int] = {}
        self._padded: dict[tuple[int, int | None], int] = {}
        self._ends: list[np.ndarray | None] = [None, None]

    def count(self, rows: int | None, cols: int | None) -> int:
        """Blocks of `rows` x `cols` that hold an element."""
        if (rows, cols) not in self._counts:
            self.prepare([(rows, cols)])
        return self._counts[rows, cols]

    def prepare(self, sizes: Iterable[Size]) -> None:
        """Count the blocks of all these sizes."""
        by_rows: dict[int | None, set[int | None]] = {}
        for rows, cols in sizes:
            if (rows, cols) not in self._counts:
                by_rows.setdefault(rows, set()).add(cols)
        for rows, some in by_rows.items():
            # One more than there are, so that neighbours in different rows of blocks never look the same.
            across = self.shape[1] + 1
            blocks = np.zeros_like(self._rows) if rows is None else self._rows // rows
            # Rows stand in order: within a row of blocks only their columns have to be merged.
            keys = blocks * across + self._cols
            if rows != 1:
                keys.sort(kind="stable")
            blocks, places = np.divmod(keys, across)
            for cols in some:
                if cols is None:
                    changes = blocks[1:] != blocks[:-1]
                else:
                    within = places // cols
                    changes = (blocks[1:] != blocks[:-1]) | (within[1:] != within[:-1])
                self._counts[rows, cols] = int(np.count_nonzero(changes)) + min(self.nnz, 1)

    def most(self, axis: int, width: int) -> int:
        """The most elements that a strip has.

        Args:
            axis: 0 for strips of rows, 1 for strips of columns.
            width: Rows or columns of a strip.
        """
        if (axis, width) not in self._most:
            starts = np.arange(0, self.shape[axis] + width, width).clip(max=self.shape[axis])
            self._most[axis, width] = int(np.diff(self._before(axis)[starts]).max())
        return self._most[axis, width]

    def side_by_side(self, lanes: int, cols: int | None) -> int:
        """Places that elements take where some neighbouring rows are stored as long as the longest of them.

        Args:
            lanes: Rows that stand side by side.
            cols: Columns of the strips in each of which that is done apart; None for one strip of all.
        """
        if (lanes, cols) not in self._padded:
            if cols is None:
                lengths = self.lengths(0)
                groups = np.arange(self.shape[0]) // lanes
            else:
                strips = self._cols // cols
                first = np.ones(self.nnz, bool)
                first[1:] = (self._rows[1:] != self._rows[:-1]) | (strips[1:] != strips[:-1])
                begins = np.flatnonzero(first)
                lengths = np.diff(begins, append=self.nnz)
                groups = self._rows[begins] // lanes * (self.shape[1] + 1) + strips[begins]
                order = np.argsort(groups, kind="stable")
                lengths, groups = lengths[order], groups[order]
            starts = np.flatnonzero(np.diff(groups, prepend=-1))
            longest = np.maximum.reduceat(lengths, starts) if len(starts) else lengths
            self._padded[lanes, cols] = lanes * int(longest.sum())
        return self._padded[lanes, cols]

    def lengths(self, axis: int) -> np.ndarray:
        """Elements of each row (0) or column (1), int64."""
        return np.diff(self._before(axis))

    def _before(self, axis: int) -> np.ndarray:
        """Elements before each row or column; one more entry than there are of them."""
        found = self._ends[axis]
        if found is None:
            lengths = np.bincount((self._rows, self._cols)[axis], minlength=self.shape[axis])
            found = self._ends[axis] = np.concatenate([[0], np.cumsum(lengths)])
        return found
