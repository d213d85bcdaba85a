"""What is to be computed: an operator, a sparse matrix, the width of the dense operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import index

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.matrices import Coo
from sparseflow.tuning.schedule.operators import DENSE_INPUTS, Operator

_ELEMENTS = 2**22
"""Products of SDDMM that are held at once."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be computed.

    Attributes:
        operator: SpMM, SpMV or SDDMM.
        matrix: The sparse matrix; its values' type is that of everything else.
        n_cols: Extent of the dense axis: columns of B in SpMM, of X and Y in SDDMM; None for SpMV.
    """

    operator: Operator
    matrix: Coo
    n_cols: int | None = None

    def __post_init__(self) -> None:
        wants = bool(self.operator.dense_axes)
        if self.n_cols is not None:
            try:
                object.__setattr__(self, "n_cols", index(self.n_cols))
            except TypeError:
                raise InputError(f"`n_cols` (={self.n_cols!r}) must be a whole number") from None
        if wants and (self.n_cols is None or self.n_cols < 1):
            raise InputError(f"{self.operator.name} needs `n_cols` (={self.n_cols}), 1 or more columns")
        if not wants and self.n_cols is not None:
            raise InputError(f"{self.operator.name} takes a vector; leave `n_cols` (={self.n_cols}) out")

    @property
    def dtype(self) -> np.dtype:
        return self.matrix.values.dtype

    @property
    def extents(self) -> Mapping[str, int]:
        """Axis -> extent."""
        sizes = [*self.matrix.shape, *([] if self.n_cols is None else [self.n_cols])]
        return dict(zip(self.operator.axes, sizes, strict=True))

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """Dense input -> its shape."""
        extents = self.extents
        return {
            name: tuple(extents[axis] for axis in axes) for name, axes in DENSE_INPUTS[self.operator.name]
        }

    def draw(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Dense inputs from a standard normal."""
        generator = np.random.default_rng(seed)
        return tuple(generator.standard_normal(shape, self.dtype) for shape in self.input_shapes.values())

    def library(self) -> Callable[..., np.ndarray]:
        """What a library does: scipy, on one thread, or numpy where scipy has no such operator.

        It gives C or y, or the values of D in the order of the matrix.
        """
        if not self.operator.sparse_output:
            csr = self.matrix.to_scipy()
            return lambda dense: np.asarray(csr @ dense)
        rows, cols, values = self.matrix.rows, self.matrix.cols, self.matrix.values
        step = max(1, _ELEMENTS // (self.n_cols or 1))

        def sampled(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            found = np.empty_like(values)
            for begin in range(0, len(values), step):
                some = slice(begin, begin + step)
                np.einsum("ek,ek->e", x[rows[some]], y[cols[some]], out=found[some])
            return found * values

        return sampled

    def reference(self, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
        """What `library` gives in float64."""
        wide = replace(self.matrix, values=self.matrix.values.astype(np.float64))
        return replace(self, matrix=wide).library()(*(np.asarray(value, np.float64) for value in inputs))
