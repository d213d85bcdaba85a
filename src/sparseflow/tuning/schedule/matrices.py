"""Sparse matrices as they come in (scipy's, torch's, Matrix Market files): checked, sorted, nothing twice."""

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

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

_LARGEST = 2**31 - 1
"""Extent up to which a pattern's coordinates fit 32 bits."""

_STEP = 2**20
"""Coordinates that are widened at once for a checksum."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pattern:
    """Where the elements of a matrix are, without their values; `Pattern.of` makes one of any coordinates.

    Attributes:
        rows: Shape (nnz,), int32, ascending.
        cols: Shape (nnz,), int32, ascending within a row.
        shape: Rows and columns.
    """

    rows: np.ndarray
    cols: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def of(cls, rows: np.ndarray, cols: np.ndarray, shape: tuple[int, int]) -> Pattern:
        """The pattern of elements in any order; what stands twice counts once.

        Args:
            rows: Shape (n,), integers.
            cols: Shape (n,), integers.
            shape: Rows and columns.

        Raises:
            InputError: An extent is below 1 or does not fit 32 bits, or an element is outside of the shape.
        """
        height, width = _checked_extents(shape)
        rows, cols = np.asarray(rows, np.int64), np.asarray(cols, np.int64)
        _check_inside(rows, cols, (height, width))
        rows, cols = np.divmod(np.unique(rows * width + cols), width)
        return cls(rows=rows.astype(np.int32), cols=cols.astype(np.int32), shape=(height, width))

    @property
    def nnz(self) -> int:
        return len(self.rows)

    def digest(self) -> str:
        """The same checksum as `Coo.digest(values=False)` gives."""
        found = hashlib.sha256(repr(self.shape).encode())
        for array in (self.rows, self.cols):
            found.update(np.dtype(np.int64).str.encode())
            for begin in range(0, len(array), _STEP):
                found.update(array[begin : begin + _STEP].astype(np.int64).data)
        return found.hexdigest()

    def filled(self, dtype: np.dtype | type = np.float32) -> Coo:
        """A matrix of this pattern with values from 0.5 to 1.5, always the same."""
        return Coo(
            rows=self.rows.astype(np.int64),
            cols=self.cols.astype(np.int64),
            values=_values(self.nnz, np.dtype(dtype)),
            shape=self.shape,
        )


@dataclass(frozen=True, kw_only=True)
class Coo:
    """The elements of a matrix, by coordinates.

    Attributes:
        rows: Shape (nnz,), int64.
        cols: Shape (nnz,), int64.
        values: Shape (nnz,), float32 or float64.
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
        """A checksum of all of it, or of what does not depend on the values."""
        found = hashlib.sha256(repr(self.shape).encode())
        for array in (self.rows, self.cols, *((self.values,) if values else ())):
            found.update(array.dtype.str.encode())
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()

    @property
    def pattern(self) -> Pattern:
        """Where its elements are.

        Raises:
            InputError: An extent does not fit 32 bits.
        """
        shape = _checked_extents(self.shape)
        return Pattern(rows=self.rows.astype(np.int32), cols=self.cols.astype(np.int32), shape=shape)

    def to_scipy(self) -> scipy.sparse.csr_array:
        """The same as scipy's CSR."""
        sparse = require("scipy.sparse", "tuning")
        return sparse.csr_array((self.values, (self.rows, self.cols)), shape=self.shape)


def as_coo(matrix: Any, *, dtype: np.dtype | type | None = None) -> Coo:
    """A matrix in coordinates: sorted by row and column, elements that stand twice added up.

    Args:
        matrix: A matrix of scipy.sparse, a sparse tensor of torch, a `Coo` or a 2-D array of numpy.
        dtype: float32 or float64; by default the matrix's own, float32 for integers and booleans.

    Raises:
        InputError: It is nothing of these, has no rows or columns, holds NaN or an infinity, or numbers that
            are neither real nor integers.
    """
    rows, cols, values, shape = _parts(matrix)
    if len(shape) != 2:
        raise InputError(f"the matrix must have two axes, and has the shape {shape}")
    if 0 in shape:
        raise InputError(f"the matrix has the shape {shape}: there is nothing to compute with")
    if values.dtype.kind not in "fiub":
        raise InputError(f"the matrix holds {values.dtype}; give real numbers")
    wanted = np.dtype(dtype or (values.dtype if values.dtype in FLOATS else np.float32))
    if wanted not in FLOATS:
        raise InputError(f"`dtype` (={wanted}) must be float32 or float64")
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(
            f"the matrix holds {values[at]} at row {rows[at]}, column {cols[at]}: its products would depend "
            "on how it is stored; remove what is not finite"
        )
    _check_inside(rows, cols, shape)
    rows, cols = rows.astype(np.int64), cols.astype(np.int64)
    order = np.lexsort((cols, rows))
    rows, cols, values = rows[order], cols[order], values[order].astype(wanted)
    first = np.ones(len(rows), bool)
    first[1:] = (rows[1:] != rows[:-1]) | (cols[1:] != cols[:-1])
    if not first.all():
        values = np.add.reduceat(values, np.flatnonzero(first)).astype(wanted)
        rows, cols = rows[first], cols[first]
    return Coo(rows=rows, cols=cols, values=values, shape=(int(shape[0]), int(shape[1])))


