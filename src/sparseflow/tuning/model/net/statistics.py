"""What is known of a task besides its schedules, as numbers of order one: shape, rows, blocks, threads, …

The idea of matrix features is SpTFS's. What is not known is 0, and a second number says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.operators import OPERATORS

LOG2_SCALE = 16.0
_FILL_SCALE = 8.0
"""Blocks of 16 x 16 with one element each are 2**-8 full."""

_BLOCKS = ((4, 1), (4, 4), (16, 16))
_BAND_ROWS = 16
"""Rows are read in bands that no block crosses."""
_BAND = 2**20
"""Elements that are read at a time, about; so memory stays bounded whatever the matrix."""

TASK = ("rows", "cols", "nnz", "density", "row_mean", "n_cols", "threads", "float64", *OPERATORS)
"""Features that a task tells: logarithms, or 0 and 1."""

PATTERN = (
    "row_deviation", "row_longest", "rows_empty", "col_deviation", "col_longest", "cols_empty", "row_spread",
    "off_diagonal", "adjacent", *(f"fill_{rows}x{cols}" for rows, cols in _BLOCKS),
)  # fmt: skip
"""Features that take the pattern.

Elements in a row: standard deviation and most; share of rows without any; the same of columns; mean distance
from the first to the last of a row; mean distance from the diagonal; share of elements that directly follow
another; share of their blocks that elements fill.
"""

WIDTH = 2 * (len(TASK) + len(PATTERN))

OF_MATRIX = ("rows", "cols", "nnz", "density", "row_mean", *PATTERN)
"""Features that tell matrices apart; the others tell what is computed, and how."""

WITHOUT_MATRIX = np.tile([name not in OF_MATRIX for name in TASK + PATTERN], 2).astype(np.float32)
"""Shape (WIDTH,): 0 for those of the matrix and for whether they are known, 1 for the others."""


def pattern_statistics(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The features `PATTERN` of one pattern.

    Args:
        rows: Integers, (nnz,), ascending.
        cols: Integers, (nnz,), ascending within a row, none twice.
        shape: Rows and columns.

    Returns:
        float32, (len(PATTERN),).
    """
    nnz = len(rows)
    in_row = np.bincount(rows, minlength=shape[0])
    in_col = np.bincount(cols, minlength=shape[1])
    begins = np.concatenate(([0], np.cumsum(in_row)))
    used = np.flatnonzero(in_row)
    spread = (cols[begins[used + 1] - 1].astype(np.int64) - cols[begins[used]] + 1).mean() if nnz else 0.0
    distance, adjacent, blocks = 0.0, 0, np.zeros(len(_BLOCKS), np.int64)
    for some in _bands(begins):
        row, col = rows[some].astype(np.int64), cols[some].astype(np.int64)
        distance += float(np.abs(col - row * (shape[1] / shape[0])).sum())
        adjacent += int(((row[1:] == row[:-1]) & (col[1:] == col[:-1] + 1)).sum())
        for at, (high, wide) in enumerate(_BLOCKS):
            keys = np.sort((row // high) * (shape[1] // wide + 1) + col // wide)
            blocks[at] += 1 + int((keys[1:] != keys[:-1]).sum())
    many = max(nnz, 1)
    fills = [
        -math.log2(nnz / (n * high * wide)) if n else 0.0
        for n, (high, wide) in zip(blocks, _BLOCKS, strict=True)
    ]
    return np.array(
        [
            _log(in_row.std()), _log(in_row.max()), 1.0 - len(used) / shape[0],
            _log(in_col.std()), _log(in_col.max()), float((in_col == 0).mean()),
            _log(spread), _log(distance / many), adjacent / many,
            *(fill / _FILL_SCALE for fill in fills),
        ],
        np.float32,
    )  # fmt: skip


def statistics(
    *,
    operator: str,
    shape: tuple[int, int],
    nnz: int | None,
    n_cols: int | None,
    dtype: str,
    threads: int,
    pattern: np.ndarray | None = None,
) -> np.ndarray:
    """All features of a task: the values of `TASK` and `PATTERN`, then for each whether it is known.

    Args:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        shape: Rows and columns of the sparse matrix.
        nnz: Its elements; None where not known.
        n_cols: Extent of the dense axis; None where there is none.
        dtype: `"float32"` or `"float64"`.
        threads: Threads that schedules may use.
        pattern: What `pattern_statistics` gave; None where the pattern is not known.

    Returns:
        float32, (WIDTH,).

    Raises:
        InputError: There is no such operator.
    """
    if operator not in OPERATORS:
        raise InputError(f"no operator is called {operator!r}; choose one of: {', '.join(OPERATORS)}")
    rows, cols = shape
    of_task = [
        _log(rows), _log(cols),
        None if nnz is None else _log(nnz),
        None if nnz is None else (math.log2(rows * cols) - math.log2(max(nnz, 1))) / LOG2_SCALE,
        None if nnz is None else _log(nnz / rows),
        None if n_cols is None else _log(n_cols),
        _log(threads),
        float(dtype == "float64"),
        *(float(operator == name) for name in OPERATORS),
    ]  # fmt: skip
    of_pattern = [None] * len(PATTERN) if pattern is None else pattern.tolist()
    values = of_task + of_pattern
    return np.array(
        [0.0 if value is None else value for value in values] + [value is not None for value in values],
        np.float32,
    )


def _bands(begins: np.ndarray) -> Iterator[slice]:
    """Elements of whole bands of rows, about `_BAND` each, none empty."""
    row, rows = 0, len(begins) - 1
    while begins[row] < begins[-1]:
        after = int(np.searchsorted(begins, begins[row] + _BAND))
        after = min(-(-max(after, row + 1) // _BAND_ROWS) * _BAND_ROWS, rows)
        if begins[after] > begins[row]:
            yield slice(int(begins[row]), int(begins[after]))
        row = after


def _log(value: float) -> float:
    return math.log2(1.0 + value) / LOG2_SCALE
