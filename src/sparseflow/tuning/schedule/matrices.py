"""Sparse matrices of scipy, torch and Matrix Market files as validated, sorted coordinates."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

if TYPE_CHECKING:
    import scipy.sparse

FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))

_MAX_EXTENT = 2**31 - 1
"""Largest extent whose coordinates fit 32 bits."""

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
        """Create a matrix with this pattern and deterministic values from 0.5 to 1.5."""
        return CooMatrix(
            rows=self.rows.astype(np.int64),
            cols=self.cols.astype(np.int64),
            values=_generate_values(self.nnz, np.dtype(dtype)),
            shape=self.shape,
        )


@dataclass(frozen=True, kw_only=True)
class CooMatrix:
    """A sparse matrix in coordinate format.

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
        dtype: float32 or float64; by default the dtype of the matrix, float32 for integers and booleans.

    Raises:
        InputError: The type is unsupported, an extent is 0, or a value is not finite or not a real number.
    """
    rows, cols, values, shape = _extract_coo(matrix)
    if len(shape) != 2:
        raise InputError(f"the matrix must be 2-D, got shape {shape}")
    if 0 in shape:
        raise InputError(f"the matrix is empty, got shape {shape}")
    if values.dtype.kind not in "fiub":
        raise InputError(f"the matrix has dtype {values.dtype}; expected real numbers")
    target_dtype = np.dtype(dtype or (values.dtype if values.dtype in FLOAT_DTYPES else np.float32))
    if target_dtype not in FLOAT_DTYPES:
        raise InputError(f"`dtype` (={target_dtype}) must be float32 or float64")
    if not np.isfinite(values).all():
        index = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(
            f"the matrix has the value {values[index]} at row {rows[index]}, column {cols[index]}; "
            "all values must be finite"
        )
    _check_bounds(rows, cols, shape)
    rows, cols = rows.astype(np.int64), cols.astype(np.int64)
    order = np.lexsort((cols, rows))
    rows, cols, values = rows[order], cols[order], values[order].astype(target_dtype)
    first = np.ones(len(rows), bool)
    first[1:] = (rows[1:] != rows[:-1]) | (cols[1:] != cols[:-1])
    if not first.all():
        values = np.add.reduceat(values, np.flatnonzero(first)).astype(target_dtype)
        rows, cols = rows[first], cols[first]
    return CooMatrix(rows=rows, cols=cols, values=values, shape=(int(shape[0]), int(shape[1])))


SUFFIXES = (".mtx", ".mtx.gz")
"""Suffixes of the files that `read_matrix` reads."""


def parse_matrix_name(path: Path) -> str:
    """Return the matrix name of a file: the file name without its suffixes."""
    return path.name.removesuffix(".gz").removesuffix(".mtx")


def find_matrix_files(paths: Iterable[Path]) -> list[Path]:
    """List the Matrix Market files among `paths` and in the directories among them.

    Raises:
        InputError: A path does not exist, or a directory has no such file.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            matches = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES))
            if not matches:
                raise InputError(f"{path} has no {' or '.join(SUFFIXES)} file")
            files += matches
        elif path.is_file():
            files.append(path)
        else:
            raise InputError(f"file not found: {path}")
    return files


def read_matrix(path: Path | str, *, dtype: np.dtype | type | None = None) -> CooMatrix:
    """Read a Matrix Market file (`.mtx`, `.mtx.gz`).

    A pattern file gets deterministic values from 0.5 to 1.5.

    Raises:
        InputError: The file does not exist or its matrix is unsupported.
        FileFormatError: The file is not a Matrix Market file.
    """
    io = require("scipy.io", "tuning")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"file not found: {file}")
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            matrix_data = io.mmread(stream)
    except (ValueError, OSError, EOFError, OverflowError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{file} is not a readable Matrix Market file: {error}") from error
    matrix = as_coo(matrix_data, dtype=dtype)
    if _is_pattern_file(file):
        return replace(matrix, values=_generate_values(matrix.nnz, matrix.values.dtype))
    return matrix


def _generate_values(count: int, dtype: np.dtype) -> np.ndarray:
    """Generate values for elements that have none."""
    return np.random.default_rng(0).uniform(0.5, 1.5, count).astype(dtype)


def _validate_extents(shape: tuple[int, int]) -> tuple[int, int]:
    if len(shape) != 2 or not all(1 <= extent <= _MAX_EXTENT for extent in shape):
        raise InputError(f"`shape` (={shape}) must be two extents from 1 to {_MAX_EXTENT}")
    return int(shape[0]), int(shape[1])


def _check_bounds(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, ...]) -> None:
    if any(c.size and (c.min() < 0 or c.max() >= n) for c, n in ((rows, shape[0]), (cols, shape[1]))):
        raise InputError(f"the matrix has coordinates outside of its shape {shape}")


def _is_pattern_file(file: Path) -> bool:
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
        return b" pattern " in stream.readline(1000).lower()


def _extract_coo(matrix: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
    if isinstance(matrix, CooMatrix):
        return matrix.rows, matrix.cols, matrix.values, matrix.shape
    if type(matrix).__module__.partition(".")[0] == "torch":
        import torch

        if not isinstance(matrix, torch.Tensor) or matrix.ndim != 2:
            raise InputError(f"expected a 2-D tensor, got {type(matrix).__name__}")
        coalesced = matrix.detach().cpu().to_sparse_coo().coalesce()
        rows, cols = coalesced.indices().numpy()
        values = coalesced.values()
        # numpy has no bfloat16, and float16 is not computed with.
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        return rows, cols, values.numpy(), tuple(coalesced.shape)
    if isinstance(matrix, np.ndarray):
        if matrix.ndim != 2:
            raise InputError(f"expected a 2-D array, got shape {matrix.shape}")
        rows, cols = np.nonzero(matrix)
        return rows, cols, matrix[rows, cols], matrix.shape
    if require("scipy.sparse", "tuning").issparse(matrix):
        coo = matrix.tocoo()
        return np.asarray(coo.row), np.asarray(coo.col), np.asarray(coo.data), coo.shape
    raise InputError(
        f"expected a scipy.sparse matrix, a sparse torch tensor or a 2-D array, got {type(matrix).__name__}"
    )
