"""Variants of a kernel: other operators, columns and dtypes with the same matrix, or with its transpose."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal
from weakref import WeakValueDictionary

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
        values: Values: the matrix's own, ones, or its own divided by the number of elements in their row or
            column, for means.
    """

    operator: str
    n_cols: int | None
    dtype: str
    transposed: bool = False
    values: Literal["own", "ones", "row_means", "column_means"] = "own"


class KernelFamily:
    """The kernels of one matrix. They are compiled on first use.

    Args:
        template: A kernel of another matrix with the same pattern, whose variants have the code and the
            storage of this family's; None if there is none. With a template, variants are cheap to create
            and live as long as they are used, so that no cycle of references keeps kernels of one step alive.
    """

    def __init__(self, template: Kernel | None = None) -> None:
        self.template = template
        self._variants: MutableMapping[VariantKey, Kernel] = {} if template is None else WeakValueDictionary()
        self._lock = threading.RLock()
        self._transposition: np.ndarray | None = None

    def list_variants(self, base: Kernel) -> list[Kernel]:
        """List the kernels that were compiled so far, the base first."""
        return [base, *self._variants.values()]

    def get(self, base: Kernel, key: VariantKey) -> Kernel:
        """Return a kernel, compiled on first use.

        Args:
            base: The kernel that the others are derived from.
            key: What distinguishes the kernel.
        """
        if key == base._key:
            return base
        if key.values == "ones" and self.template is not None:
            return self.get_similar(self.template, key)  # it does not depend on the values
        kernel = self._variants.get(key)
        if kernel is not None:
            return kernel
        with self._lock:
            kernel = self._variants.get(key)
            if kernel is None:
                kernel = self._build(base, key)
                kernel._key, kernel._family, kernel._base = key, self, base
                if key.values == "own":
                    kernel._value_tensor, kernel._value_version = base._value_tensor, base._value_version
                self._variants[key] = kernel
            return kernel

    def get_transposition(self, base: Kernel) -> np.ndarray:
        """Return the positions of the transposed matrix's elements in the base's matrix, int64 [elements]."""
        if self._transposition is not None:
            return self._transposition
        if self.template is not None and not self.template._key.transposed:
            result = self.template._family.get_transposition(self.template.base)
        else:
            matrix = base.problem.matrix
            result = np.lexsort((matrix.rows, matrix.cols))
        self._transposition = result
        return result

    def _build(self, base: Kernel, key: VariantKey) -> Kernel:
        matrix = self._make_matrix(base, key)
        is_mean = key.values.endswith("means")
        if self.template is not None or is_mean:
            same_code = replace(key, values="own") if is_mean else key
            similar = (
                self.get(base, same_code)
                if self.template is None
                else self.get_similar(self.template, same_code)
            )
            kernel = similar.replace_values(matrix.values)
            kernel.origin = similar.origin
            return kernel
        problem = SparseProblem(operator=get_operator(key.operator), matrix=matrix, n_cols=key.n_cols)
        return base.build_variant(problem)

    @staticmethod
    def get_similar(template: Kernel, key: VariantKey) -> Kernel:
        """Return the template's kernel of the same pattern."""
        transposed = key.transposed != template._key.transposed
        return template._get_variant(
            operator=key.operator,
            n_cols=key.n_cols,
            dtype=key.dtype,
            transposed=transposed,
            values=key.values,
        )

    def _make_matrix(self, base: Kernel, key: VariantKey) -> CooMatrix:
        matrix = base.problem.matrix
        values = np.ones(matrix.nnz) if key.values == "ones" else matrix.values
        if key.values.endswith("means"):
            axis = matrix.rows if key.values == "row_means" else matrix.cols
            values = values / np.bincount(axis)[axis]
        matrix = replace(matrix, values=values.astype(key.dtype))
        if not key.transposed:
            return matrix
        order = self.get_transposition(base)
        return CooMatrix(
            rows=matrix.cols[order],
            cols=matrix.rows[order],
            values=matrix.values[order],
            shape=(matrix.shape[1], matrix.shape[0]),
        )


def adapt_program(base: Kernel, problem: SparseProblem) -> tuple[KernelProgram, str]:
    """Build a program with the base's schedule, or with a preset if that does not fit; say which."""
    schedule, limit = base.schedule, compute_storage_limit(problem)
    assert schedule is not None
    if problem.operator == base.problem.operator:
        adapted = adapt_schedule(schedule, problem.operator, problem.extents)
        if adapted is not None:
            try:
                program = build_program(problem, adapted, max_bytes=limit)
            except InputError:  # its blocks hold too many zeros of this matrix
                pass
            else:
                return program, f"the schedule of {base!r}, not tuned"
    name = REFERENCE_PRESETS[problem.operator.name]
    preset = build_presets(problem.operator, problem.extents, schedule.threads)[name]
    preset = preset.canonicalize(problem.operator, problem.extents)
    return build_program(problem, preset), f"the preset {name}, not tuned"
