"""Coarsened patterns against counts on dense matrices."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.tuning.model.net import coarsen as module
from sparseflow.tuning.model.net.coarsen import BLOCK_SHAPES, CELL_FEATURES, Cells, coarsen


def coarsened(dense: np.ndarray, max_cells: int = 2**14) -> Cells:
    rows, cols = np.nonzero(dense)
    return coarsen(rows, cols, (dense.shape[0], dense.shape[1]), max_cells=max_cells)


def occupied(part: np.ndarray, tall: int, wide: int) -> int:
    """Count the nonempty blocks of a dense part."""
    tops, lefts = range(0, part.shape[0], tall), range(0, part.shape[1], wide)
    return sum(
        bool(part[top : top + tall, remaining : remaining + wide].any())
        for top, remaining in itertools.product(tops, lefts)
    )


def slowly(dense: np.ndarray, maximum: int) -> Cells:
    tall, wide = 1, 1
    while occupied(dense, tall, wide) > maximum:
        # A side that covers the matrix stops growing.
        tall, wide = (
            2 * side if side < extent else side
            for side, extent in zip((tall, wide), dense.shape, strict=True)
        )
    n_rows, n_cols = dense.shape
    grid = (-(-n_rows // tall), -(-n_cols // wide))
    log_lengths = np.log2(np.maximum(1, dense.sum(1)))
    mean = log_lengths[dense.any(1)].mean() if dense.any() else 0.0
    coords, features = [], []
    for row, col in itertools.product(range(grid[0]), range(grid[1])):
        top, remaining = row * tall, col * wide
        cell = dense[top : top + tall, remaining : remaining + wide]
        if not cell.any():
            continue
        blocks = []
        for block in BLOCK_SHAPES:
            height, width = max(tall, block[0]), max(wide, block[1])
            region = dense[top // height * height :, remaining // width * width :][:height, :width]
            blocks.append(math.log2(region.sum() / occupied(region, *block)) / math.log2(math.prod(block)))
        positions = [
            (2 * first + size) / extent - 1
            for first, size, extent in zip((top, remaining), cell.shape, dense.shape, strict=True)
        ]
        fill = cell.mean()
        row_length = (log_lengths[top : top + tall][cell.any(1)].mean() - mean) / 4
        parts = [
            math.log2(cell.sum()) / 8,
            fill,
            math.log2(fill) / 16,
            cell.any(1).mean(),
            cell.any(0).mean(),
        ]
        coords.append((row, col))
        features.append([*parts, *blocks, row_length, *positions, abs(positions[0] - positions[1])])
    return Cells(
        coords=np.array(coords, np.int64).reshape(-1, 2),
        features=np.array(features, np.float32).reshape(-1, len(CELL_FEATURES)),
        grid=grid,
    )


@settings(max_examples=20)
@given(
    shape=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    density=st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]),
    max_cells=st.integers(1, 40),
    step=st.sampled_from([1, 3, 17, 10**6]),
    table=st.sampled_from([0, 10**6]),
    seed=st.integers(0, 2**32 - 1),
)
@example(shape=(1, 70), density=0.5, max_cells=7, step=3, table=0, seed=0)
@example(shape=(70, 1), density=0.5, max_cells=7, step=3, table=0, seed=0)
@example(shape=(1, 1), density=1.0, max_cells=1, step=1, table=0, seed=0)
def test_coarsen_matches_dense_computation(
    shape: tuple[int, int], density: float, max_cells: int, step: int, table: int, seed: int
) -> None:
    dense = np.random.default_rng(seed).random(shape) < density
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module._SLICE_ELEMENTS, "cpu", step)
        patch.setattr(module, "_MAX_TABLE_CELLS", table)
        result = coarsened(dense, max_cells=max_cells)
    expected = slowly(dense, max_cells)
    assert result.grid == expected.grid
    assert result.coords.dtype == np.int64 and result.features.dtype == np.float32
    np.testing.assert_array_equal(result.coords, expected.coords)
    np.testing.assert_allclose(result.features, expected.features, rtol=1e-5, atol=1e-6)


def test_coarsen_empty_pattern_has_no_cells() -> None:
    result = coarsened(np.zeros((3, 4), bool))
    assert result.coords.shape == (0, 2)
    assert result.features.shape == (0, len(CELL_FEATURES))
    assert result.grid == (3, 4)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint32, np.int64, np.uint64, ">i4"])
def test_coarsen_any_integer_dtype(kind: type | str) -> None:
    dense = np.random.default_rng(0).random((50, 60)) < 0.2
    rows, cols = np.nonzero(dense)
    expected = coarsen(rows, cols, (50, 60), max_cells=100)
    cells = coarsen(rows.astype(kind), cols.astype(kind), (50, 60), max_cells=100)
    np.testing.assert_array_equal(cells.features, expected.features)


def test_coarsen_huge_shape_is_bounded() -> None:
    rows, cols = np.array([0, 2**40]), np.array([7, 5])
    cells = coarsen(rows, cols, (2**40 + 1, 8))
    assert cells.grid[0] <= 2**20 and cells.grid[1] == 1
    assert np.isfinite(cells.features).all()
    assert len(cells.coords) == 2


def test_coarsen_features_distinguish_blocks() -> None:
    generator = np.random.default_rng(0)
    fours = np.kron(generator.random((64, 64)) < 0.1, np.ones((4, 4), bool))
    scattered = generator.permutation(fours.ravel()).reshape(fours.shape)
    column = CELL_FEATURES.index("fill_4x4")
    assert coarsened(fours, max_cells=64).features[:, column].min() == 1.0
    assert coarsened(scattered, max_cells=64).features[:, column].max() < 0.5


def test_coarsen_features_are_of_order_one() -> None:
    rows = np.arange(300_000)
    cols = np.minimum(rows, 299_999) // 3 * 3
    cells = coarsen(rows, cols, (300_000, 300_000))
    assert 2**12 < len(cells.coords) <= 2**14
    assert np.abs(cells.features).max() < 4


def test_coarsen_huge_shape_raises() -> None:
    with pytest.raises(InputError, match="62"):
        coarsen(np.zeros(0, np.int32), np.zeros(0, np.int32), (2**32, 2**32))


def test_coarsen_zero_cells_raises() -> None:
    with pytest.raises(InputError):
        coarsened(np.ones((2, 2), bool), max_cells=0)
