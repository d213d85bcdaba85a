"""Sparse matrices of scipy, torch and numpy as validated, sorted coordinates."""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import InputError
from sparseflow.tuning.schedule.matrix_market import MAX_EXTENT

if TYPE_CHECKING:
    import scipy.sparse

FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))

_MAX_EXACT_INTEGER = 2**53
"""Integers below this magnitude are exact in float64."""

_DIGEST_CHUNK = 2**20
"""Number of coordinates converted at once for a digest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SparsityPattern:
    """Coordinates of the nonzeros of a matrix; `SparsityPattern.from_coords` creates one.

    Attributes:
        rows: Row indices, shape [nnz], int32, ascending.
        cols: Column indices, shape [nnz], int32, ascending within a row.
        shape: Rows and columns.
    """

    rows: np.ndarray
    cols: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def from_coords(cls, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> SparsityPattern:
        """Sort coordinates and remove duplicates.

        Args:
            rows: Row indices, shape [n], integers.
            cols: Column indices, shape [n], integers.
            shape: Rows and columns.

        Raises:
            InputError: An extent is below 1 or exceeds 32 bits, or a coordinate is out of bounds.
        """
        height, width = _validate_extents(shape)
        rows, cols = np.asarray(rows, np.int64), np.asarray(cols, np.int64)
        _check_bounds(rows, cols, (height, width))
        rows, cols = np.divmod(np.unique(rows * width + cols), width)
        return cls(rows=rows.astype(np.int32), cols=cols.astype(np.int32), shape=(height, width))

    @property
    def nnz(self) -> int:
        return len(self.rows)

    def digest(self) -> str:
        """Compute the checksum that `CooMatrix.digest(values=False)` returns."""
        digest = hashlib.sha256(repr(self.shape).encode())
        for array in (self.rows, self.cols):
            digest.update(np.dtype(np.int64).str.encode())
            for start in range(0, len(array), _DIGEST_CHUNK):
                digest.update(array[start : start + _DIGEST_CHUNK].astype(np.int64).data)
        return digest.hexdigest()

    def to_matrix(self, dtype: np.dtype | type = np.float32) -> CooMatrix:
        """Create a matrix with this pattern and deterministic values from 0.5 to 1.5.

        Elements at (i, j) and (j, i) have equal values, so that the matrix of a symmetric pattern is
        symmetric.
        """
        return CooMatrix(
            rows=self.rows.astype(np.int64),
            cols=self.cols.astype(np.int64),
            values=_generate_values(self.rows, self.cols).astype(dtype),
            shape=self.shape,
        )


@dataclass(frozen=True, kw_only=True)
class CooMatrix:
    """A sparse matrix in coordinate format. Its arrays are read-only.

    Attributes:
        rows: Row indices, shape [nnz], int64.
        cols: Column indices, shape [nnz], int64.
        values: Shape [nnz], float32 or float64.
        shape: Rows and columns.
    """

    rows: np.ndarray
    cols: np.ndarray
    values: np.ndarray
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        # A kernel holds a packed copy; a change here would only change the file that it is saved to.
        for name in ("rows", "cols", "values"):
            view = getattr(self, name).view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)

    @property
    def nnz(self) -> int:
        return len(self.values)

    def digest(self, *, values: bool = True) -> str:
        """Compute a SHA-256 checksum, of the pattern only if `values` is False."""
        digest = hashlib.sha256(repr(self.shape).encode())
        for array in (self.rows, self.cols, *((self.values,) if values else ())):
            digest.update(array.dtype.str.encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def pattern(self) -> SparsityPattern:
        """The sparsity pattern.

        Raises:
            InputError: An extent exceeds 32 bits.
        """
        shape = _validate_extents(self.shape)
        return SparsityPattern(rows=self.rows.astype(np.int32), cols=self.cols.astype(np.int32), shape=shape)

    def to_scipy(self) -> scipy.sparse.csr_array:
        """Convert to scipy's CSR."""
        sparse = require("scipy.sparse", "tuning")
        return sparse.csr_array((self.values, (self.rows, self.cols)), shape=self.shape)


