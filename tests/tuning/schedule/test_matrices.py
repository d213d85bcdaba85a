"""Conversion of matrices."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.matrices import CooMatrix, SparsityPattern, as_coo

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


def test_as_coo_default_dtype_holds_the_values() -> None:
    assert as_coo(scipy.sparse.csr_array(DENSE.astype(np.int64))).values.dtype == np.float32
    exact = as_coo(np.array([[2**24 + 1]]))
    assert exact.values.dtype == np.float64 and exact.values.tolist() == [2**24 + 1]
    assert as_coo(np.array([[1.0]], np.longdouble)).values.dtype == np.float64
    assert as_coo(np.array([[1.0]], ">f8")).values.dtype == np.float64
    assert as_coo(np.array([[1.0]], np.float16)).values.dtype == np.float32
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
        (torch.zeros(2, 2, 2), "2, 2, 2"),
    ],
)
def test_as_coo_unsupported_raises(matrix: object, output: str) -> None:
    with pytest.raises(InputError, match=output or None):
        as_coo(matrix)


@pytest.mark.parametrize(
    ("matrix", "dtype"),
    [
        (np.array([[2**24 + 1]]), np.float32),
        (np.array([[2**53 + 1]]), None),
        (np.array([[2**64 - 1]], np.uint64), np.float64),
        (np.array([[1e-60]]), np.float32),
        (np.array([[1e300]]), np.float32),
        (np.array([[np.finfo(np.longdouble).max]]), None),
        (np.array([[np.finfo(np.longdouble).tiny]]), None),
    ],
)
def test_as_coo_value_outside_dtype_raises(matrix: np.ndarray, dtype: type | None) -> None:
    with pytest.raises(InputError, match="float64"):
        as_coo(matrix, dtype=dtype)


def test_as_coo_sum_outside_dtype_raises() -> None:
    values = np.array([3e38, 3e38], np.float32)
    with pytest.raises(InputError, match="float32"):
        as_coo(scipy.sparse.coo_array((values, ([0, 0], [0, 0])), shape=(1, 1)))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", ["matrix", "masked", "hybrid", "subclass", "1-D", "meta", "nested"])
def test_as_coo_unusual_types(kind: str) -> None:
    tensor = torch.tensor(DENSE)
    if kind == "matrix":
        assert np.array_equal(as_coo(np.matrix(DENSE)).to_scipy().toarray(), DENSE)
    elif kind == "subclass":
        assert np.array_equal(as_coo(torch.nn.Parameter(tensor)).to_scipy().toarray(), DENSE)
    else:
        matrix = {
            "masked": lambda: np.ma.masked_array(DENSE, DENSE > 2),
            "hybrid": lambda: tensor.to_sparse(1),
            "1-D": lambda: scipy.sparse.coo_array(DENSE[0]),
            "meta": lambda: tensor.to("meta"),
            "nested": lambda: torch.nested.nested_tensor([tensor]),
        }[kind]()
        with pytest.raises(InputError):
            as_coo(matrix)


@pytest.mark.parametrize("storage", [scipy.sparse.csr_array, scipy.sparse.csc_matrix, scipy.sparse.bsr_array])
@pytest.mark.parametrize(
    "change", [("indices", 0, 9), ("indices", 0, -1), ("indptr", -1, 90), ("indptr", 1, 3), ("indptr", 1, -1)]
)
def test_as_coo_inconsistent_scipy_matrix_raises(storage: type, change: tuple[str, int, int]) -> None:
    matrix = storage(np.eye(3))
    name, index, value = change
    getattr(matrix, name)[index] = value
    with pytest.raises(InputError, match=matrix.format):
        as_coo(matrix)


def test_as_coo_leaves_scipy_matrix_unchanged() -> None:
    matrix = scipy.sparse.csr_array(DENSE)
    matrix.data = np.append(matrix.data, 7.0)  # unused
    matrix.indices = np.append(matrix.indices, 0).astype(np.int32)
    assert np.array_equal(as_coo(matrix).to_scipy().toarray(), DENSE)
    assert len(matrix.data) == 4


def test_as_coo_extent_beyond_32_bits_raises() -> None:
    with pytest.raises(InputError, match="2147483647"):
        as_coo(scipy.sparse.coo_array(([1.0], ([0], [0])), shape=(1, 2**31)))


def test_as_coo_arrays_are_read_only_copies() -> None:
    source = scipy.sparse.coo_array(DENSE)
    matrix = as_coo(source)
    with pytest.raises(ValueError, match="read-only"):
        matrix.values[:] = 0
    source.data[:] = 0
    assert matrix.values.tolist() == [5, 1, 2]


def test_as_coo_out_of_bounds_raises() -> None:
    with pytest.raises(InputError):
        as_coo(CooMatrix(rows=np.array([5]), cols=np.array([0]), values=np.ones(1), shape=(2, 2)))


def test_as_coo_other_dtype_raises() -> None:
    with pytest.raises(InputError):
        as_coo(DENSE, dtype=np.float16)


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
