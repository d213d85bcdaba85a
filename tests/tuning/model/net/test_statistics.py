"""Features of tasks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.model.net import statistics as module
from sparseflow.tuning.model.net.statistics import (
    NUM_FEATURES,
    PATTERN_FEATURES,
    TASK_FEATURES,
    compute_pattern_statistics,
    compute_task_statistics,
)
from tests.tuning.synthetic_labels import pattern_of


def named(values: np.ndarray) -> dict[str, float]:
    return dict(zip(PATTERN_FEATURES, values.tolist(), strict=True))


def test_small_pattern_matches_manual_values() -> None:
    # Rows 0 to 3 of 8 hold columns 0, 1 of 4: two full blocks of 4 x 1, half a block of 4 x 4.
    rows, cols = np.repeat(np.arange(4), 2), np.tile([0, 1], 4)
    result = named(compute_pattern_statistics(rows, cols, (8, 4)))
    log = lambda value: math.log2(1 + value) / 16  # noqa: E731
    distance = np.abs(cols - rows / 2).mean()
    assert result == pytest.approx(
        {
            "row_deviation": log(1.0), "row_longest": log(2), "rows_empty": 0.5,
            "col_deviation": log(2.0), "col_longest": log(4), "cols_empty": 0.5,
            "row_spread": log(2), "off_diagonal": log(distance), "adjacent": 0.5,
            "fill_4x1": 0.0, "fill_4x4": 1 / 8, "fill_16x16": 5 / 8,
        }
    )  # fmt: skip


@pytest.mark.parametrize("band", [1, 7, 100])
def test_result_is_independent_of_band_size(band: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = pattern_of(0, (150, 70), 0.02)
    full = compute_pattern_statistics(pattern.rows, pattern.cols, pattern.shape)
    monkeypatch.setattr(module, "_BAND_ELEMENTS", band)
    parts = compute_pattern_statistics(pattern.rows, pattern.cols, pattern.shape)
    # Bands are full rows, so adjacent elements of a row are in one band.
    np.testing.assert_allclose(parts, full, rtol=1e-6)


def test_block_counts_match_dense_mask() -> None:
    pattern = pattern_of(1, (64, 48), 0.05)
    mask = np.zeros(pattern.shape, bool)
    mask[pattern.rows, pattern.cols] = True
    result = named(compute_pattern_statistics(pattern.rows, pattern.cols, pattern.shape))
    for high, wide in ((4, 1), (4, 4), (16, 16)):
        blocks = mask.reshape(64 // high, high, 48 // wide, wide).any((1, 3)).sum()
        share = pattern.nnz / (blocks * high * wide)
        assert result[f"fill_{high}x{wide}"] == pytest.approx(-math.log2(share) / 8)
    assert result["adjacent"] == pytest.approx((mask[:, 1:] & mask[:, :-1]).sum() / pattern.nnz)


def test_degenerate_patterns_are_finite() -> None:
    none = np.zeros(0, np.int32)
    assert np.isfinite(compute_pattern_statistics(none, none, (3, 5))).all()
    corner = np.array([2**20 - 1], np.int32), np.array([2**21 - 1], np.int32)
    assert np.isfinite(compute_pattern_statistics(*corner, (2**20, 2**21))).all()


def test_unknown_features_are_masked() -> None:
    task = {"operator": "spmm", "shape": (1024, 64), "n_cols": 32, "dtype": "float64", "threads": 4}
    features = np.ones(len(PATTERN_FEATURES), np.float32)
    full = compute_task_statistics(**task, nnz=128, pattern=features)
    bare = compute_task_statistics(**task, nnz=None)
    assert full.shape == bare.shape == (NUM_FEATURES,) and full.dtype == np.float32
    values, known = bare.reshape(2, -1)
    unknown = {"nnz", "density", "row_mean", *PATTERN_FEATURES}
    assert {
        name for name, item in zip((*TASK_FEATURES, *PATTERN_FEATURES), known, strict=True) if not item
    } == unknown
    assert not values[known == 0].any()
    assert full[NUM_FEATURES // 2 :].all() and np.isfinite(full).all()
    same = np.isin((*TASK_FEATURES, *PATTERN_FEATURES), sorted(unknown), invert=True)
    np.testing.assert_array_equal(full.reshape(2, -1)[:, same], bare.reshape(2, -1)[:, same])


def test_operators_and_widths_differ() -> None:
    task = {"shape": (8, 8), "nnz": 8, "dtype": "float32", "threads": 1}
    spmm = compute_task_statistics(operator="spmm", n_cols=32, **task)
    sddmm = compute_task_statistics(operator="sddmm", n_cols=32, **task)
    spmv = compute_task_statistics(operator="spmv", n_cols=None, **task)
    assert not np.array_equal(spmm, sddmm) and not np.array_equal(spmm, spmv)
    with pytest.raises(InputError):
        compute_task_statistics(operator="gemm", n_cols=None, **task)
