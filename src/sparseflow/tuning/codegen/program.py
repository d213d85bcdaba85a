"""A schedule lowered for one matrix: loop nest, C source and packed matrix."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sparseflow.core.checks import check_at_least, check_between
from sparseflow.errors import InputError
from sparseflow.tuning.codegen.c_source import generate_source
from sparseflow.tuning.codegen.compile import compile_source
from sparseflow.tuning.codegen.loop_nest import LoopNest, lower
from sparseflow.tuning.schedule.formats import MAX_STORAGE_BYTES, PackedMatrix, pack, select_index_dtype
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule

ALIGNMENT = 64

_THREADS_PER_CPU = 4
_MIN_THREAD_LIMIT = 16

_MAX_STORAGE_RATIO = 32
"""Storage limit of a schedule as a multiple of the coordinate format."""

_MIN_STORAGE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class KernelProgram:
    """A schedule for a problem, ready to compile and run.

    Attributes:
        problem: Problem.
        schedule: Schedule.
        nest: Loop nest.
        source: C source.
        packed: Matrix in the storage format of the schedule.
    """

    problem: SparseProblem
    schedule: Schedule
    nest: LoopNest
    source: str
    packed: PackedMatrix

    def compile(self, *, cache_dir: Path | None = None) -> Path:
        """Compile to a shared object; see `compile_source`."""
        return compile_source(self.source, cache_dir=cache_dir)

    @property
    def leading_arrays(self) -> tuple[np.ndarray, ...]:
        """Kernel arguments before the dense inputs: sizes, the first step of each thread, packed matrix."""
        return (self.sizes, *([self.ranges] if self.nest.balanced else []), *self.packed.arrays)

    @cached_property
    def sizes(self) -> np.ndarray:
        """Rows and columns of the matrix, and the chunk of the schedule; int64 [3]."""
        return np.array([*self.problem.matrix.shape, self.nest.chunk], np.int64)

    @cached_property
    def ranges(self) -> np.ndarray:
        """First step of the outermost loop for each thread, and the end; int64 [threads + 1].

        The ranges have about equal numbers of elements and rows together, because a row takes time, too.

        With symmetric storage, the first column of each thread's elements and the index of its sums of rows
        above its range follow, both [threads].
        """
        level, matrix = self.nest.levels[0], self.problem.matrix
        coordinates = (matrix.rows, matrix.cols)[level.dim]
        if self.schedule.is_symmetric:
            coordinates = coordinates[matrix.rows >= matrix.cols]
        work = np.bincount(coordinates // level.weight, minlength=level.extent)
        ends = np.cumsum(work + level.weight)
        targets = ends[-1] * np.arange(1, self.nest.threads) / self.nest.threads
        bounds = np.array([0, *np.searchsorted(ends, targets), level.extent], np.int64)
        if not self.schedule.is_symmetric:
            return bounds
        starts = bounds[:-1]
        lowest = starts.copy()
        np.minimum.at(lowest, np.searchsorted(bounds, matrix.rows, side="right") - 1, matrix.cols)
        sums = level.extent + np.cumsum(starts - lowest)
        return np.concatenate([bounds, lowest, [level.extent], sums[:-1]])

    @cached_property
    def trailing_arrays(self) -> tuple[np.ndarray, ...]:
        """Kernel arguments after the dense inputs: the number of values of a sparse output."""
        sparse = self.problem.operator.sparse_output
        return (np.array([len(self.packed.values)], np.int64),) if sparse else ()

    def bind_inputs(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Return all kernel arguments in order."""
        return (*self.leading_arrays, *inputs, *self.trailing_arrays)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the output, including padded rows, and sums of each thread with symmetric storage."""
        if self.nest.balanced and self.schedule.is_symmetric:
            threads, last = self.nest.threads, self.nest.threads - 1
            bounds, lowest, sums = np.split(self.ranges, (threads + 1, 2 * threads + 1))
            return (int(sums[last] + bounds[last] - lowest[last]),)
        return self.nest.output_shape or self.packed.values.shape

    def extract_result(self, output: np.ndarray) -> np.ndarray:
        """Remove the padding of an output: C or y, or the values of D in the order of the matrix."""
        if self.problem.operator.sparse_output:
            return output[self.packed.element_positions]
        return output[: self.problem.matrix.shape[0]]


def build_program(
    problem: SparseProblem, schedule: Schedule, *, max_bytes: int = MAX_STORAGE_BYTES
) -> KernelProgram:
    """Lower a schedule, pack the matrix and generate the C source.

    Args:
        problem: Problem.
        schedule: Schedule.
        max_bytes: Limit of the packed matrix, and of the rows that blocks add to the output.

    Raises:
        InputError: The schedule cannot run, uses too many threads, or exceeds `max_bytes`.
    """
    nest = lower(schedule, problem.operator, problem.extents, problem.dtype)
    check_threads(nest.threads)
    if nest.output_shape is not None:
        rows, *columns = nest.output_shape
        padding_bytes = (rows - problem.matrix.shape[0]) * math.prod(columns) * problem.dtype.itemsize
        if padding_bytes > max_bytes:
            raise InputError(f"the blocks of the schedule pad the output to {rows} rows; use smaller blocks")
    packed = pack(problem.matrix, nest.levels, max_bytes=max_bytes)
    wide = select_index_dtype(problem.matrix.nnz) is np.int64
    return KernelProgram(
        problem=problem,
        schedule=schedule,
        nest=nest,
        source=generate_source(nest, wide=wide),
        packed=packed,
    )


def check_threads(threads: int) -> None:
    """Check that this machine can run a number of threads; OpenMP ends the process if it cannot.

    Raises:
        InputError: `threads` is below 1 or exceeds four threads per CPU, or 16 with fewer than four CPUs.
    """
    limit = max(_MIN_THREAD_LIMIT, _THREADS_PER_CPU * (os.cpu_count() or 1))
    check_at_least(1, threads=threads)
    check_between(1, limit, threads=threads)


def compute_storage_limit(problem: SparseProblem) -> int:
    """Return the storage limit of schedules that are not written by hand, bytes."""
    stored = problem.matrix.nnz * (8 + problem.dtype.itemsize)
    return min(max(_MAX_STORAGE_RATIO * stored, _MIN_STORAGE_BYTES), MAX_STORAGE_BYTES)


def allocate_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an uninitialized array that is aligned to a cache line."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
