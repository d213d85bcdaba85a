"""Random sparsity patterns."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.measure.families import infer_family
from sparseflow.tuning.measure.synthetic import PATTERN_KINDS, sample_pattern
from sparseflow.tuning.schedule.matrices import SparsityPattern

SIZES = [((1, 1), (1, 1)), ((1, 9), (1, 40)), ((64, 64), (10**6, 10**6)), ((300, 900), (2000, 20000))]


def checked(pattern: SparsityPattern) -> None:
    height, width = pattern.shape
    assert pattern.rows.dtype == pattern.cols.dtype == np.int32
    assert pattern.rows.min() >= 0 and pattern.rows.max() < height
    assert pattern.cols.min() >= 0 and pattern.cols.max() < width
    assert (np.diff(pattern.rows.astype(np.int64) * width + pattern.cols) > 0).all()


@pytest.mark.parametrize("kind", PATTERN_KINDS)
def test_sample_every_kind_and_size(kind: str) -> None:
    for rows, nnz in SIZES:
        for seed in range(3):
            name, pattern = sample_pattern(np.random.default_rng(seed), rows=rows, nnz=nnz, kind=kind)
            checked(pattern)
            assert infer_family(name) == kind
            assert name.endswith(pattern.digest()[:6])


@pytest.mark.parametrize("kind", PATTERN_KINDS)
def test_sample_sizes_are_close_to_request(kind: str) -> None:
    for seed in range(5):
        _, pattern = sample_pattern(
            np.random.default_rng(seed), rows=(1000, 1000), nnz=(20_000, 20_000), kind=kind
        )
        assert 900 <= pattern.shape[0] <= 1000
        assert 0.6 * 20_000 <= pattern.nnz <= 1.3 * 20_000


def test_sample_depends_on_seed_only() -> None:
    first, second, other = (sample_pattern(np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first[0] == second[0] and first[1].digest() == second[1].digest()
    assert first[0] != other[0]


def test_sample_rows_fit_elements() -> None:
    for seed in range(20):
        _, pattern = sample_pattern(
            np.random.default_rng(seed), rows=(4, 10_000), nnz=(500, 1000), kind="constant_rows"
        )
        assert pattern.shape[0] <= 500 and len(np.unique(pattern.rows)) == pattern.shape[0]


def _lengths(pattern: SparsityPattern) -> np.ndarray:
    return np.bincount(pattern.rows, minlength=pattern.shape[0])


def _far(pattern: SparsityPattern) -> float:
    """Compute the mean distance from the diagonal, relative to the columns."""
    distance = abs(pattern.rows / pattern.shape[0] - pattern.cols / pattern.shape[1])
    return float(distance.mean())


@pytest.mark.parametrize(
    ("kind", "holds"),
    [
        ("banded", lambda p: _far(p) < 0.05),
        ("uniform", lambda p: _far(p) > 0.2),
        ("stencil", lambda p: _lengths(p).max() < 60 and p.shape[0] == p.shape[1]),
        ("diagonals", lambda p: len(np.unique(p.cols - p.rows)) < 60),
        ("power_rows", lambda p: _lengths(p).max() > 3 * _lengths(p).mean()),
        ("power_both", lambda p: np.bincount(p.cols).max() > 3 * np.bincount(p.cols).mean()),
        ("constant_rows", lambda p: len(set(_lengths(p).tolist())) == 1),
        ("arrow", lambda p: _lengths(p).max() > 5 * np.median(_lengths(p))),
        ("vector_pruned", lambda p: (p.rows[p.cols == p.cols[0]][:4] == np.arange(4) + p.rows[0]).all()),
    ],
)
def test_sample_kinds_have_their_structure(kind: str, holds: Callable[[SparsityPattern], bool]) -> None:
    for seed in range(4):
        _, pattern = sample_pattern(
            np.random.default_rng(seed), rows=(1500, 2000), nnz=(30_000, 40_000), kind=kind
        )
        assert holds(pattern)


def test_sample_mesh_is_symmetric() -> None:
    for seed in range(6):
        _, pattern = sample_pattern(
            np.random.default_rng(seed), rows=(300, 400), nnz=(3000, 5000), kind="mesh"
        )
        assert (
            SparsityPattern.from_coords(pattern.cols, pattern.rows, pattern.shape).digest()
            == pattern.digest()
        )
        assert (pattern.rows == pattern.cols).sum() == pattern.shape[0]


def test_sample_invalid_arguments_raise() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError):
        sample_pattern(rng, kind="net")
    with pytest.raises(InputError, match="`rows`"):
        sample_pattern(rng, rows=(0, 4))
    with pytest.raises(InputError, match="`nnz`"):
        sample_pattern(rng, nnz=(5, 4))
