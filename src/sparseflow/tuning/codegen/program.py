"""A schedule made concrete for one matrix: its loops, its C source, the matrix as that reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from sparseflow.tuning.codegen.c_source import generate
from sparseflow.tuning.codegen.compile import compile_source
from sparseflow.tuning.codegen.loop_nest import Nest, lower
from sparseflow.tuning.schedule.formats import LIMIT_BYTES, Packed, index_type, pack
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule

ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class Program:
    """A schedule for a problem, ready to be compiled and run.

    Attributes:
        problem: What is computed.
        schedule: How.
        nest: Its loops.
        source: Its C.
        packed: The matrix as it reads it.
    """

    problem: Problem
    schedule: Schedule
    nest: Nest
    source: str
    packed: Packed

    def compiled(self, *, cache: Path | None = None) -> Path:
        """The shared object. Raises DeviceError without a compiler, RunError where it fails."""
        return compile_source(self.source, cache=cache)

    @property
    def before(self) -> tuple[np.ndarray, ...]:
        """What it reads before the dense inputs: the matrix."""
        return self.packed.arrays

    @cached_property
    def after(self) -> tuple[np.ndarray, ...]:
        """What it reads after them: for an output that is stored as the matrix is, how long that is."""
        sparse = self.problem.operator.sparse_output
        return (np.array([len(self.packed.values)], np.int64),) if sparse else ()

    def arrays(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """What the compiled function reads, in its order."""
        return (*self.before, *inputs, *self.after)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """What it writes, rows of padding included."""
        return self.nest.output_shape or self.packed.values.shape

    def result(self, output: np.ndarray) -> np.ndarray:
        """What it wrote, without padding: C or y, or the values of D in the order of the matrix."""
        if self.problem.operator.sparse_output:
            return output[self.packed.leaf]
        return output[: self.problem.matrix.shape[0]]


def build(problem: Problem, schedule: Schedule, *, limit_bytes: int = LIMIT_BYTES) -> Program:
    """Lower a schedule, store the matrix for it and write its C.

    Raises:
        InputError: The schedule cannot run, or its storage would be larger than `limit_bytes`.
    """
    nest = lower(schedule, problem.operator, problem.extents, problem.dtype)
    packed = pack(problem.matrix, nest.levels, limit_bytes=limit_bytes)
    wide = index_type(problem.matrix.nnz) is np.int64
    return Program(
        problem=problem,
        schedule=schedule,
        nest=nest,
        source=generate(nest, wide=wide),
        packed=packed,
    )


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that begins at a multiple of a cache line."""
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
