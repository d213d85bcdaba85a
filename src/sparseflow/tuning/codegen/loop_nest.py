"""The loops of a schedule for one matrix's shape: what `codegen` writes down as C.

Lowering decides what a schedule leaves open:

- where sums are kept. From the *region* on, what a result depends on are loops of fixed length; all of its
  results are kept in registers, or else in an array on the stack, while the loops that sum run, and are
  written once at its end. Without such a place every product is added to memory.
- whether the innermost loop becomes vectors of C, whose elements are results (*results*) or parts of one sum
  (*sum*), or is left to the compiler (*hint*), because something does not lie side by side. Where the loop to
  be vectorised stands above the innermost one (*lanes*), each element of a vector is a result with a sum of
  its own, and what is summed is stored so that the elements' shares lie side by side.
- what must be zero before. Rows that no loop visits, and results that are visited more than once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sparseflow.tuning.schedule.formats import LevelSpec, level_specs
from sparseflow.tuning.schedule.operators import DENSE_INPUTS, Operator
from sparseflow.tuning.schedule.schedule import Mode, Schedule

Vector = Literal["results", "sum", "lanes", "hint"]

VECTOR_BYTES = 64
"""The widest vector that is asked for; the compiler splits it where the processor's are narrower."""

_TILE_BYTES = 16384
"""Results that a region may keep: half of a first-level cache."""

VARIABLES = 32
"""Vectors of sums that a region keeps in variables, which is to say in registers."""

_SCALARS = 16
"""Likewise where sums are no vectors."""

CHAINS = 4
"""Vectors that one long sum is spread over, so that additions need not wait for each other."""

_MOST_UNROLLED = 16
"""Copies of a loop's body that `unroll` makes at most."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """One loop.

    Attributes:
        axis: The (sub) axis it runs over.
        of: The axis that this is part of.
        weight: What one step along it is along `of`.
        extent: Steps, for a compressed level at most.
        level: Number of the storage level that it walks; None for a dense axis.
        mode: That level's.
        output: Whether results depend on it.
        parallel: Whether its steps are shared among threads.
        unroll: Copies of its body.
    """

    axis: str
    of: str
    weight: int
    extent: int
    level: int | None
    mode: Mode | None
    output: bool
    parallel: bool
    unroll: int

    @property
    def fixed(self) -> bool:
        """Whether it always has the same steps, whatever the matrix holds."""
        return self.mode in (None, Mode.DENSE)


@dataclass(frozen=True, kw_only=True)
class Nest:
    """A schedule, lowered.

    Attributes:
        operator: What is computed.
        extents: Axis -> extent.
        dtype: float32 or float64.
        loops: Outermost first.
        levels: Storage of the sparse matrix, as `formats.pack` takes it.
        region: Number of the loop before which sums begin to be kept; None where products go to memory.
        in_array: Whether they are kept in an array; else in variables.
        vector: What becomes of the innermost loop, or of the one above it (lanes); None leaves it to the
            compiler as it is.
        once: Whether each result is written only once.
        zeroed: Whether the output must be zero before the loops.
        padded: Axes along which blocks reach over the end of the matrix.
        threads: Threads of the parallel loop.
        chunk: Steps that a thread takes at a time.
    """

    operator: Operator
    extents: Mapping[str, int]
    dtype: np.dtype
    loops: tuple[Loop, ...]
    levels: tuple[LevelSpec, ...]
    region: int | None
    in_array: bool
    vector: Vector | None
    once: bool
    zeroed: bool
    padded: frozenset[str]
    threads: int
    chunk: int

    @property
    def lanes(self) -> int:
        """Elements of the widest vector."""
        return VECTOR_BYTES // self.dtype.itemsize

    def tail(self, axis: str) -> int:
        """Steps of a dense axis' inner part in the last, partial step of its outer part; 0 without one."""
        inner = math.prod(loop.extent for loop in self.loops if loop.of == axis and loop.weight == 1)
        parts = sum(loop.of == axis for loop in self.loops)
        return self.extents[axis] % inner if parts > 1 else 0

    def padded_extent(self, axis: str) -> int:
        """Steps along an axis when the last block counts whole."""
        return math.prod(loop.extent for loop in self.loops if loop.of == axis)

    @property
    def output_shape(self) -> tuple[int, ...] | None:
        """What a kernel writes, rows padded to whole blocks; None for an output stored as the matrix is."""
        if self.operator.sparse_output:
            return None
        rows, *rest = self.operator.output_axes
        return (self.padded_extent(rows), *(self.extents[axis] for axis in rest))


