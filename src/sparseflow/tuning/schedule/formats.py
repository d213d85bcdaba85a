"""Level-by-level storage of sparse matrices.

A matrix is stored as a tree. Each level has *positions*, and below each position of a level is a group of
positions of the next level; level 0 is below the root. What a level stores depends on its mode (Kjolstad et
al., "The Tensor Algebra Compiler", OOPSLA 2017; Chou et al., "Format Abstraction for Sparse Tensor Algebra
Compilers", OOPSLA 2018), with extent `e`:

========================  ==============  ================================================
mode                      stored arrays   positions below one position
========================  ==============  ================================================
dense                     none            `e`, with or without an element
compressed                `pos`, `crd`    one for each coordinate that occurs
compressed, not unique    `pos`, `crd`    one for each element
singleton                 `crd`           one: the position above holds one element
diagonal                  `pos`, `crd`    one for each diagonal that occurs
symmetric                 `pos`, `crd`    one for each column up to the diagonal that occurs
========================  ==============  ================================================

A compressed level may interleave the groups of several adjacent parent positions, its *lanes*: first the
first position of each group, then the second, up to the length of the longest group. Shorter groups are
padded with their last coordinate (0 for empty groups) and with zero values. `pos` then counts steps; one step
has one position for each lane.

A diagonal level is between the blocks of rows and the rows of a block. Its coordinate is the column in which
the diagonal starts, that is, of its element in the first row of the block, which may be outside the matrix.

A symmetric level stores half of a symmetric matrix. The elements above the diagonal have the positions of
their mirror images.

CSR is dense, compressed. COO is compressed (not unique), singleton. Blocks of 4x1 are dense, compressed,
dense with the rows split by 4. DIA is dense, diagonal, dense. Sliced ELL is dense, dense, compressed with the
rows of the second level as lanes. Values, including zeros, are stored by the positions of the last level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.matrices import CooMatrix
from sparseflow.tuning.schedule.parser import LevelMode

MAX_STORAGE_BYTES = 4 << 30
"""Default limit of the storage; dense levels can need any amount."""


@dataclass(frozen=True, kw_only=True)
class LevelSpec:
    """Specification of one storage level.

    Attributes:
        axis: (Sub) axis whose coordinates the level stores.
        dim: Dimension of the matrix, 0 for rows or 1 for columns.
        weight: Matrix coordinates covered by one step.
        extent: Number of coordinates.
        mode: Storage mode.
        lanes: Interleaved groups; above 1 only for a unique compressed level.
        block_rows: Rows of a block; above 1 only for a diagonal level.
    """

    axis: str
    dim: int
    weight: int
    extent: int
    mode: LevelMode
    lanes: int = 1
    block_rows: int = 1

    @property
    def coordinate_dtype(self) -> type[np.integer]:
        """The smallest dtype of `crd`."""
        if self.mode is LevelMode.DIAGONAL:
            return np.int32  # starts can be negative
        if self.extent <= 2**8:
            return np.uint8
        return np.uint16 if self.extent <= 2**16 else np.int32

    def compute_coordinates(self, matrix: CooMatrix) -> np.ndarray:
        """Compute the coordinate of each element in this level, int64 [elements]."""
        if self.mode is LevelMode.DIAGONAL:
            return matrix.cols - matrix.rows % self.block_rows
        coordinates = (matrix.rows, matrix.cols)[self.dim]
        if self.weight > 1:
            coordinates = coordinates // self.weight
        is_outermost = self.weight * self.extent >= matrix.shape[self.dim]
        return coordinates if is_outermost else coordinates % self.extent


@dataclass(frozen=True, kw_only=True)
class StoredLevel:
    """Stored arrays of one level.

    Attributes:
        spec: Specification.
        positions: Number of positions.
        pos: Start of the group of each parent position, in steps; shape [parents / lanes + 1]; see
            `select_index_dtype`.
        crd: Coordinates, shape [positions]; see `LevelSpec.coordinate_dtype`.
    """

    spec: LevelSpec
    positions: int
    pos: np.ndarray | None
    crd: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class PackedMatrix:
    """A sparse matrix in a level format.

    Attributes:
        levels: Levels from the root down.
        values: Shape [positions of the last level], float32 or float64.
        element_positions: Position of each element of the packed matrix, in its order; shape [nnz], int64.
    """

    levels: tuple[StoredLevel, ...]
    values: np.ndarray
    element_positions: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Arrays in the order of the kernel arguments: `pos` and `crd` of every level, then the values."""
        index_arrays = [
            array for level in self.levels for array in (level.pos, level.crd) if array is not None
        ]
        return (*index_arrays, self.values)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def pack(
    matrix: CooMatrix, specs: Sequence[LevelSpec], *, max_bytes: int = MAX_STORAGE_BYTES
) -> PackedMatrix:
    """Store a matrix in a level format.

    Args:
        matrix: Matrix without duplicate coordinates.
        specs: Levels from the root down; together they cover both axes.
        max_bytes: Storage limit.

    Raises:
        InputError: The storage exceeds `max_bytes`, a singleton level has a parent that does not hold exactly
            one element, or a level is symmetric and the matrix is not.
    """
    if any(spec.mode is LevelMode.SYMMETRIC for spec in specs):
        return _pack_triangle(matrix, specs, max_bytes)
    parts = [spec.compute_coordinates(matrix) for spec in specs]
    nnz, element_values = matrix.nnz, matrix.values
    order = _sort_elements(parts)
    if order is not None:
        parts, element_values = [part[order] for part in parts], element_values[order]
    parent, count = np.zeros(nnz, np.int64), 1
    stored, used_bytes = [], 0
    value_bytes = matrix.values.dtype.itemsize

    def check_capacity(count: int, item_bytes: int) -> None:
        if used_bytes + count * item_bytes > max_bytes:
            modes = ", ".join(f"{spec.axis} {spec.mode.name.lower()} of {spec.extent}" for spec in specs)
            raise InputError(
                f"the format ({modes}) needs {(used_bytes + count * item_bytes) / 2**20:,.0f} MiB for "
                f"{nnz:,} elements, more than {max_bytes / 2**20:,.0f} MiB; use fewer or smaller dense levels"
            )

    for spec, coordinate in zip(specs, parts, strict=True):
        pos = crd = None
        if spec.mode is LevelMode.DENSE:
            parent = parent * spec.extent + coordinate
            count *= spec.extent
        elif spec.mode.has_loop:
            check_capacity(count + 1, 4)
            first = np.ones(nnz, bool)
            if spec.mode.unique:
                first[1:] = (parent[1:] != parent[:-1]) | (coordinate[1:] != coordinate[:-1])
            group_starts = np.flatnonzero(first)
            sizes = np.bincount(parent[group_starts], minlength=count)
            steps = sizes if spec.lanes == 1 else sizes.reshape(-1, spec.lanes).max(axis=1)
            pos = np.zeros(len(steps) + 1, select_index_dtype(nnz))
            np.cumsum(steps, out=pos[1:])
            crd = coordinate[group_starts].astype(spec.coordinate_dtype)
            group_index = np.cumsum(first) - 1
            if spec.lanes == 1:
                parent, count = group_index, len(group_starts)
            else:
                check_capacity(int(pos[-1]) * spec.lanes, crd.itemsize)
                crd, positions = _interleave_lanes(crd, parent[group_starts], sizes, pos, spec.lanes)
                parent, count = positions[group_index], len(crd)
        else:
            if count != nnz or not np.array_equal(parent, np.arange(nnz)):
                raise InputError(
                    f"level {spec.axis} is a singleton, but its parents do not hold one element each"
                )
            crd = coordinate.astype(spec.coordinate_dtype)
        used_bytes += sum(array.nbytes for array in (pos, crd) if array is not None)
        # Positions of a dense level need no storage until a level below stores data for them.
        stored.append(StoredLevel(spec=spec, positions=count, pos=pos, crd=crd))
    check_capacity(count, value_bytes)
    values = np.zeros(count, matrix.values.dtype)
    values[parent] = element_values
    positions = parent
    if order is not None:
        positions = np.empty(nnz, np.int64)
        positions[order] = parent
    return PackedMatrix(levels=tuple(stored), values=values, element_positions=positions)