def as_coo(matrix: Any, *, dtype: np.dtype | type | None = None) -> CooMatrix:
    """Convert a matrix to sorted coordinates and sum duplicates.

    Args:
        matrix: scipy.sparse matrix, sparse torch tensor, `CooMatrix` or 2-D numpy array.
        dtype: float32 or float64. By default float64 for wider types than float32 and for integers that
            float32 cannot hold exactly, otherwise float32.

    Raises:
        InputError: The type is unsupported, an extent is 0 or exceeds 32 bits, a value is not finite or not a
            real number, or `dtype` cannot hold it.
    """
    rows, cols, values, shape = _extract_coo(matrix)
    shape = _validate_extents(shape)
    if values.dtype.kind not in "fiub":
        advice = "; tune its real part and use `with_values` for the imaginary one"
        raise InputError(
            f"the matrix has dtype {values.dtype}; expected real numbers"
            + (advice if values.dtype.kind == "c" else "")
        )
    target_dtype = None if dtype is None else np.dtype(dtype)
    if target_dtype not in (None, *FLOAT_DTYPES):
        raise InputError(f"`dtype` (={target_dtype}) must be float32 or float64")
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(
            f"the matrix has the value {values[index]} at row {rows[index]}, column {cols[index]}; "
            "all values must be finite"
        )
    _check_bounds(rows, cols, shape)
    rows, cols = rows.astype(np.int64), cols.astype(np.int64)
    sums = _convert_values(values, np.dtype(np.float64))
    if not are_sorted(rows, cols):
        order = np.lexsort((cols, rows))
        rows, cols, sums = rows[order], cols[order], sums[order]
        first = np.ones(len(rows), bool)
        first[1:] = (rows[1:] != rows[:-1]) | (cols[1:] != cols[:-1])
        if not first.all():
            sums = np.add.reduceat(sums, np.flatnonzero(first))
            rows, cols = rows[first], cols[first]
    if values.dtype.kind != "f":
        # Sums of integers are integers; these conversions refuse or avoid rounding.
        if np.abs(sums).max(initial=0.0) >= _MAX_EXACT_INTEGER:
            raise InputError(
                "the matrix has integers of 2**53 or more, which float64 rounds; scale the matrix"
            )
        fits = np.array_equal(sums.astype(np.float32), sums)
        if target_dtype == np.float32 and not fits:
            raise InputError("the matrix has integers that float32 rounds; use float64 (`--dtype float64`)")
        target_dtype = target_dtype or np.dtype(np.float32 if fits else np.float64)
    target_dtype = target_dtype or np.dtype(np.float64 if values.dtype.itemsize > 4 else np.float32)
    return CooMatrix(rows=rows, cols=cols, values=_convert_values(sums, target_dtype), shape=shape)


def read_memory_bytes() -> int:
    """Read the size of the memory of this machine, bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def is_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor; torch is not imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _convert_values(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert finite values to float32 or float64, unless one becomes infinite or 0."""
    with np.errstate(over="ignore", under="ignore"):
        result = values.astype(dtype)
    bad = ~np.isfinite(result) | ((result == 0) & (values != 0))
    if bad.any():
        advice = "use float64 (`--dtype float64`)" if dtype == np.float32 else "scale the matrix"
        raise InputError(
            f"the matrix has the value {values[np.argmax(bad)]}, which {dtype} cannot hold; {advice}"
        )
    return result


