"""Lowering of a schedule to a loop nest, the input of code generation.

Lowering decides what a schedule leaves open:

- Location of the sums. Inside the *region* all loops that results depend on have a fixed extent. The results
  of the region are accumulated in registers, or else in an array on the stack, and are written once at its
  end. Without a region every product is added to memory.
- Vectorization. The elements of C vectors are adjacent results (*results*) or parts of one sum (*sum*). If
  the data is not contiguous, the loop gets a pragma for the compiler (*hint*). If the vectorized loop is
  above the innermost loop (*lanes*), each element is a result with its own sum, and the storage interleaves
  the groups of the lanes.
- Zeroing. The output is zeroed if some rows are never visited or if results are written more than once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparseflow.tuning.schedule.formats import LevelSpec
from sparseflow.tuning.schedule.operators import DENSE_INPUTS, Operator
from sparseflow.tuning.schedule.parser import LevelMode
from sparseflow.tuning.schedule.rules import BALANCED
from sparseflow.tuning.schedule.schedule import Schedule

VectorMode = Literal["results", "sum", "lanes", "hint"]

VECTOR_BYTES = 64
"""Widest vector; the compiler splits it if the CPU has narrower vectors."""

_MAX_TILE_BYTES = 16384
"""Results that a region may accumulate: half of an L1 cache."""

MAX_VARIABLES = 32
"""Vectors that a region accumulates in variables, that is, in registers."""

_MAX_SCALARS = 16
"""The same limit for scalar sums."""

NUM_CHAINS = 4
"""Independent vectors of one long sum, to hide the latency of additions."""

_MAX_UNROLL = 16
"""Largest unroll factor."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One loop.

    Attributes:
        sub_axis: (Sub) axis that the loop runs over.
        axis: Axis that contains `sub_axis`.
        weight: Coordinates of `axis` that one step covers.
        extent: Number of steps; an upper bound for a compressed level.
        level: Index of the storage level; None for a dense axis.
        mode: Mode of the storage level.
        output: Whether results depend on the loop.
        parallel: Whether threads share the steps.
        unroll: Unroll factor.
    """

    sub_axis: str
    axis: str
    weight: int
    extent: int
    level: int | None
    mode: LevelMode | None
    output: bool
    parallel: bool
    unroll: int

    @property
    def fixed(self) -> bool:
        """Whether the number of steps does not depend on the matrix."""
        return self.mode in (None, LevelMode.DENSE)


@dataclass(frozen=True, kw_only=True)
class LoopNest:
    """A lowered schedule.

    Attributes:
        operator: Operator.
        extents: Axis name -> extent.
        dtype: float32 or float64.
        loops: Loops, outermost first.
        levels: Storage levels of the sparse matrix, for `formats.pack`.
        region: Index of the first loop of the region; None adds products to memory.
        in_array: Whether the region accumulates in an array instead of variables.
        vector: Vectorization of the innermost loop, or of the loop above (lanes); None leaves it to the
            compiler.
        writes_once: Whether each result is written only once.
        needs_zeroing: Whether the output must be zeroed before the loops.
        padded: Axes whose blocks extend beyond the matrix.
        threads: Threads of the parallel loop.
        chunk: Steps that a thread takes at a time; see `rules.BALANCED` for 0.
    """

    operator: Operator
    extents: Mapping[str, int]
    dtype: np.dtype
    loops: tuple[Loop, ...]
    levels: tuple[LevelSpec, ...]
    region: int | None
    in_array: bool
    vector: VectorMode | None
    writes_once: bool
    needs_zeroing: bool
    padded: frozenset[str]
    threads: int
    chunk: int

    @property
    def lanes(self) -> int:
        """Elements of the widest vector."""
        return VECTOR_BYTES // self.dtype.itemsize

    def tail(self, axis: str) -> int:
        """Return the inner steps of the last, partial outer step of a dense axis; 0 if there is none."""
        inner = math.prod(loop.extent for loop in self.loops if loop.axis == axis and loop.weight == 1)
        parts = sum(loop.axis == axis for loop in self.loops)
        return self.extents[axis] % inner if parts > 1 else 0

    def padded_extent(self, axis: str) -> int:
        """Return the extent of an axis rounded up to full blocks."""
        return math.prod(loop.extent for loop in self.loops if loop.axis == axis)

    @property
    def balanced(self) -> bool:
        """Whether each thread takes one range of the outermost loop, with equal numbers of elements."""
        return self.threads > 1 and self.chunk == BALANCED

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        """Shape of the output with rows padded to full blocks; None for an output stored like the matrix."""
        if self.operator.sparse_output:
            return None
        rows, *columns = self.operator.output_axes
        return (self.padded_extent(rows), *(self.extents[axis] for axis in columns))


def lower(
    schedule: Schedule, operator: Operator, extents: Mapping[str, int], dtype: np.dtype | type
) -> LoopNest:
    """Lower a schedule to a loop nest.

    Args:
        schedule: Schedule.
        operator: Operator.
        extents: Extents of all axes.
        dtype: float32 or float64.

    Raises:
        InputError: The schedule cannot run; see `Schedule.find_violations`.
    """
    # Schedules that run identically share one source, which is compiled once.
    schedule = schedule.canonicalize(operator, extents)
    dtype = np.dtype(dtype)
    loops = _build_loops(schedule, operator, extents)
    padded = frozenset(
        axis
        for axis in operator.sparse_axes
        if math.prod(loop.extent for loop in loops if loop.axis == axis) != extents[axis]
        and any(loop.mode is LevelMode.DENSE for loop in loops if loop.axis == axis)
    )
    lanes = 1
    if schedule.vectorize is not None and schedule.vectorize != loops[-1].sub_axis:
        lanes = math.gcd(loops[-2].extent, VECTOR_BYTES // dtype.itemsize)
        vector, region, in_array = "lanes", len(loops) - 2, False
    else:
        vector = None if schedule.vectorize is None else _select_vector_mode(loops, operator, padded)
        region, in_array = _select_region(loops, operator, dtype, vector)
    if vector == "sum" and region is None:
        vector = "hint"
    once = _writes_once(loops, region, operator)
    skips_results = any(not loop.fixed for loop in loops if loop.output) and not operator.sparse_output
    # Loops over storage levels have the order of the levels.
    stored = [loop for loop in loops if loop.level is not None]
    return LoopNest(
        operator=operator,
        extents=dict(extents),
        dtype=dtype,
        loops=loops,
        levels=tuple(
            LevelSpec(
                axis=loop.sub_axis,
                dim=operator.sparse_axes.index(loop.axis),
                weight=loop.weight,
                extent=loop.extent,
                mode=loop.mode or LevelMode.DENSE,
                lanes=lanes if loop is stored[-1] else 1,
                block_rows=stored[-1].extent if loop.mode is LevelMode.DIAGONAL else 1,
            )
            for loop in stored
        ),
        region=region,
        in_array=in_array,
        vector=vector,
        writes_once=once,
        needs_zeroing=skips_results or not once,
        padded=padded,
        threads=schedule.threads,
        chunk=schedule.chunk,
    )


def _build_loops(schedule: Schedule, operator: Operator, extents: Mapping[str, int]) -> tuple[Loop, ...]:
    """Build the loops of a canonical schedule, outermost first."""
    parts: dict[str, tuple[str, int, int]] = {}  # sub axis -> (axis, weight, extent)
    for axis in operator.axes:
        sub_axes = schedule.sub_axes(axis)
        sizes = [extents[axis] if size is None else size for _, size in sub_axes]
        for index, (sub_axis, _) in enumerate(sub_axes):
            parts[sub_axis] = (axis, math.prod(sizes[index + 1 :]), sizes[index])
    levels = schedule.formats[0].levels()
    level_index = {level.axis: index for index, level in enumerate(levels)}
    modes = {level.axis: level.mode for level in levels}
    return tuple(
        Loop(
            sub_axis=sub_axis,
            axis=parts[sub_axis][0],
            weight=parts[sub_axis][1],
            extent=parts[sub_axis][2],
            level=level_index.get(sub_axis),
            mode=modes.get(sub_axis),
            output=parts[sub_axis][0] in operator.output_axes,
            parallel=sub_axis == schedule.parallel,
            unroll=min(schedule.unroll_factor, _MAX_UNROLL) if sub_axis == schedule.unroll else 1,
        )
        for sub_axis in schedule.lreorder
    )


def _select_region(
    loops: tuple[Loop, ...], operator: Operator, dtype: np.dtype, vector: VectorMode | None
) -> tuple[int | None, bool]:
    """Return the first loop of the region and whether it accumulates in an array.

    The region starts as far out as registers suffice, else as far out as the stack limit allows.
    """
    first = 0
    for index, loop in enumerate(loops):
        # The index of a result that is stored like the matrix depends on all levels.
        if (
            loop.parallel
            or (loop.output and not loop.fixed)
            or (operator.sparse_output and loop.level is not None)
        ):
            first = index + 1
    last, lanes = loops[-1], VECTOR_BYTES // dtype.itemsize
    array_region = None
    for index in range(first, len(loops)):
        inside = loops[index:]
        if inside[0].output:
            continue  # a region inside the loop is equally good
        tile = math.prod(loop.extent for loop in inside if loop.output)
        if vector == "results":
            variables, limit = tile // last.extent * -(-last.extent // lanes), MAX_VARIABLES
        elif vector == "sum":
            variables, limit = tile * min(NUM_CHAINS, max(1, last.extent // lanes)), MAX_VARIABLES
        else:
            variables, limit = tile, _MAX_SCALARS
        # A loop with a pragma stays a loop, so its results need an array.
        if variables <= limit and not (vector == "hint" and last.output):
            return index, False
        if array_region is None and tile * dtype.itemsize <= _MAX_TILE_BYTES:
            array_region = index
    return array_region, array_region is not None


def _writes_once(loops: tuple[Loop, ...], region: int | None, operator: Operator) -> bool:
    """Whether the region contains all summing loops and no row occurs twice."""
    if region is None:
        return False
    unique_elements = operator.sparse_output  # every element has its own result
    return all(
        loop.output and (unique_elements or loop.mode is None or loop.mode.unique) for loop in loops[:region]
    )


def _select_vector_mode(loops: tuple[Loop, ...], operator: Operator, padded: frozenset[str]) -> VectorMode:
    last = loops[-1]
    input_axes = [axes for _, axes in DENSE_INPUTS[operator.name] if last.axis in axes]
    contiguous = (
        last.fixed
        and last.weight == 1
        and last.extent > 1
        and all(axes[-1] == last.axis for axes in input_axes)
        # The last vector of an input would exceed its end.
        and not (input_axes and last.axis in padded)
        and (last.level is None or last.level == max(loop.level or 0 for loop in loops))
        and (not last.output or operator.sparse_output or operator.output_axes[-1] == last.axis)
    )
    if not contiguous:
        return "hint"
    return "results" if last.output else "sum"