def _sort_elements(parts: Sequence[np.ndarray]) -> np.ndarray | None:
    """Return the order of elements by their coordinates, first level first; None if they are in order."""
    key, extent = np.zeros(len(parts[0]), np.int64), 1
    for part in parts:
        low = int(part.min(initial=0))
        width = int(part.max(initial=0)) - low + 1
        extent *= width
        if extent >= 2**63:
            return np.lexsort(parts[::-1])
        key = key * width + (part - low)
    return None if bool((key[1:] >= key[:-1]).all()) else np.argsort(key, kind="stable")


def _pack_triangle(matrix: CooMatrix, specs: Sequence[LevelSpec], max_bytes: int) -> PackedMatrix:
    """Store the elements up to the diagonal of a symmetric matrix."""
    mirror = find_mirror_elements(matrix)
    if mirror is None:
        raise InputError("the matrix is not symmetric; use a compressed level for the columns")
    stored = np.flatnonzero(matrix.rows >= matrix.cols)
    triangle = replace(
        matrix, rows=matrix.rows[stored], cols=matrix.cols[stored], values=matrix.values[stored]
    )
    compressed = [
        replace(spec, mode=LevelMode.COMPRESSED) if spec.mode is LevelMode.SYMMETRIC else spec
        for spec in specs
    ]
    packed = pack(triangle, compressed, max_bytes=max_bytes)
    positions = np.empty(matrix.nnz, np.int64)
    positions[stored] = packed.element_positions
    positions[mirror[stored]] = packed.element_positions
    return replace(packed, element_positions=positions)


