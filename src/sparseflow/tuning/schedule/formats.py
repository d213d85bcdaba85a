"""Storing a sparse matrix level by level: dense, compressed and singleton levels, with or without duplicates.

A matrix is stored as a tree. Level 0 lies below the root; every level has *positions*, and below each
position of a level lies a group of positions of the next. What a level stores depends on its mode (Kjolstad
et al., "The Tensor Algebra Compiler", OOPSLA 2017; Chou et al., "Format Abstraction for Sparse Tensor Algebra
Compilers", OOPSLA 2018), `e` being its extent:

========================  ==============  ==================================================
mode                      stored          positions below one position
========================  ==============  ==================================================
dense                     nothing         `e`, also where there is no element
compressed                `pos`, `crd`    one for each coordinate that occurs
compressed, not unique    `pos`, `crd`    one for each element
singleton                 `crd`           one: the position above holds one element
========================  ==============  ==================================================

A compressed level may keep the groups of some neighbouring positions above it, its *lanes*, side by side: the
first position of each group, then the second of each, as far as the longest group goes. Shorter groups are
filled up with their last coordinate (0 where there is none) and, in the values, zeros. `pos` then counts
steps: a lane is one of the positions of a step.

CSR is dense, compressed; COO is compressed (not unique), singleton; blocks of 4x1 are dense, compressed,
dense with the rows split by 4; sliced ELL is dense, dense, compressed with the second level's rows as lanes.
Values lie at the positions of the last level, zeros included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.matrices import Coo
from sparseflow.tuning.schedule.schedule import Mode

LIMIT_BYTES = 4 << 30
"""Storage that a format may take by default: dense levels can ask for any amount."""


@dataclass(frozen=True, kw_only=True)
class LevelSpec:
    """One level to be stored.

    Attributes:
        axis: The (sub) axis whose coordinates it holds.
        of: The matrix's axis, 0 for rows or 1 for columns.
        weight: What one step along it is in coordinates of the matrix.
        extent: Its coordinates are 0 to `extent` - 1.
        mode: How they are stored.
        lanes: Groups that stand side by side; above 1 only for a unique compressed level.
    """

    axis: str
    of: int
    weight: int
    extent: int
    mode: Mode
    lanes: int = 1


@dataclass(frozen=True, kw_only=True)
class StoredLevel:
    """One level as stored.

    Attributes:
        spec: What was asked for.
        positions: How many it has.
        pos: Shape (positions above / lanes + 1,), `index_type`: where the group below each position begins,
            in steps.
        crd: Shape (positions,), `coordinate_type`: coordinates.
    """

    spec: LevelSpec
    positions: int
    pos: np.ndarray | None
    crd: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A stored matrix.

    Attributes:
        levels: From the root down.
        values: Shape (positions of the last level,), float32 or float64.
        leaf: Shape (nnz,), int64: position of each element, in the order of the matrix it was packed from.
    """

    levels: tuple[StoredLevel, ...]
    values: np.ndarray
    leaf: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """What a kernel is handed: `pos` and `crd` of every level that has them, then the values."""
        found = [array for level in self.levels for array in (level.pos, level.crd) if array is not None]
        return (*found, self.values)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)


