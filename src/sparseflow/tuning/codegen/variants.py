"""Variants of a kernel: other operators, columns and dtypes with the same matrix, or with its transpose."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.codegen.program import KernelProgram, build_program, compute_storage_limit
from sparseflow.tuning.schedule.adaptation import adapt_schedule
from sparseflow.tuning.schedule.matrices import CooMatrix
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.presets import REFERENCE_PRESETS, build_presets
from sparseflow.tuning.schedule.problem import SparseProblem

if TYPE_CHECKING:
    from sparseflow.tuning.codegen.kernel import Kernel


@dataclass(frozen=True, kw_only=True)
class VariantKey:
    """What distinguishes the kernels of one matrix.

    Attributes:
        operator: Operator.
        n_cols: Columns of the dense operands; None for SpMV.
        dtype: `"float32"` or `"float64"`.
        transposed: Whether the kernel computes with the transposed matrix.
        ones: Whether it computes with ones instead of the matrix's values.
    """

    operator: str
    n_cols: int | None
    dtype: str
    transposed: bool = False
    ones: bool = False


class KernelFamily:
    """The kernels of one matrix. They are compiled on first use.

    Args:
        base: The kernel that the others are derived from.

    Attributes:
        template: A kernel of another matrix with the same pattern, whose variants have the code and the
            storage of this family's; None if there is none.
    """

    def __init__(self, base: Kernel) -> None:
        self._base = base
        self._variants: dict[VariantKey, Kernel] = {}
        self._lock = threading.RLock()
        self.template: Kernel | None = None

    def list_variants(self) -> list[Kernel]:
        """List the kernels that were compiled so far, the base first."""
        return [self._base, *self._variants.values()]

    def get(self, key: VariantKey) -> Kernel:
        """Return a kernel, compiled on first use."""
        base = self._base
        if key == base._key:
            return base
        with self._lock:
            if key not in self._variants:
                kernel = self._build(key)
                kernel._key, kernel._family = key, self
                if not key.ones:
                    kernel._value_tensor, kernel._value_version = base._value_tensor, base._value_version
                self._variants[key] = kernel
            return self._variants[key]

    @cached_property
    def transposition(self) -> np.ndarray:
        """Positions of the transposed matrix's elements in the base's matrix, int64 [elements]."""
        matrix = self._base.problem.matrix
        return np.lexsort((matrix.rows, matrix.cols))

    def _build(self, key: VariantKey) -> Kernel:
        from sparseflow.tuning.codegen.kernel import CompiledKernel, LibraryKernel

        base = self._base
        problem = SparseProblem(
            operator=get_operator(key.operator), matrix=self._make_matrix(key), n_cols=key.n_cols
        )
        if self.template is not None:
            return self._copy_from(self.template, key, problem.matrix.values)
        if base.schedule is None:
            return LibraryKernel(problem)
        program, origin = self._build_program(problem)
        kernel = CompiledKernel(program, cache_dir=base._cache_dir)
        kernel.origin = origin
        return kernel

    @staticmethod
    def _copy_from(template: Kernel, key: VariantKey, values: np.ndarray) -> Kernel:
        transposed = key.transposed != template._key.transposed
        kernel = template._get_variant(
            operator=key.operator, n_cols=key.n_cols, dtype=key.dtype, transposed=transposed, ones=key.ones
        )
        duplicate = kernel.replace_values(values)
        duplicate.origin = kernel.origin
        return duplicate

    def _make_matrix(self, key: VariantKey) -> CooMatrix:
        matrix = self._base.problem.matrix
        values = np.ones(matrix.nnz) if key.ones else matrix.values
        matrix = replace(matrix, values=values.astype(key.dtype))
        if not key.transposed:
            return matrix
        order = self.transposition
        return CooMatrix(
            rows=matrix.cols[order],
            cols=matrix.rows[order],
            values=matrix.values[order],
            shape=(matrix.shape[1], matrix.shape[0]),
        )

    def _build_program(self, problem: SparseProblem) -> tuple[KernelProgram, str]:
        """Build a program with the base's schedule, or with a preset if that does not fit; say which."""
        schedule, limit = self._base.schedule, compute_storage_limit(problem)
        assert schedule is not None
        if problem.operator == self._base.problem.operator:
            adapted = adapt_schedule(schedule, problem.operator, problem.extents)
            if adapted is not None:
                try:
                    program = build_program(problem, adapted, max_bytes=limit)
                except InputError:  # its blocks hold too many zeros of this matrix
                    pass
                else:
                    return program, f"the schedule of {self._base!r}, not tuned"
        name = REFERENCE_PRESETS[problem.operator.name]
        preset = build_presets(problem.operator, problem.extents, schedule.threads)[name]
        preset = preset.canonicalize(problem.operator, problem.extents)
        return build_program(problem, preset), f"the preset {name}, not tuned"
