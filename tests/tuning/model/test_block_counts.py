"""Block counts of patterns."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.tuning.model.block_counts import BlockCounts
from sparseflow.tuning.schedule.matrices import CooMatrix


@st.composite
def patterns(draw: st.DrawFn) -> CooMatrix:
    shape = (draw(st.integers(1, 40)), draw(st.integers(1, 40)))
    share = draw(st.sampled_from([0.0, 0.02, 0.3, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, cols = np.nonzero(rng.random(shape) < share)
    return CooMatrix(rows=rows, cols=cols, values=np.ones(len(rows), np.float32), shape=shape)


sizes = st.none() | st.integers(1, 64)


@settings(max_examples=40)
@given(patterns(), sizes, sizes)
def test_count_matches_dense(pattern: CooMatrix, rows: int | None, cols: int | None) -> None:
    held_out = {
        (row // rows if rows else 0, col // cols if cols else 0)
        for row, col in zip(pattern.rows, pattern.cols, strict=True)
    }
    assert BlockCounts(pattern).count(rows, cols) == len(held_out)


@settings(max_examples=40)
@given(patterns(), st.sampled_from([0, 1]), st.integers(1, 64))
def test_max_in_strip_matches_dense(pattern: CooMatrix, axis: int, width: int) -> None:
    strips = (pattern.rows, pattern.cols)[axis] // width
    assert BlockCounts(pattern).max_in_strip(axis, width) == np.bincount(strips, minlength=1).max()


@settings(max_examples=40)
@given(patterns(), st.sampled_from([2, 4, 16]), sizes)
def test_count_padded_matches_dense(pattern: CooMatrix, lanes: int, cols: int | None) -> None:
    longest: dict[tuple[int, int], int] = {}
    for strip in range(-(-pattern.shape[1] // cols) if cols else 1):
        inside = pattern.cols // cols == strip if cols else np.ones(pattern.nnz, bool)
        lengths = np.bincount(pattern.rows[inside], minlength=pattern.shape[0])
        for row, length in enumerate(lengths):
            group = row // lanes, strip
            longest[group] = max(longest.get(group, 0), int(length))
    assert BlockCounts(pattern).count_padded(lanes, cols) == lanes * sum(longest.values())


@settings(max_examples=40)
@given(patterns(), st.sampled_from([2, 4, 16]))
def test_count_diagonals_matches_dense(pattern: CooMatrix, rows: int) -> None:
    pairs = zip(pattern.rows.tolist(), pattern.cols.tolist(), strict=True)
    diagonals = {(row // rows, col - row) for row, col in pairs}
    assert BlockCounts(pattern).count_diagonals(rows) == len(diagonals)


def test_count_per_line_matches_dense() -> None:
    rows, cols = np.array([0, 0, 2]), np.array([1, 3, 1])
    blocks = BlockCounts(CooMatrix(rows=rows, cols=cols, values=np.ones(3), shape=(4, 4)))
    assert blocks.count_per_line(0).tolist() == [2, 0, 1, 0]
    assert blocks.count_per_line(1).tolist() == [0, 2, 0, 1]


def test_counts_are_independent_of_order() -> None:
    rng = np.random.default_rng(0)
    rows, cols = np.nonzero(rng.random((50, 60)) < 0.1)
    sorted_ = CooMatrix(rows=rows, cols=cols, values=np.ones(len(rows)), shape=(50, 60))
    order = rng.permutation(len(rows))
    mixed = replace(sorted_, rows=rows[order], cols=cols[order])
    for size in itertools.product((None, 1, 4, 7), repeat=2):
        assert BlockCounts(mixed).count(*size) == BlockCounts(sorted_).count(*size)
    assert BlockCounts(mixed).count_padded(4, 8) == BlockCounts(sorted_).count_padded(4, 8)


def test_prepare_matches_single_counts() -> None:
    rng = np.random.default_rng(1)
    rows, cols = np.nonzero(rng.random((70, 30)) < 0.2)
    pattern = CooMatrix(rows=rows, cols=cols, values=np.ones(len(rows)), shape=(70, 30))
    subset = list(itertools.product((None, 1, 2, 16), (None, 1, 2, 16)))
    combined = BlockCounts(pattern)
    combined.prepare(subset)
    assert [combined.count(*size) for size in subset] == [
        BlockCounts(pattern).count(*size) for size in subset
    ]


@pytest.mark.parametrize("shape", [(10**9, 10**9), (1, 2 * 10**9)])
def test_huge_matrices(shape: tuple[int, int]) -> None:
    rows = np.array([0, shape[0] - 1])
    cols = np.array([0, shape[1] - 1])
    pattern = CooMatrix(rows=rows, cols=cols, values=np.ones(2), shape=shape)
    assert BlockCounts(pattern).count(1, 1) == BlockCounts(pattern).count(1024, 1) == 2
    assert BlockCounts(pattern).count(None, shape[1]) == 1