def find_mirror_elements(matrix: CooMatrix) -> np.ndarray | None:
    """Find the element at (column, row) of each element, int64 [nnz]; None if the matrix is not symmetric."""
    if matrix.shape[0] != matrix.shape[1]:
        return None
    by_row, by_column = (
        np.lexsort((matrix.cols, matrix.rows)), np.lexsort((matrix.rows, matrix.cols))
    )  # fmt: skip
    same_rows = np.array_equal(matrix.rows[by_row], matrix.cols[by_column])
    if not same_rows or not np.array_equal(matrix.cols[by_row], matrix.rows[by_column]):
        return None
    mirror = np.empty(matrix.nnz, np.int64)
    mirror[by_row] = by_column
    return mirror if np.array_equal(matrix.values, matrix.values[mirror]) else None


def _interleave_lanes(
    crd: np.ndarray, parent: np.ndarray, sizes: np.ndarray, pos: np.ndarray, lanes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Interleave groups; return the coordinates and the new position of each entry.

    Args:
        crd: Coordinates, group by group.
        parent: Group of each entry.
        sizes: Size of each group.
        pos: First step of each set of `lanes` groups.
        lanes: Number of interleaved groups.
    """
    ends = np.cumsum(sizes)
    last = np.zeros(len(sizes), crd.dtype)
    last[sizes > 0] = crd[ends[sizes > 0] - 1]
    interleaved = np.repeat(last.reshape(-1, lanes), np.diff(pos), axis=0).reshape(-1)
    step = np.arange(len(crd)) - (ends - sizes)[parent]
    positions = (pos[parent // lanes] + step) * lanes + parent % lanes
    interleaved[positions] = crd
    return interleaved, positions


def count_diagonals(matrix: CooMatrix, block_rows: int) -> int:
    """Count the diagonals with an element in each block of rows, and sum over the blocks."""
    blocks, offsets = np.divmod(matrix.rows, block_rows)
    starts = matrix.cols - offsets + block_rows
    return len(np.unique(blocks * (matrix.shape[1] + block_rows) + starts))


def select_index_dtype(nnz: int) -> type[np.signedinteger]:
    """Return the dtype of `pos` for a matrix with `nnz` elements."""
    return np.int32 if nnz < 2**31 else np.int64
