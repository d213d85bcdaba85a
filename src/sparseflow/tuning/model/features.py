"""What a schedule does on one matrix, as numbers that a model can learn from.

Everything follows from the lowered loops and from counts of the matrix's blocks: how much is stored, how
often each loop runs, what the dense operands' caches must hold, how evenly threads share the work. Nothing
is stored or compiled, so that a schedule which would fill the memory is described like any other.

Columns are named after what they hold:

- `r0`, `r1`, `c0`, `c1`, `d0`, `d1` are the outer and the inner part of rows, columns and the dense axis; an
  axis that is whole is an outer part. With more than two parts, `0` is the outermost and `1` the innermost.
- a number at the end is a loop's place, 0 for the innermost.
- what spans many sizes is a base-2 logarithm; `per element` is as a share of the matrix's elements.
- -1 stands for what is not there, where 0 or more would be a place or a mode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from sparseflow.tuning.codegen.loop_nest import Loop, Nest, lower
from sparseflow.tuning.model.block_counts import Blocks, Size
from sparseflow.tuning.schedule.formats import coordinate_type, index_type
from sparseflow.tuning.schedule.operators import DENSE_INPUTS
from sparseflow.tuning.schedule.parser import Mode
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule

_ROLES = ("r0", "r1", "c0", "c1", "d0", "d1")
_DEPTH = 6
"""Loops that are told one by one, from the innermost on."""

_FOOTPRINTS = 4
"""Of so many of them, how much of the dense operands they touch."""

_CACHES = {"l1": 32 << 10, "l2": 1 << 20}
"""What is thought to stay close: bytes of a core's first and second cache."""

_LINE_BYTES = 64

_MODES = {mode: float(mode) for mode in Mode} | {Mode.SINGLETON_NONUNIQUE: float(Mode.SINGLETON)}

_REMEMBERED = 50_000
"""Schedules whose features are kept, a few hundred bytes each."""

_PROBLEM = (
    "log2 rows", "log2 cols", "log2 dense", "log2 elements", "log2 elements a row", "spread of rows",
    "log2 longest row", "distance from diagonal", "item bytes", "log2 cpus",
)  # fmt: skip
_SCHEDULE = (
    *(f"{what} {axis}" for axis in "rcd" for what in ("split", "log2 inner")),
    *(f"mode {role}" for role in _ROLES[:4]),
    *(f"place {role}" for role in _ROLES),
    *(f"log2 positions {role} per element" for role in _ROLES[:4]),
    "log2 values per element", "log2 stored over coordinates",
    *(f"log2 steps {place}" for place in range(_DEPTH)),
    *(f"log2 bodies {place} per element" for place in range(_DEPTH)),
    "log2 walks",
    "sums in variables", "sums in an array", "log2 sums kept", "log2 results written per element",
    "written once", "zeroed",
    "vector of results", "vector of a sum", "vector of lanes", "vector hinted at",
    "log2 vectors per element", "lanes used",
    "place unrolled", "log2 unrolled",
    "parallel r", "parallel c", "parallel d", "place parallel", "log2 threads", "log2 chunk",
    "log2 chunks a thread", "log2 times shared", "log2 imbalance",
    *(f"log2 bytes touched {place}" for place in range(_FOOTPRINTS)),
    *(f"log2 bytes past {cache} per element" for cache in _CACHES),
)  # fmt: skip


