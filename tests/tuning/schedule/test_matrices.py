"""Conversion and reading of matrices."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.schedule.matrices import CooMatrix, SparsityPattern, as_coo, read_matrix

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")

DENSE = np.array([[0, 5, 0], [1, 0, 2]], np.float64)


@pytest.mark.parametrize(
    "matrix",
    [
        DENSE,
        scipy.sparse.csr_array(DENSE),
        scipy.sparse.csc_matrix(DENSE),
        scipy.sparse.coo_array(DENSE),
        torch.tensor(DENSE),
        torch.tensor(DENSE).to_sparse_coo(),
        "csr of torch",
    ],
    ids=lambda m: type(m).__name__,
)
def test_as_coo_types_are_equal(matrix: object) -> None:
    result = as_coo(torch.tensor(DENSE).to_sparse_csr() if isinstance(matrix, str) else matrix)
    assert result.shape == (2, 3)
    assert (result.rows.tolist(), result.cols.tolist(), result.values.tolist()) == (
        [0, 1, 1],
        [1, 0, 2],
        [5, 1, 2],
    )
    assert result.values.dtype == np.float64
    assert np.array_equal(result.to_scipy().toarray(), DENSE)


def test_as_coo_sums_duplicates() -> None:
    rows, cols, values = np.array([1, 0, 1]), np.array([2, 1, 2]), np.array([1.0, 5.0, 3.0], np.float32)
    matrix = as_coo(scipy.sparse.coo_array((values, (rows, cols)), shape=(2, 3)))
    assert (matrix.rows.tolist(), matrix.cols.tolist(), matrix.values.tolist()) == ([0, 1], [1, 2], [5, 4])


def test_as_coo_integers_become_float32() -> None:
    assert as_coo(scipy.sparse.csr_array(DENSE.astype(np.int64))).values.dtype == np.float32
    assert as_coo(DENSE, dtype=np.float32).values.dtype == np.float32
    assert as_coo(torch.tensor(DENSE, dtype=torch.bfloat16).to_sparse_coo()).values.dtype == np.float32


@pytest.mark.parametrize(
    ("matrix", "output"),
    [
        (np.zeros((0, 4)), "0,"),
        (scipy.sparse.csr_array((3, 0)), "3,"),
        (np.array([[np.nan]]), "0,"),
        (np.array([[0, np.inf]]), "0,"),
        (np.array([[1j]]), "complex128"),
        (np.zeros(3), "3,"),
        ([[1]], "list"),
        (torch.zeros(2, 2, 2), "Tensor"),
    ],
)
def test_as_coo_unsupported_raises(matrix: object, output: str) -> None:
    with pytest.raises(InputError, match=output or None):
        as_coo(matrix)


def test_as_coo_out_of_bounds_raises() -> None:
    with pytest.raises(InputError):
        as_coo(CooMatrix(rows=np.array([5]), cols=np.array([0]), values=np.ones(1), shape=(2, 2)))


def test_as_coo_other_dtype_raises() -> None:
    with pytest.raises(InputError):
        as_coo(DENSE, dtype=np.float16)


PATTERN = "%%MatrixMarket matrix coordinate pattern general\n% a comment\n2 3 2\n1 2\n2 3\n"


@pytest.mark.parametrize("packed", [False, True])
def test_read_matrix_file(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("a.mtx.gz" if packed else "a.mtx")
    path.write_bytes(gzip.compress(PATTERN.encode()) if packed else PATTERN.encode())
    matrix = read_matrix(path)
    assert (matrix.rows.tolist(), matrix.cols.tolist()) == ([0, 1], [1, 2])
    assert matrix.values.dtype == np.float32 or matrix.values.dtype == np.float64
    assert ((matrix.values >= 0.5) & (matrix.values <= 1.5)).all()
    assert np.array_equal(matrix.values, read_matrix(path).values)


def test_read_matrix_symmetric_file(tmp_path: Path) -> None:
    path = tmp_path / "s.mtx"
    path.write_text("%%MatrixMarket matrix coordinate real symmetric\n2 2 2\n1 1 3\n2 1 4\n")
    assert read_matrix(path).to_scipy().toarray().tolist() == [[3, 4], [4, 0]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        PATTERN.replace("2 3 2", "2 3"),
        PATTERN.replace("2 3\n", "9 9\n"),
        PATTERN.replace("1 2", "1 x"),
    ],
)
def test_read_matrix_damaged_file_raises(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.mtx"
    path.write_text(text)
    with pytest.raises(FileFormatError):
        read_matrix(path)


def test_read_matrix_truncated_file_raises(tmp_path: Path) -> None:
    path = tmp_path / "half.mtx.gz"
    path.write_bytes(gzip.compress(PATTERN.encode() * 50)[:60])
    with pytest.raises(FileFormatError):
        read_matrix(path)


def test_read_matrix_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_matrix(tmp_path / "none.mtx")


def test_pattern_digest_equals_matrix_digest() -> None:
    matrix = as_coo(scipy.sparse.random_array((50, 70), density=0.1, rng=np.random.default_rng(0)))
    pattern = matrix.pattern
    assert pattern.rows.dtype == pattern.cols.dtype == np.int32
    assert (pattern.shape, pattern.nnz) == (matrix.shape, matrix.nnz)
    assert pattern.digest() == matrix.digest(values=False)
    filled = pattern.to_matrix(np.float64)
    assert (
        filled.digest(values=False) == pattern.digest()
        and filled.digest() == pattern.to_matrix(float).digest()
    )
    assert filled.values.dtype == np.float64 and (abs(filled.values - 1.0) <= 0.5).all()


def test_pattern_is_sorted_and_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparseflow.tuning.schedule import matrices

    monkeypatch.setattr(matrices, "_DIGEST_CHUNK", 2)
    pattern = SparsityPattern.from_coords(np.array([1, 0, 1, 1]), np.array([2, 1, 0, 2]), (2, 3))
    assert (pattern.rows.tolist(), pattern.cols.tolist()) == ([0, 1, 1], [1, 0, 2])
    assert pattern.digest() == as_coo(DENSE).digest(values=False)


@pytest.mark.parametrize(("row", "shape"), [(2, (2, 3)), (-1, (2, 3)), (0, (0, 3)), (0, (2, 2**31))])
def test_pattern_invalid_raises(row: int, shape: tuple[int, int]) -> None:
    with pytest.raises(InputError):
        SparsityPattern.from_coords(np.array([row]), np.array([0]), shape)