def pack(matrix: Coo, specs: Sequence[LevelSpec], *, limit_bytes: int = LIMIT_BYTES) -> Packed:
    """Store a matrix.

    Args:
        matrix: Its elements, none of them twice.
        specs: Its levels from the root down; together they cover both axes.
        limit_bytes: What may be stored at most.

    Raises:
        InputError: The storage would be larger than `limit_bytes`, or a singleton level lies below a position
            that does not hold exactly one element.
    """
    axes = (matrix.rows, matrix.cols)
    parts = [axes[spec.of] // spec.weight % spec.extent for spec in specs]
    order = np.lexsort(parts[::-1])
    nnz = len(order)
    parts = [part[order] for part in parts]
    parent, count = np.zeros(nnz, np.int64), 1
    stored, used = [], 0
    item = matrix.values.dtype.itemsize

    def room(wanted: int, each: int) -> None:
        if used + wanted * each > limit_bytes:
            modes = ", ".join(f"{spec.axis} {spec.mode.name.lower()} of {spec.extent}" for spec in specs)
            raise InputError(
                f"the format ({modes}) needs {(used + wanted * each) / 2**20:,.0f} MiB for {nnz:,} elements, "
                f"and {limit_bytes / 2**20:,.0f} MiB are allowed; use fewer dense levels or smaller ones"
            )

    for spec, coordinate in zip(specs, parts, strict=True):
        pos = crd = None
        if spec.mode is Mode.DENSE:
            parent = parent * spec.extent + coordinate
            count *= spec.extent
        elif spec.mode.has_loop:
            room(count + 1, 4)
            first = np.ones(nnz, bool)
            if spec.mode.unique:
                first[1:] = (parent[1:] != parent[:-1]) | (coordinate[1:] != coordinate[:-1])
            chosen = np.flatnonzero(first)
            sizes = np.bincount(parent[chosen], minlength=count)
            steps = sizes if spec.lanes == 1 else sizes.reshape(-1, spec.lanes).max(axis=1)
            pos = np.zeros(len(steps) + 1, index_type(nnz))
            np.cumsum(steps, out=pos[1:])
            crd = coordinate[chosen].astype(coordinate_type(spec.extent))
            number = np.cumsum(first) - 1
            if spec.lanes == 1:
                parent, count = number, len(chosen)
            else:
                room(int(pos[-1]) * spec.lanes, crd.itemsize)
                crd, places = _side_by_side(crd, parent[chosen], sizes, pos, spec.lanes)
                parent, count = places[number], len(crd)
        else:
            if count != nnz or not np.array_equal(parent, np.arange(nnz)):
                raise InputError(
                    f"the level {spec.axis} is a singleton, and positions above it do not hold one element"
                )
            crd = coordinate.astype(coordinate_type(spec.extent))
        used += sum(array.nbytes for array in (pos, crd) if array is not None)
        # Positions of a dense level cost nothing until something is stored for each of them.
        stored.append(StoredLevel(spec=spec, positions=count, pos=pos, crd=crd))
    room(count, item)
    values = np.zeros(count, matrix.values.dtype)
    values[parent] = matrix.values[order]
    leaf = np.empty(nnz, np.int64)
    leaf[order] = parent
    return Packed(levels=tuple(stored), values=values, leaf=leaf)


def _side_by_side(
    crd: np.ndarray, parent: np.ndarray, sizes: np.ndarray, pos: np.ndarray, lanes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of groups in lanes, and where each one went.

    Args:
        crd: Coordinates, group by group.
        parent: Number of each one's group.
        sizes: Of each group.
        pos: Where the steps of each `lanes` groups begin.
        lanes: Groups that stand side by side.
    """
    ends = np.cumsum(sizes)
    last = np.zeros(len(sizes), crd.dtype)
    last[sizes > 0] = crd[ends[sizes > 0] - 1]
    found = np.repeat(last.reshape(-1, lanes), np.diff(pos), axis=0).reshape(-1)
    step = np.arange(len(crd)) - (ends - sizes)[parent]
    places = (pos[parent // lanes] + step) * lanes + parent % lanes
    found[places] = crd
    return found, places


def level_specs(
    order: Sequence[tuple[str, Mode]], parts: Mapping[str, tuple[int, int, int]], *, lanes: int = 1
) -> tuple[LevelSpec, ...]:
    """The levels of a storage order.

    Args:
        order: (sub axis, mode) from the root down.
        parts: Sub axis -> (0 for rows or 1 for columns, weight, extent).
        lanes: Groups of the last level that stand side by side.
    """
    last = len(order) - 1
    return tuple(
        LevelSpec(
            axis=axis,
            of=parts[axis][0],
            weight=parts[axis][1],
            extent=parts[axis][2],
            mode=mode,
            lanes=lanes if place == last else 1,
        )
        for place, (axis, mode) in enumerate(order)
    )


def index_type(nnz: int) -> type[np.signedinteger]:
    """The type of `pos` in a matrix of so many elements."""
    return np.int32 if nnz < 2**31 else np.int64


def coordinate_type(extent: int) -> type[np.integer]:
    """The type of `crd` in a level of that extent: the smaller, the less is read."""
    if extent <= 2**8:
        return np.uint8
    return np.uint16 if extent <= 2**16 else np.int32
