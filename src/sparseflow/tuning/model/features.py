"""Numeric features of a schedule on one matrix, for cost models.

All features are computed from the loop nest and from block counts of the matrix: storage size, iterations of
each loop, footprints of the dense operands, load balance. Nothing is packed or compiled, so schedules that
exceed the memory have features, too.

Feature names:

- `r0`, `r1`, `c0`, `c1`, `d0`, `d1` are the outer and the inner part of rows, columns and the dense axis. An
  unsplit axis is an outer part. With more than two parts, `0` is the outermost and `1` the innermost.
- A number at the end is the position of a loop, 0 for the innermost.
- Values over many magnitudes are base-2 logarithms; `per element` is relative to the elements of the matrix.
- -1 is the value of an absent position or mode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from sparseflow.tuning.codegen.loop_nest import Loop, LoopNest, lower
from sparseflow.tuning.model.block_counts import BlockCounts, BlockSize
from sparseflow.tuning.schedule.formats import select_index_dtype
from sparseflow.tuning.schedule.operators import DENSE_INPUTS
from sparseflow.tuning.schedule.parser import LevelMode
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

_ROLES = ("r0", "r1", "c0", "c1", "d0", "d1")
_NUM_LOOPS = 6
"""Innermost loops with features of their own."""

_NUM_FOOTPRINTS = 4
"""Innermost loops with footprints of the dense operands."""

_CACHE_BYTES = {"l1": 32 << 10, "l2": 1 << 20}
"""Assumed L1 and L2 cache sizes, bytes."""

_LINE_BYTES = 64

_MODE_VALUES = {mode: float(mode) for mode in LevelMode} | {
    LevelMode.SINGLETON_NONUNIQUE: float(LevelMode.SINGLETON)
}

_MAX_CACHED_SCHEDULES = 50_000
"""Schedules with cached features, a few hundred bytes each."""

_PROBLEM_FEATURES = (
    "log2 rows", "log2 cols", "log2 dense", "log2 elements", "log2 elements a row", "spread of rows",
    "log2 longest row", "distance from diagonal", "item bytes", "log2 cpus",
)  # fmt: skip
_SCHEDULE_FEATURES = (
    *(f"{prefix} {axis}" for axis in "rcd" for prefix in ("split", "log2 inner")),
    *(f"mode {role}" for role in _ROLES[:4]),
    *(f"place {role}" for role in _ROLES),
    *(f"log2 positions {role} per element" for role in _ROLES[:4]),
    "log2 values per element", "log2 stored over coordinates",
    *(f"log2 steps {index}" for index in range(_NUM_LOOPS)),
    *(f"log2 bodies {index} per element" for index in range(_NUM_LOOPS)),
    "log2 walks",
    "sums in variables", "sums in an array", "log2 sums kept", "log2 results written per element",
    "written once", "zeroed",
    "vector of results", "vector of a sum", "vector of lanes", "vector hinted at",
    "log2 vectors per element", "lanes used",
    "place unrolled", "log2 unrolled",
    "parallel r", "parallel c", "parallel d", "place parallel", "log2 threads", "log2 chunk",
    "log2 chunks a thread", "log2 times shared", "log2 imbalance",
    *(f"log2 bytes touched {index}" for index in range(_NUM_FOOTPRINTS)),
    *(f"log2 bytes past {cache} per element" for cache in _CACHE_BYTES),
)  # fmt: skip


class ScheduleFeatures:
    """Computes features of schedules of one problem.

    Args:
        problem: Problem.
        threads: CPUs that threads may use.
    """

    names: tuple[str, ...] = _PROBLEM_FEATURES + _SCHEDULE_FEATURES

    def __init__(self, problem: SparseProblem, threads: int) -> None:
        self.problem = problem
        self.blocks = BlockCounts(problem.matrix)
        self._threads = threads
        self._constant = self._describe_problem()
        self._cache: dict[Schedule, np.ndarray] = {}

    def compute(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """Compute the features of schedules, float32, shape [schedules, features].

        Raises:
            InputError: A schedule cannot run.
        """
        new = list(dict.fromkeys(schedule for schedule in schedules if schedule not in self._cache))
        problem = self.problem
        nests = [lower(schedule, problem.operator, problem.extents, problem.dtype) for schedule in new]
        self.blocks.prepare(size for nest in nests for size in _list_block_sizes(nest))
        if len(self._cache) + len(new) > _MAX_CACHED_SCHEDULES:
            self._cache = {
                schedule: self._cache[schedule] for schedule in schedules if schedule in self._cache
            }
        for schedule, nest in zip(new, nests, strict=True):
            self._cache[schedule] = np.array([*self._constant, *self._describe_nest(nest)], np.float32)
        rows = np.empty((len(schedules), len(self.names)), np.float32)
        for row, schedule in enumerate(schedules):
            rows[row] = self._cache[schedule]
        return rows

    def _describe_problem(self) -> list[float]:
        matrix, (rows, cols) = self.problem.matrix, self.problem.matrix.shape
        lengths = self.blocks.count_per_line(0)
        mean = matrix.nnz / rows
        # Distance of columns from the main diagonal, relative to the number of columns.
        diagonal_distance = np.abs(matrix.cols / cols - matrix.rows / rows).mean() if matrix.nnz else 0.0
        return [
            math.log2(rows),
            math.log2(cols),
            math.log2(self.problem.n_cols or 1),
            _log2_clamped(matrix.nnz),
            _log2_clamped(mean),
            float(lengths.std() / mean) if matrix.nnz else 0.0,
            _log2_clamped(float(lengths.max())),
            float(diagonal_distance),
            float(matrix.values.dtype.itemsize),
            math.log2(self._threads),
        ]

    def _describe_nest(self, nest: LoopNest) -> list[float]:
        nnz = max(self.blocks.nnz, 1)
        positions, stored_bytes = self._count_stored(nest)
        bodies, steps = _count_runs(nest, positions)
        # Dense loops around the storage traverse it repeatedly.
        last = max(index for index, loop in enumerate(nest.loops) if loop.level is not None)
        num_walks = math.prod(loop.extent for loop in nest.loops[:last] if loop.level is None)
        return [
            *_describe_splits(nest, [count / nnz for count in positions]),
            _log2_clamped(positions[-1] / nnz),
            _log2_clamped(stored_bytes / (nnz * (8 + nest.dtype.itemsize))),
            *_pad_reversed([_log2_clamped(count) for count in steps], _NUM_LOOPS),
            *_pad_reversed([_log2_clamped(count / nnz) for count in bodies], _NUM_LOOPS),
            _log2_clamped(num_walks),
            *_describe_sums(nest, bodies, nnz),
            *self._describe_parallelism(nest, bodies, steps),
            *self._describe_operands(nest, positions, bodies, steps),
        ]

    def _count_stored(self, nest: LoopNest) -> tuple[list[float], float]:
        """Count the positions of each level and the bytes of the storage of `formats.pack`."""
        nnz, item = self.problem.matrix.nnz, nest.dtype.itemsize
        pointer = np.dtype(select_index_dtype(nnz)).itemsize
        positions, total = [], 0.0
        count, single_element = 1.0, False
        weights: list[int | None] = [None, None]
        for spec in nest.levels:
            strip = weights[1]
            weights[spec.dim] = spec.weight
            above = count
            if spec.mode is LevelMode.DENSE:
                count *= spec.extent
            elif spec.mode.has_loop:
                single_element = single_element or not spec.mode.unique
                if spec.mode is LevelMode.SYMMETRIC:
                    count = float((self.problem.matrix.rows >= self.problem.matrix.cols).sum())
                elif spec.mode is LevelMode.DIAGONAL:
                    count = float(self.blocks.count_diagonals(spec.block_rows))
                elif spec.lanes == 1:
                    count = float(nnz if single_element else self.blocks.count(weights[0], weights[1]))
                else:
                    count = float(
                        spec.lanes * nnz if single_element else self.blocks.count_padded(spec.lanes, strip)
                    )
                total += (above / spec.lanes + 1) * pointer
            if spec.mode is not LevelMode.DENSE:
                total += count * np.dtype(spec.coordinate_dtype).itemsize
            positions.append(count)
        return positions, total + count * item

    def _describe_parallelism(
        self, nest: LoopNest, bodies: Sequence[float], steps: Sequence[float]
    ) -> list[float]:
        loops = nest.loops
        unrolled = next((index for index, loop in enumerate(loops) if loop.unroll > 1), None)
        row = [-1.0, 0.0]
        if unrolled is not None:
            row = [float(len(loops) - 1 - unrolled), math.log2(loops[unrolled].unroll)]
        index = next((index for index, loop in enumerate(loops) if loop.parallel), None)
        if index is None:
            return [*row, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
        loop = loops[index]
        axis = nest.operator.axes.index(loop.axis)
        threads = min(nest.threads, self._threads)
        # Ranges with equal numbers of elements are the work of one step of each thread.
        chunks = float(threads) if nest.balanced else max(steps[index], 1.0) / nest.chunk
        # Share of the thread with the most work: by the number of chunks, and by the largest chunk.
        share = min(math.ceil(math.ceil(chunks) / threads) / chunks, 1.0)
        if axis < 2 and not nest.balanced:
            share = max(
                share, self.blocks.max_in_strip(axis, nest.chunk * loop.weight) / max(self.blocks.nnz, 1)
            )
        return [
            *row,
            *(float(axis == candidate) for candidate in range(3)),
            float(len(loops) - 1 - index),
            math.log2(nest.threads),
            math.log2(nest.chunk) if nest.chunk else -1.0,
            _log2_clamped(chunks / threads),
            _log2_clamped(bodies[index - 1] if index else 1.0),
            _log2_clamped(share * threads),
        ]

    def _describe_operands(
        self, nest: LoopNest, positions: Sequence[float], bodies: Sequence[float], steps: Sequence[float]
    ) -> list[float]:
        """Compute footprints and cache traffic of the dense operands."""
        touched = [
            self._estimate_touched_bytes(nest, positions, steps, index)
            for index in range(len(nest.loops) + 1)
        ]
        row = _pad_reversed([_log2_clamped(count) for count in touched[:-1]], _NUM_FOOTPRINTS)
        runs = [1.0, *bodies]
        for size in _CACHE_BYTES.values():
            # The outermost loops whose operands fit the cache load them again at each start.
            fits = next(
                (index for index, footprint in enumerate(touched) if footprint <= size), len(nest.loops)
            )
            row.append(_log2_clamped(runs[fits] * touched[fits] / max(self.blocks.nnz, 1)))
        return row

    def _estimate_touched_bytes(
        self, nest: LoopNest, positions: Sequence[float], steps: Sequence[float], start: int
    ) -> float:
        """Estimate the bytes of dense operands that one run of the loops from `start` touches, on average."""
        inside = nest.loops[start:]
        extents = dict.fromkeys(nest.operator.axes, 1.0)
        above = [loop for loop in nest.loops[:start] if loop.level is not None]
        weights: list[int | None] = [None, None]
        for loop in above:
            weights[nest.operator.axes.index(loop.axis)] = loop.weight
        runs = positions[above[-1].level or 0] if above else 1.0
        single_element = any(not loop.mode.unique for loop in above if loop.mode is not None)
        min_weights: dict[int, int] = {}
        for loop, step in zip(inside, steps[start:], strict=True):
            if loop.level is None:
                extents[loop.axis] *= step
            elif loop.fixed:
                extents[loop.axis] *= loop.extent
            else:
                # All levels below are dense and touched with or without an element.
                extents[loop.axis] = 1.0
                min_weights[nest.operator.axes.index(loop.axis)] = loop.weight
        for axis, weight in min_weights.items():
            block = [*weights]
            block[axis] = weight
            num_elements = 1.0 if single_element else self.blocks.count(block[0], block[1]) / max(runs, 1.0)
            extents[nest.operator.axes[axis]] *= num_elements
        arrays: list[tuple[str, ...]] = [axes for _, axes in DENSE_INPUTS[nest.operator.name]]
        if not nest.operator.sparse_output:
            arrays.append(nest.operator.output_axes)
        item, total = nest.dtype.itemsize, 0.0
        for axes in arrays:
            last = axes[-1]
            contiguous = math.prod(loop.extent for loop in inside if loop.axis == last and loop.fixed)
            contiguous = max(min(contiguous, extents[last]), 1.0)
            # Adjacent elements share cache lines; each contiguous run starts a new line.
            lines = max(item, _LINE_BYTES / contiguous)
            total_bytes = math.prod(nest.extents[axis] for axis in axes) * item
            total += min(math.prod(extents[axis] for axis in axes) * lines, total_bytes)
        return total


def _list_block_sizes(nest: LoopNest) -> Iterator[BlockSize]:
    """List all blocks whose counts the features may need."""
    weights = [[None, *(spec.weight for spec in nest.levels if spec.dim == axis)] for axis in (0, 1)]
    return itertools.product(*weights)


def _describe_splits(nest: LoopNest, positions: Sequence[float]) -> list[float]:
    """Describe splits, modes, loop order and positions per element."""
    row: list[float] = []
    for axis in nest.operator.axes:
        parts = [loop for loop in nest.loops if loop.axis == axis]
        row += [float(len(parts) > 1), math.log2(math.prod(loop.extent for loop in parts[1:]))]
    row += [0.0] * (6 - len(row))
    by_role: dict[str, tuple[Loop, int]] = {}
    for axis, letter in zip(nest.operator.axes, "rcd", strict=False):
        axis_loops = [
            (loop, position) for position, loop in enumerate(reversed(nest.loops)) if loop.axis == axis
        ]
        by_role[f"{letter}0"] = axis_loops[-1]
        if len(axis_loops) > 1:
            by_role[f"{letter}1"] = axis_loops[0]
    stored = [by_role[role][0] if role in by_role else None for role in _ROLES[:4]]
    row += [-1.0 if loop is None or loop.mode is None else _MODE_VALUES[loop.mode] for loop in stored]
    row += [float(by_role[role][1]) if role in by_role else -1.0 for role in _ROLES]
    row += [
        0.0 if loop is None or loop.level is None else _log2_clamped(positions[loop.level]) for loop in stored
    ]
    return row


def _describe_sums(nest: LoopNest, bodies: Sequence[float], nnz: int) -> list[float]:
    """Describe the location of sums, the writes of results and the innermost loop."""
    inside = nest.loops[nest.region :] if nest.region is not None else ()
    tile = math.prod(_mean_extent(nest, loop) for loop in inside if loop.output)
    written = bodies[-1] if nest.region is None else tile * [1.0, *bodies][nest.region]
    last = nest.loops[-1]
    vectors, lane_utilization = 1.0, 1.0 / nest.lanes
    if nest.vector in ("results", "sum"):
        full, remainder = divmod(last.extent, nest.lanes)
        vectors = full + remainder.bit_count()
        lane_utilization = last.extent / (vectors * nest.lanes)
        vectors /= last.extent
    elif nest.vector == "lanes":
        vectors, lane_utilization = 1.0 / nest.levels[-1].lanes, nest.levels[-1].lanes / nest.lanes
    return [
        float(nest.region is not None and not nest.in_array),
        float(nest.in_array),
        _log2_clamped(tile),
        _log2_clamped(written / nnz),
        float(nest.writes_once),
        float(nest.needs_zeroing),
        *(float(nest.vector == kind) for kind in ("results", "sum", "lanes", "hint")),
        _log2_clamped(vectors * bodies[-1] / nnz),
        lane_utilization,
    ]


def _mean_extent(nest: LoopNest, loop: Loop) -> float:
    """Return the mean steps of a fixed loop; the last block of a dense axis is shortened."""
    if loop.level is None and nest.tail(loop.axis) and loop.weight == 1:
        return nest.extents[loop.axis] / math.prod(
            inner.extent for inner in nest.loops if inner.axis == loop.axis and inner.weight > 1
        )
    return float(loop.extent)


def _count_runs(nest: LoopNest, positions: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the total iterations of each loop and the mean iterations per start of the loop."""
    bodies, steps = [], []
    before, dense, stored = 1.0, 1.0, 1.0
    for loop in nest.loops:
        if loop.level is None:
            dense *= _mean_extent(nest, loop)
        else:
            stored = positions[loop.level]
        bodies.append(dense * stored)
        steps.append(dense * stored / before if before else 0.0)
        before = dense * stored
    return bodies, steps


def _pad_reversed(values: Sequence[float], length: int) -> list[float]:
    """Reverse the values and pad or cut them to `length`."""
    tail = [*reversed(values)][:length]
    return tail + [0.0] * (length - len(tail))


def _log2_clamped(value: float) -> float:
    return math.log2(max(value, 2.0**-30))
