"""The computation to tune: an operator, a sparse matrix and the number of dense columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from sparseflow.core.checks import check_at_least
from sparseflow.errors import InputError
from sparseflow.tuning.schedule.matrices import CooMatrix, read_memory_bytes
from sparseflow.tuning.schedule.operators import DENSE_INPUTS, Operator

_SDDMM_CHUNK = 2**22
"""Products of SDDMM that are held in memory at once."""


@dataclass(frozen=True, kw_only=True)
class SparseProblem:
    """An operator on one sparse matrix.

    Attributes:
        operator: SpMM, SpMV or SDDMM.
        matrix: The sparse matrix; its dtype is the dtype of all operands.
        n_cols: Extent of the dense axis: columns of B in SpMM, of X and Y in SDDMM; None for SpMV.

    Raises:
        InputError: `n_cols` does not fit the operator, or the operands exceed the memory of this machine.
    """

    operator: Operator
    matrix: CooMatrix
    n_cols: int | None = None

    def __post_init__(self) -> None:
        if not self.operator.dense_axes:
            if self.n_cols is not None:
                raise InputError(
                    f"{self.operator.name} takes a vector; `n_cols` (={self.n_cols}) must be None"
                )
        else:
            n_cols = int(self.n_cols) if isinstance(self.n_cols, np.integer) else self.n_cols
            check_at_least(1, n_cols=n_cols)
            object.__setattr__(self, "n_cols", n_cols)
        self._check_memory()

    def _check_memory(self) -> None:
        """Refuse dense operands that need more than half of the memory; the matrix itself can be tiny."""
        extents, shapes = self.extents, list(self.input_shapes.values())
        if not self.operator.sparse_output:
            shapes.append(tuple(extents[axis] for axis in self.operator.output_axes))
        needed, limit = self.dtype.itemsize * sum(map(math.prod, shapes)), read_memory_bytes() // 2
        if needed > limit:
            sizes = ", ".join(f"{axis}={extent}" for axis, extent in extents.items())
            raise InputError(
                f"the dense operands of {self.operator.name} ({sizes}) need {needed / 2**30:,.1f} GiB; the "
                f"limit is half of the memory, {limit / 2**30:,.1f} GiB"
            )

    @property
    def dtype(self) -> np.dtype:
        return self.matrix.values.dtype

    @property
    def extents(self) -> Mapping[str, int]:
        """Axis name -> extent."""
        sizes = [*self.matrix.shape, *([] if self.n_cols is None else [self.n_cols])]
        return dict(zip(self.operator.axes, sizes, strict=True))

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name of each dense input -> its shape."""
        extents = self.extents
        return {
            name: tuple(extents[axis] for axis in axes) for name, axes in DENSE_INPUTS[self.operator.name]
        }

    def generate_inputs(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Sample dense inputs from a standard normal distribution."""
        generator = np.random.default_rng(seed)
        return tuple(generator.standard_normal(shape, self.dtype) for shape in self.input_shapes.values())

    def get_library_function(self) -> Callable[..., np.ndarray]:
        """Return the single-threaded implementation of scipy, or of numpy for SDDMM.

        The function maps the dense inputs to C or y, or to the values of D in the order of the matrix.
        """
        if not self.operator.sparse_output:
            csr = self.matrix.to_scipy()
            return lambda dense: np.asarray(csr @ dense)
        rows, cols, values = self.matrix.rows, self.matrix.cols, self.matrix.values
        step = max(1, _SDDMM_CHUNK // (self.n_cols or 1))

        def sample_products(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            sums = np.empty_like(values)
            for start in range(0, len(values), step):
                chunk = slice(start, start + step)
                np.einsum("ek,ek->e", x[rows[chunk]], y[cols[chunk]], out=sums[chunk])
            return sums * values

        return sample_products

    def compute_reference(self, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
        """Compute the result of the library function in float64."""
        wide = replace(self.matrix, values=self.matrix.values.astype(np.float64))
        return replace(self, matrix=wide).get_library_function()(
            *(np.asarray(value, np.float64) for value in inputs)
        )