def _generate_values(rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Generate values of elements by a hash of their coordinates in any order, float64 [nnz]."""
    low, high = np.minimum(rows, cols).astype(np.uint64), np.maximum(rows, cols).astype(np.uint64)
    bits = low * np.uint64(0x9E3779B97F4A7C15) + high * np.uint64(0xC2B2AE3D27D4EB4F)
    bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return 0.5 + (bits >> np.uint64(40)) / 2.0**24


def _validate_extents(shape: tuple[int, ...]) -> tuple[int, int]:
    if len(shape) != 2 or not all(1 <= extent <= MAX_EXTENT for extent in shape):
        raise InputError(f"`shape` (={shape}) must be two extents from 1 to {MAX_EXTENT}")
    return int(shape[0]), int(shape[1])


def are_sorted(rows: np.ndarray, cols: np.ndarray) -> bool:
    """Return whether coordinates are sorted by row and column, without duplicates."""
    same_row, later_col = rows[1:] == rows[:-1], cols[1:] > cols[:-1]
    return bool((rows[1:] >= rows[:-1]).all() and (later_col | ~same_row).all())


def _check_bounds(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, ...]) -> None:
    if any(c.size and (c.min() < 0 or c.max() >= n) for c, n in ((rows, shape[0]), (cols, shape[1]))):
        raise InputError(f"the matrix has coordinates outside of its shape {shape}")


def _extract_coo(matrix: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return rows, columns, values and shape of any supported matrix; the coordinates are not checked."""
    if isinstance(matrix, CooMatrix):
        arrays = (matrix.rows, matrix.cols, matrix.values)
        if any(array.shape != (matrix.nnz,) for array in arrays) or any(
            array.dtype.kind not in "iu" for array in arrays[:2]
        ):
            raise InputError(
                "`rows`, `cols` and `values` must be 1-D and equally long, the first two integers"
            )
        return (*arrays, matrix.shape)
    if is_tensor(matrix):
        return _extract_tensor(matrix)
    if isinstance(matrix, np.ma.MaskedArray):
        raise InputError("the matrix is a masked array; fill the masked values, such as `matrix.filled(0)`")
    if isinstance(matrix, np.ndarray):
        if matrix.ndim != 2:
            raise InputError(f"expected a 2-D array, got shape {matrix.shape}")
        dense = np.asarray(matrix)  # indexing an `np.matrix` gives other shapes
        rows, cols = np.nonzero(dense)
        return rows, cols, dense[rows, cols], dense.shape
    if require("scipy.sparse", "tuning").issparse(matrix):
        if matrix.ndim != 2:
            raise InputError(f"expected a 2-D matrix, got shape {matrix.shape}")
        try:
            if matrix.format in ("csr", "csc", "bsr"):
                # A new matrix of the same arrays, because the check of scipy removes unused elements.
                matrix = type(matrix)((matrix.data, matrix.indices, matrix.indptr), shape=matrix.shape)
                matrix.check_format(full_check=True)
            coo = matrix.tocoo()
        except (ValueError, IndexError, TypeError) as error:
            raise InputError(f"the {matrix.format} matrix is inconsistent: {error}") from error
        return np.asarray(coo.row), np.asarray(coo.col), np.asarray(coo.data), coo.shape
    raise InputError(
        f"expected a scipy.sparse matrix, a sparse torch tensor or a 2-D array, got {type(matrix).__name__}"
    )


def _extract_tensor(tensor: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
    import torch

    try:
        if tensor.ndim != 2:
            raise InputError(f"expected a 2-D tensor, got shape {tuple(tensor.shape)}")
        coalesced = tensor.detach().cpu().to_sparse_coo().coalesce()
        if coalesced.sparse_dim() != 2:
            raise InputError(
                f"the tensor has {coalesced.sparse_dim()} sparse dimension; use `tensor.to_dense()`"
            )
        rows, cols = coalesced.indices().numpy()
        values = coalesced.values()
        # numpy has no bfloat16, and float16 is not computed with.
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        return rows, cols, values.numpy(), tuple(coalesced.shape)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"the tensor ({tensor.dtype}, {tensor.layout}) cannot be read: {reason}") from error