SUFFIXES = (".mtx", ".mtx.gz")
"""Of files that `read_matrix` reads."""


def matrix_name(path: Path) -> str:
    """The name of a file's matrix: the file's without its suffixes."""
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
            raise InputError(f"no such file: {path}")
    return files


def read_matrix(path: Path | str, *, dtype: np.dtype | type | None = None) -> Coo:
    """Read a Matrix Market file (`.mtx`, `.mtx.gz`); a pattern gets values from 0.5 to 1.5, always the same.

    Raises:
        InputError: There is no such file, or its matrix cannot be used.
        FileFormatError: It is not Matrix Market.
    """
    io = require("scipy.io", "tuning")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    try:
        with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
            found = io.mmread(stream)
    except (ValueError, OSError, EOFError, OverflowError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{file} is not a Matrix Market file that can be read: {error}") from error
    matrix = as_coo(found, dtype=dtype)
    if _is_pattern(file):
        return replace(matrix, values=_values(matrix.nnz, matrix.values.dtype))
    return matrix


def _values(count: int, dtype: np.dtype) -> np.ndarray:
    """What elements that come without values are given."""
    return np.random.default_rng(0).uniform(0.5, 1.5, count).astype(dtype)


def _checked_extents(shape: tuple[int, int]) -> tuple[int, int]:
    if len(shape) != 2 or not all(1 <= extent <= _LARGEST for extent in shape):
        raise InputError(f"a pattern has two extents from 1 to {_LARGEST}, and {shape} was given")
    return int(shape[0]), int(shape[1])


def _check_inside(rows: np.ndarray, cols: np.ndarray, shape: tuple[int, ...]) -> None:
    if any(c.size and (c.min() < 0 or c.max() >= n) for c, n in ((rows, shape[0]), (cols, shape[1]))):
        raise InputError(f"the matrix has elements outside of its shape {shape}")


def _is_pattern(file: Path) -> bool:
    with gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb") as stream:
        return b" pattern " in stream.readline(1000).lower()


def _parts(matrix: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
    if isinstance(matrix, Coo):
        return matrix.rows, matrix.cols, matrix.values, matrix.shape
    if type(matrix).__module__.partition(".")[0] == "torch":
        import torch

        if not isinstance(matrix, torch.Tensor) or matrix.ndim != 2:
            raise InputError(f"a sparse matrix is wanted, and {type(matrix).__name__} was given")
        found = matrix.detach().cpu().to_sparse_coo().coalesce()
        rows, cols = found.indices().numpy()
        return rows, cols, found.values().to(_numpy_float(found.dtype)).numpy(), tuple(found.shape)
    if isinstance(matrix, np.ndarray):
        if matrix.ndim != 2:
            raise InputError(
                f"a matrix with two axes is wanted, and an array of shape {matrix.shape} was given"
            )
        rows, cols = np.nonzero(matrix)
        return rows, cols, matrix[rows, cols], matrix.shape
    if require("scipy.sparse", "tuning").issparse(matrix):
        coo = matrix.tocoo()
        return np.asarray(coo.row), np.asarray(coo.col), np.asarray(coo.data), coo.shape
    raise InputError(
        f"a matrix of scipy.sparse, a sparse tensor of torch or a 2-D array is wanted, and "
        f"{type(matrix).__name__} was given"
    )


def _numpy_float(dtype: Any) -> Any:
    """What numpy has a type for: bfloat16 and float16 become float32."""
    import torch

    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