def lower(schedule: Schedule, operator: Operator, extents: Mapping[str, int], dtype: np.dtype | type) -> Nest:
    """Turn a schedule into loops.

    Args:
        schedule: What to do.
        operator: For what.
        extents: Axis -> extent, of all the operator's axes.
        dtype: float32 or float64.

    Raises:
        InputError: The schedule cannot run (`Schedule.problems`).
    """
    # Schedules that run the same give the same source, which is compiled once.
    schedule = schedule.canonical(operator, extents)
    parts = {
        axis: (of, weight, extent)
        for of in operator.axes
        for axis, weight, extent in _parts(schedule, of, extents[of])
    }
    stored = schedule.formats[0].levels()
    number = {level.axis: place for place, level in enumerate(stored)}
    modes = {level.axis: level.mode for level in stored}
    loops = tuple(
        Loop(
            axis=axis,
            of=parts[axis][0],
            weight=parts[axis][1],
            extent=parts[axis][2],
            level=number.get(axis),
            mode=modes.get(axis),
            output=parts[axis][0] in operator.output_axes,
            parallel=axis == schedule.parallel,
            unroll=min(schedule.unroll_factor, _MOST_UNROLLED) if axis == schedule.unroll else 1,
        )
        for axis in schedule.lreorder
    )
    dtype = np.dtype(dtype)
    padded = frozenset(
        of
        for of in operator.sparse_axes
        if math.prod(loop.extent for loop in loops if loop.of == of) != extents[of]
        and any(loop.mode is Mode.DENSE for loop in loops if loop.of == of)
    )
    lanes = 1
    if schedule.vectorize is not None and schedule.vectorize != loops[-1].axis:
        lanes = math.gcd(loops[-2].extent, VECTOR_BYTES // dtype.itemsize)
        vector, region, in_array = "lanes", len(loops) - 2, False
    else:
        vector = None if schedule.vectorize is None else _vector(loops, operator, padded)
        region, in_array = _region(loops, operator, dtype, vector)
    if vector == "sum" and region is None:
        vector = "hint"
    once = _once(loops, region, operator)
    unseen = any(not loop.fixed for loop in loops if loop.output) and not operator.sparse_output
    return Nest(
        operator=operator,
        extents=dict(extents),
        dtype=dtype,
        loops=loops,
        levels=level_specs(
            [(level.axis, level.mode) for level in stored],
            {
                axis: (operator.sparse_axes.index(of), weight, extent)
                for axis, (of, weight, extent) in parts.items()
                if of in operator.sparse_axes
            },
            lanes=lanes,
        ),
        region=region,
        in_array=in_array,
        vector=vector,
        once=once,
        zeroed=unseen or not once,
        padded=padded,
        threads=schedule.threads,
        chunk=schedule.chunk,
    )


def _parts(canonical: Schedule, of: str, extent: int) -> list[tuple[str, int, int]]:
    """(sub axis, weight, extent) of an axis, outermost first."""
    named = canonical.sub_axes(of)
    sizes = [extent if size is None else size for _, size in named]
    return [(axis, math.prod(sizes[place + 1 :]), sizes[place]) for place, (axis, _) in enumerate(named)]


def _region(
    loops: tuple[Loop, ...], operator: Operator, dtype: np.dtype, vector: Vector | None
) -> tuple[int | None, bool]:
    """Where sums begin to be kept, as far out as registers last, else the stack; and whether it is that."""
    first = 0
    for place, loop in enumerate(loops):
        # Where a result lies that is stored as the matrix is, only all levels together tell.
        if (
            loop.parallel
            or (loop.output and not loop.fixed)
            or (operator.sparse_output and loop.level is not None)
        ):
            first = place + 1
    last, lanes = loops[-1], VECTOR_BYTES // dtype.itemsize
    roomy = None
    for place in range(first, len(loops)):
        inside = loops[place:]
        if inside[0].output:
            continue  # each of its steps may as well have a region of its own
        tile = math.prod(loop.extent for loop in inside if loop.output)
        if vector == "results":
            variables, limit = tile // last.extent * -(-last.extent // lanes), VARIABLES
        elif vector == "sum":
            variables, limit = tile * min(CHAINS, max(1, last.extent // lanes)), VARIABLES
        else:
            variables, limit = tile, _SCALARS
        # What is only hinted at stays a loop, and its results an array.
        if variables <= limit and not (vector == "hint" and last.output):
            return place, False
        if roomy is None and tile * dtype.itemsize <= _TILE_BYTES:
            roomy = place
    return roomy, roomy is not None


def _once(loops: tuple[Loop, ...], region: int | None, operator: Operator) -> bool:
    """Whether the region writes each result a single time: it holds all that sums, and no row comes twice."""
    if region is None:
        return False
    alone = operator.sparse_output  # every element has a place of its own
    return all(loop.output and (alone or loop.mode is None or loop.mode.unique) for loop in loops[:region])


def _vector(loops: tuple[Loop, ...], operator: Operator, padded: frozenset[str]) -> Vector:
    last = loops[-1]
    beside = [axes for _, axes in DENSE_INPUTS[operator.name] if last.of in axes]
    side_by_side = (
        last.fixed
        and last.weight == 1
        and last.extent > 1
        and all(axes[-1] == last.of for axes in beside)
        # The last vector of an input would reach over its end.
        and not (beside and last.of in padded)
        and (last.level is None or last.level == max(loop.level or 0 for loop in loops))
        and (not last.output or operator.sparse_output or operator.output_axes[-1] == last.of)
    )
    if not side_by_side:
        return "hint"
    return "results" if last.output else "sum"
