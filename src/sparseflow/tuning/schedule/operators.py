"""Sparse tensor operators and the roles of their axes.

==========  ============================  =============  ===========  ===================
operator    computes                      sparse axes    dense axes   stored sparsely
==========  ============================  =============  ===========  ===================
``spmm``    C[i,j] = A[i,k] B[k,j]        i, k           j            A
``spmv``    y[i] = A[i,j] x[j]            i, j           none         A
``sddmm``   D[i,j] = A[i,j] X[i,k] Y[j,k] i, j           k            A and D, same pattern
==========  ============================  =============  ===========  ===================

Axes that appear only on the right-hand side are summed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sparseflow.core.checks import check_one_of
from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A sparse tensor operator.

    Attributes:
        name: Name in the public API, such as `"spmm"`.
        sparse_axes: Axes of the sparse input, rows first.
        dense_axes: Axes that only dense operands have.
        output_axes: Axes of the output; the other axes are summed over.
        sparse_output: Whether the output has the pattern and the storage of the sparse input.
        tensors: Names of the sparse tensors in a schedule, the input first.
    """

    name: str
    sparse_axes: tuple[str, ...]
    dense_axes: tuple[str, ...]
    output_axes: tuple[str, ...]
    sparse_output: bool
    tensors: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes: the sparse axes, then the dense axes."""
        return self.sparse_axes + self.dense_axes

    def extents(self, shape: Mapping[str, int]) -> dict[str, int]:
        """Check `shape` and return the extent of every axis, in the order of `axes`.

        Raises:
            InputError: `shape` lacks an axis, has an unknown axis, or an extent is below 1.
        """
        if set(shape) != set(self.axes):
            raise InputError(
                f"`shape` has the axes {', '.join(sorted(shape)) or 'none'}; "
                f"{self.name} requires the axes {', '.join(self.axes)}"
            )
        for axis, extent in shape.items():
            if extent < 1:
                raise InputError(f"extent of axis {axis} (={extent}) must be at least 1")
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

OPERATORS: Mapping[str, Operator] = {op.name: op for op in (SPMM, SPMV, SDDMM)}
"""Operators by name."""

DENSE_INPUTS: Mapping[str, tuple[tuple[str, tuple[str, str] | tuple[str]], ...]] = {
    "spmm": (("B", ("k", "j")),),
    "spmv": (("x", ("j",)),),
    "sddmm": (("X", ("i", "k")), ("Y", ("j", "k"))),
}
"""Operator name -> names and axes of its dense inputs, all stored row-major."""


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
        is_dense = bool(get_operator(name).dense_axes)
        if is_dense != bool(colon) or (
            is_dense and not (columns.isascii() and columns.isdigit() and int(columns) > 0)
        ):
            expected = f"{name}:64, with the number of columns" if is_dense else f"{name} alone"
            raise InputError(f"workload {item!r} of {text!r} must be {expected}")
        workloads.append((name, int(columns) if is_dense else None))
    return list(dict.fromkeys(workloads))


def get_operator(name: str) -> Operator:
    """Return the operator called `name`.

    Raises:
        InputError: The operator is unknown.
    """
    check_one_of(OPERATORS, operator=name)
    return OPERATORS[name]