class Features:
    """Describes schedules of one problem.

    Args:
        problem: What is computed.
        threads: CPUs that its threads may run on.
    """

    names: tuple[str, ...] = _PROBLEM + _SCHEDULE

    def __init__(self, problem: Problem, threads: int) -> None:
        self.problem = problem
        self.blocks = Blocks(problem.matrix)
        self._cpus = threads
        self._constant = self._of_problem()
        self._known: dict[Schedule, np.ndarray] = {}

    def of(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """One row for each, float32, shape (n, columns).

        Raises:
            InputError: A schedule cannot run.
        """
        new = list(dict.fromkeys(each for each in schedules if each not in self._known))
        problem = self.problem
        nests = [lower(each, problem.operator, problem.extents, problem.dtype) for each in new]
        self.blocks.prepare(size for nest in nests for size in _sizes(nest))
        if len(self._known) + len(new) > _REMEMBERED:
            self._known = {each: self._known[each] for each in schedules if each in self._known}
        for schedule, nest in zip(new, nests, strict=True):
            self._known[schedule] = np.array([*self._constant, *self._of_nest(nest)], np.float32)
        found = np.empty((len(schedules), len(self.names)), np.float32)
        for row, schedule in enumerate(schedules):
            found[row] = self._known[schedule]
        return found

    def _of_problem(self) -> list[float]:
        matrix, (rows, cols) = self.problem.matrix, self.problem.matrix.shape
        lengths = self.blocks.lengths(0)
        mean = matrix.nnz / rows
        # Where columns lie beside those of a diagonal from corner to corner, as a share of all columns.
        away = np.abs(matrix.cols / cols - matrix.rows / rows).mean() if matrix.nnz else 0.0
        return [
            math.log2(rows),
            math.log2(cols),
            math.log2(self.problem.n_cols or 1),
            _log2(matrix.nnz),
            _log2(mean),
            float(lengths.std() / mean) if matrix.nnz else 0.0,
            _log2(float(lengths.max())),
            float(away),
            float(matrix.values.dtype.itemsize),
            math.log2(self._cpus),
        ]

    def _of_nest(self, nest: Nest) -> list[float]:
        nnz = max(self.blocks.nnz, 1)
        positions, stored_bytes = self._stored(nest)
        bodies, steps = _runs(nest, positions)
        # A dense loop around the storage walks it again and again.
        last = max(at for at, loop in enumerate(nest.loops) if loop.level is not None)
        walks = math.prod(loop.extent for loop in nest.loops[:last] if loop.level is None)
        return [
            *_of_parts(nest, [each / nnz for each in positions]),
            _log2(positions[-1] / nnz),
            _log2(stored_bytes / (nnz * (8 + nest.dtype.itemsize))),
            *_inside_out([_log2(each) for each in steps], _DEPTH),
            *_inside_out([_log2(each / nnz) for each in bodies], _DEPTH),
            _log2(walks),
            *_of_sums(nest, bodies, nnz),
            *self._of_sharing(nest, bodies, steps),
            *self._of_operands(nest, positions, bodies, steps),
        ]

    def _stored(self, nest: Nest) -> tuple[list[float], float]:
        """Positions of each level, and bytes of all; as `formats.pack` has them."""
        nnz, item = self.problem.matrix.nnz, nest.dtype.itemsize
        pointer = np.dtype(index_type(nnz)).itemsize
        found, total = [], 0.0
        count, single = 1.0, False
        reached: list[int | None] = [None, None]
        for spec in nest.levels:
            strip = reached[1]
            reached[spec.of] = spec.weight
            above = count
            if spec.mode is Mode.DENSE:
                count *= spec.extent
            elif spec.mode.has_loop:
                single = single or not spec.mode.unique
                if spec.lanes == 1:
                    count = float(nnz if single else self.blocks.count(reached[0], reached[1]))
                else:
                    count = float(spec.lanes * nnz if single else self.blocks.side_by_side(spec.lanes, strip))
                total += (above / spec.lanes + 1) * pointer
            if spec.mode is not Mode.DENSE:
                total += count * np.dtype(coordinate_type(spec.extent)).itemsize
            found.append(count)
        return found, total + count * item

    def _of_sharing(self, nest: Nest, bodies: Sequence[float], steps: Sequence[float]) -> list[float]:
        """What is unrolled and what threads share."""
        loops = nest.loops
        unrolled = next((at for at, loop in enumerate(loops) if loop.unroll > 1), None)
        row = [-1.0, 0.0]
        if unrolled is not None:
            row = [float(len(loops) - 1 - unrolled), math.log2(loops[unrolled].unroll)]
        at = next((at for at, loop in enumerate(loops) if loop.parallel), None)
        if at is None:
            return [*row, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        loop = loops[at]
        axis = nest.operator.axes.index(loop.of)
        threads = min(nest.threads, self._cpus)
        chunks = max(steps[at], 1.0) / nest.chunk
        # What the thread that has most of the work has of it: of whole chunks, and of the fullest one.
        share = min(math.ceil(math.ceil(chunks) / threads) / chunks, 1.0)
        if axis < 2:
            share = max(share, self.blocks.most(axis, nest.chunk * loop.weight) / max(self.blocks.nnz, 1))
        return [
            *row,
            *(float(axis == one) for one in range(3)),
            float(len(loops) - 1 - at),
            math.log2(nest.threads),
            math.log2(nest.chunk),
            _log2(chunks / threads),
            _log2(bodies[at - 1] if at else 1.0),
            _log2(share * threads),
        ]

    def _of_operands(
        self, nest: Nest, positions: Sequence[float], bodies: Sequence[float], steps: Sequence[float]
    ) -> list[float]:
        """How much of the dense operands is worked on at a time, and fetched in all."""
        touched = [self._touched(nest, positions, steps, at) for at in range(len(nest.loops) + 1)]
        row = _inside_out([_log2(each) for each in touched[:-1]], _FOOTPRINTS)
        runs = [1.0, *bodies]
        for size in _CACHES.values():
            # The outermost loops whose operands stay in the cache fetch them anew each time that they begin.
            fits = next((at for at, each in enumerate(touched) if each <= size), len(nest.loops))
            row.append(_log2(runs[fits] * touched[fits] / max(self.blocks.nnz, 1)))
        return row

    def _touched(self, nest: Nest, positions: Sequence[float], steps: Sequence[float], begin: int) -> float:
        """Bytes of the dense operands that the loops from number `begin` on touch in one run, on average."""
        inside = nest.loops[begin:]
        along = dict.fromkeys(nest.operator.axes, 1.0)
        above = [loop for loop in nest.loops[:begin] if loop.level is not None]
        reached: list[int | None] = [None, None]
        for loop in above:
            reached[nest.operator.axes.index(loop.of)] = loop.weight
        runs = positions[above[-1].level or 0] if above else 1.0
        single = any(not loop.mode.unique for loop in above if loop.mode is not None)
        finest: dict[int, int] = {}
        for loop, step in zip(inside, steps[begin:], strict=True):
            if loop.level is None:
                along[loop.of] *= step
            elif loop.fixed:
                along[loop.of] *= loop.extent
            else:
                # What lies below is dense, and touched whether or not there is an element.
                along[loop.of] = 1.0
                finest[nest.operator.axes.index(loop.of)] = loop.weight
        for axis, weight in finest.items():
            below = [*reached]
            below[axis] = weight
            met = 1.0 if single else self.blocks.count(below[0], below[1]) / max(runs, 1.0)
            along[nest.operator.axes[axis]] *= met
        arrays: list[tuple[str, ...]] = [axes for _, axes in DENSE_INPUTS[nest.operator.name]]
        if not nest.operator.sparse_output:
            arrays.append(nest.operator.output_axes)
        item, total = nest.dtype.itemsize, 0.0
        for axes in arrays:
            last = axes[-1]
            beside = math.prod(loop.extent for loop in inside if loop.of == last and loop.fixed)
            beside = max(min(beside, along[last]), 1.0)
            # Neighbours that are touched together share cache lines; each run of them begins its own.
            lines = max(item, _LINE_BYTES / beside)
            whole = math.prod(nest.extents[axis] for axis in axes) * item
            total += min(math.prod(along[axis] for axis in axes) * lines, whole)
        return total


def _sizes(nest: Nest) -> Iterator[Size]:
    """Every block whose count the description may ask for."""
    weights = [[None, *(spec.weight for spec in nest.levels if spec.of == axis)] for axis in (0, 1)]
    return itertools.product(*weights)


def _of_parts(nest: Nest, positions: Sequence[float]) -> list[float]:
    """Splits, modes, the order of the loops, and positions for each element."""
    row: list[float] = []
    for axis in nest.operator.axes:
        parts = [loop for loop in nest.loops if loop.of == axis]
        row += [float(len(parts) > 1), math.log2(math.prod(loop.extent for loop in parts[1:]))]
    row += [0.0] * (6 - len(row))
    by_role: dict[str, tuple[Loop, int]] = {}
    for axis, letter in zip(nest.operator.axes, "rcd", strict=False):
        of = [(loop, place) for place, loop in enumerate(reversed(nest.loops)) if loop.of == axis]
        by_role[f"{letter}0"] = of[-1]
        if len(of) > 1:
            by_role[f"{letter}1"] = of[0]
    stored = [by_role[role][0] if role in by_role else None for role in _ROLES[:4]]
    row += [-1.0 if loop is None or loop.mode is None else _MODES[loop.mode] for loop in stored]
    row += [float(by_role[role][1]) if role in by_role else -1.0 for role in _ROLES]
    row += [0.0 if loop is None or loop.level is None else _log2(positions[loop.level]) for loop in stored]
    return row


def _of_sums(nest: Nest, bodies: Sequence[float], nnz: int) -> list[float]:
    """Where sums are, how often results are written, and the innermost loop."""
    inside = nest.loops[nest.region :] if nest.region is not None else ()
    tile = math.prod(_extent(nest, loop) for loop in inside if loop.output)
    written = bodies[-1] if nest.region is None else tile * [1.0, *bodies][nest.region]
    last = nest.loops[-1]
    vectors, used = 1.0, 1.0 / nest.lanes
    if nest.vector in ("results", "sum"):
        full, rest = divmod(last.extent, nest.lanes)
        vectors = full + rest.bit_count()
        used = last.extent / (vectors * nest.lanes)
        vectors /= last.extent
    elif nest.vector == "lanes":
        vectors, used = 1.0 / nest.levels[-1].lanes, nest.levels[-1].lanes / nest.lanes
    return [
        float(nest.region is not None and not nest.in_array),
        float(nest.in_array),
        _log2(tile),
        _log2(written / nnz),
        float(nest.once),
        float(nest.zeroed),
        *(float(nest.vector == kind) for kind in ("results", "sum", "lanes", "hint")),
        _log2(vectors * bodies[-1] / nnz),
        used,
    ]


def _extent(nest: Nest, loop: Loop) -> float:
    """Steps of a loop of fixed length, on average: the last block of a dense axis is cut short."""
    if loop.level is None and nest.tail(loop.of) and loop.weight == 1:
        return nest.extents[loop.of] / math.prod(
            each.extent for each in nest.loops if each.of == loop.of and each.weight > 1
        )
    return float(loop.extent)


def _runs(nest: Nest, positions: Sequence[float]) -> tuple[list[float], list[float]]:
    """How often the body of each loop runs in all, and on average whenever the loop is begun."""
    bodies, steps = [], []
    before, dense, stored = 1.0, 1.0, 1.0
    for loop in nest.loops:
        if loop.level is None:
            dense *= _extent(nest, loop)
        else:
            stored = positions[loop.level]
        bodies.append(dense * stored)
        steps.append(dense * stored / before if before else 0.0)
        before = dense * stored
    return bodies, steps


def _inside_out(values: Sequence[float], wanted: int) -> list[float]:
    """The last of them first, and 0 where there are not so many."""
    found = [*reversed(values)][:wanted]
    return found + [0.0] * (wanted - len(found))


def _log2(value: float) -> float:
    """Its logarithm; of nothing, that of next to nothing."""
    return math.log2(max(value, 2.0**-30))
