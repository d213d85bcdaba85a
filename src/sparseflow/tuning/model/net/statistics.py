"""Features of a task besides its schedules: shape, row statistics, block fill, threads and others.

Matrix features follow SpTFS. Unknown features are 0, and a second value tells whether a feature is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sparseflow.core.checks import check_one_of
from sparseflow.tuning.schedule.operators import OPERATORS

LOG2_SCALE = 16.0
_FILL_SCALE = 8.0
"""Blocks of 16 x 16 with one element each have a fill of 2**-8."""

_BLOCK_SHAPES = ((4, 1), (4, 4), (16, 16))
_BAND_ROWS = 16
"""Bands of rows are multiples of this, so that no block crosses a band."""
_BAND_ELEMENTS = 2**20
"""Approximate number of elements that are processed at once, to bound memory."""

TASK_FEATURES = ("rows", "cols", "nnz", "density", "row_mean", "n_cols", "threads", "float64", *OPERATORS)
"""Features that do not require the pattern: logarithms or 0/1."""

PATTERN_FEATURES = (
    "row_deviation", "row_longest", "rows_empty", "col_deviation", "col_longest", "cols_empty", "row_spread",
    "off_diagonal", "adjacent", *(f"fill_{rows}x{cols}" for rows, cols in _BLOCK_SHAPES),
)  # fmt: skip
"""Features of the pattern.

Row lengths: standard deviation, maximum, fraction of empty rows; the same for columns; mean distance from the
first to the last element of a row; mean distance from the diagonal; fraction of elements directly right of
another; fill of nonempty blocks.
"""

NUM_FEATURES = 2 * (len(TASK_FEATURES) + len(PATTERN_FEATURES))

MATRIX_FEATURES = ("rows", "cols", "nnz", "density", "row_mean", *PATTERN_FEATURES)
"""Features of the matrix; the other features describe the computation."""

HIDDEN_MATRIX_MASK = np.tile(
    [name not in MATRIX_FEATURES for name in TASK_FEATURES + PATTERN_FEATURES], 2
).astype(np.float32)
"""0 for features of the matrix and their flags, 1 for others, shape [NUM_FEATURES]."""


def compute_pattern_statistics(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Compute `PATTERN_FEATURES` of a pattern.

    Args:
        rows: Row indices, integers, shape [nnz], ascending.
        cols: Column indices, integers, shape [nnz], ascending within a row, without duplicates.
        shape: Rows and columns.

    Returns:
        Shape [len(PATTERN_FEATURES)], float32.
    """
    nnz = len(rows)
    in_row = np.bincount(rows, minlength=shape[0])
    in_col = np.bincount(cols, minlength=shape[1])
    row_starts = np.concatenate(([0], np.cumsum(in_row)))
    occupied_rows = np.flatnonzero(in_row)
    spread = (
        (
            cols[row_starts[occupied_rows + 1] - 1].astype(np.int64) - cols[row_starts[occupied_rows]] + 1
        ).mean()
        if nnz
        else 0.0
    )
    distance, adjacent, blocks = 0.0, 0, np.zeros(len(_BLOCK_SHAPES), np.int64)
    for band in _iter_bands(row_starts):
        row, col = rows[band].astype(np.int64), cols[band].astype(np.int64)
        distance += float(np.abs(col - row * (shape[1] / shape[0])).sum())
        adjacent += int(((row[1:] == row[:-1]) & (col[1:] == col[:-1] + 1)).sum())
        for index, (high, wide) in enumerate(_BLOCK_SHAPES):
            keys = np.sort((row // high) * (shape[1] // wide + 1) + col // wide)
            blocks[index] += 1 + int((keys[1:] != keys[:-1]).sum())
    num_elements = max(nnz, 1)
    fills = [
        -math.log2(nnz / (n * high * wide)) if n else 0.0
        for n, (high, wide) in zip(blocks, _BLOCK_SHAPES, strict=True)
    ]
    return np.array(
        [
            _scale_log2(in_row.std()), _scale_log2(in_row.max()), 1.0 - len(occupied_rows) / shape[0],
            _scale_log2(in_col.std()), _scale_log2(in_col.max()), float((in_col == 0).mean()),
            _scale_log2(spread), _scale_log2(distance / num_elements), adjacent / num_elements,
            *(fill / _FILL_SCALE for fill in fills),
        ],
        np.float32,
    )  # fmt: skip


def compute_task_statistics(
    *,
    operator: str,
    shape: tuple[int, int],
    nnz: int | None,
    n_cols: int | None,
    dtype: str,
    threads: int,
    pattern: np.ndarray | None = None,
) -> np.ndarray:
    """Compute all features of a task: `TASK_FEATURES`, `PATTERN_FEATURES`, then whether each is known.

    Args:
        operator: `"spmm"`, `"spmv"` or `"sddmm"`.
        shape: Rows and columns of the sparse matrix.
        nnz: Number of elements; None if unknown.
        n_cols: Extent of the dense axis; None for SpMV.
        dtype: `"float32"` or `"float64"`.
        threads: Maximum number of threads.
        pattern: Result of `compute_pattern_statistics`; None if the pattern is unknown.

    Returns:
        Shape [NUM_FEATURES], float32.

    Raises:
        InputError: The operator is unknown.
    """
    check_one_of(OPERATORS, operator=operator)
    rows, cols = shape
    task_values = [
        _scale_log2(rows), _scale_log2(cols),
        None if nnz is None else _scale_log2(nnz),
        None if nnz is None else (math.log2(rows * cols) - math.log2(max(nnz, 1))) / LOG2_SCALE,
        None if nnz is None else _scale_log2(nnz / rows),
        None if n_cols is None else _scale_log2(n_cols),
        _scale_log2(threads),
        float(dtype == "float64"),
        *(float(operator == name) for name in OPERATORS),
    ]  # fmt: skip
    pattern_values = [None] * len(PATTERN_FEATURES) if pattern is None else pattern.tolist()
    values = task_values + pattern_values
    return np.array(
        [0.0 if value is None else value for value in values] + [value is not None for value in values],
        np.float32,
    )


def _iter_bands(row_starts: np.ndarray) -> Iterator[slice]:
    """Yield slices of elements in full bands of rows, about `_BAND_ELEMENTS` each."""
    row, rows = 0, len(row_starts) - 1
    while row_starts[row] < row_starts[-1]:
        end = int(np.searchsorted(row_starts, row_starts[row] + _BAND_ELEMENTS))
        end = min(-(-max(end, row + 1) // _BAND_ROWS) * _BAND_ROWS, rows)
        if row_starts[end] > row_starts[row]:
            yield slice(int(row_starts[row]), int(row_starts[end]))
        row = end


def _scale_log2(value: float) -> float:
    return math.log2(1.0 + value) / LOG2_SCALE
