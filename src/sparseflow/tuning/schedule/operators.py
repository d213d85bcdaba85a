"""The sparse tensor operators that are tuned, and which of their axes are what.

==========  ============================  =============  ===========  ==================
operator    computes                      sparse axes    dense axes   stored sparsely
==========  ============================  =============  ===========  ==================
``spmm``    C[i,j] = A[i,k] B[k,j]        i, k           j            A
``spmv``    y[i] = A[i,j] x[j]            i, j           none         A
``sddmm``   D[i,j] = A[i,j] X[i,k] Y[j,k] i, j           k            A, and D alike
==========  ============================  =============  ===========  ==================

An axis that is named on the right only is summed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What a schedule is for.

    Attributes:
        name: What users call it: `"spmm"`.
        sparse_axes: Axes of the sparse input, rows first.
        dense_axes: Axes of dense operands only.
        output_axes: Axes of the output; the others are summed over.
        sparse_output: Whether the output has the sparse input's pattern and storage.
        tensors: Names that the sparse tensors have in a schedule, the input first.
    """

    name: str
    sparse_axes: tuple[str, ...]
    dense_axes: tuple[str, ...]
    output_axes: tuple[str, ...]
    sparse_output: bool
    tensors: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes: the sparse ones, then the dense ones."""
        return self.sparse_axes + self.dense_axes

    def extents(self, shape: Mapping[str, int]) -> dict[str, int]:
        """The extent of every axis, in the order of `axes`.

        Raises:
            InputError: `shape` lacks an axis, names another one, or an extent is below 1.
        """
        if set(shape) != set(self.axes):
            raise InputError(
                f"`shape` gives the extents of {', '.join(sorted(shape)) or 'nothing'}; "
                f"{self.name} has the axes {', '.join(self.axes)}: give the extent of each"
            )
        for axis, extent in shape.items():
            if extent < 1:
                raise InputError(f"the extent of axis {axis} (={extent}) must be at least 1")
        return {axis: int(shape[axis]) for axis in self.axes}


SPMM = Operator(
    name="spmm",
    sparse_axes=("i", "k"),
    dense_axes=("j",),
    output_axes=("i", "j"),
    sparse_output=False,
    tensors=("A",),
)
SPMV = Operator(
    name="spmv",
    sparse_axes=("i", "j"),
    dense_axes=(),
    output_axes=("i",),
    sparse_output=False,
    tensors=("A",),
)
SDDMM = Operator(
    name="sddmm",
    sparse_axes=("i", "j"),
    dense_axes=("k",),
    output_axes=("i", "j"),
    sparse_output=True,
    tensors=("A", "D"),
)

OPERATORS: Mapping[str, Operator] = MappingProxyType({each.name: each for each in (SPMM, SPMV, SDDMM)})
"""Every operator under its name."""

DENSE_INPUTS: Mapping[str, tuple[tuple[str, tuple[str, str] | tuple[str]], ...]] = {
    "spmm": (("B", ("k", "j")),),
    "spmv": (("x", ("j",)),),
    "sddmm": (("X", ("i", "k")), ("Y", ("j", "k"))),
}
"""Operator -> its dense inputs and their axes, all stored row by row."""


def parse_workloads(text: str) -> list[tuple[str, int | None]]:
    """Parse workloads such as `"spmm:64,spmv"`.

    Returns:
        Operator name and number of columns of the dense operands, each pair once; None for SpMV.

    Raises:
        InputError: An operator is unknown, lacks its number of columns or takes none.
    """
    workloads: list[tuple[str, int | None]] = []
    for item in text.split(","):
        name, colon, columns = item.partition(":")
        is_dense = bool(operator(name).dense_axes)
        if is_dense != bool(colon) or (
            is_dense and not (columns.isascii() and columns.isdigit() and int(columns) > 0)
        ):
            expected = f"{name}:64, with the number of columns" if is_dense else f"{name} alone"
            raise InputError(f"workload {item!r} of {text!r} must be {expected}")
        workloads.append((name, int(columns) if is_dense else None))
    return list(dict.fromkeys(workloads))


def operator(name: str) -> Operator:
    """The operator called `name`.

    Raises:
        InputError: There is no such operator.
    """
    try:
        return OPERATORS[name]
    except KeyError:
        raise InputError(f"no operator is called {name!r}; choose one of: {', '.join(OPERATORS)}") from None
