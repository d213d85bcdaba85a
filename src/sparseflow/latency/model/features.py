"""Features of a kernel for a regressor: numbers and two categories, from its shapes and attributes.

Sizes are base-2 logarithms, since latency follows products of them. A contraction (convolution, matrix
product) is described as `rows` x `depth` x `columns` in `groups` independent parts; other kernels by the
elements that they read and write and the extents of the axes along which they work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparseflow.core.config import StrictModel
from sparseflow.errors import InputError
from sparseflow.latency.graph.kernels import KernelSpec, TensorSpec

Features = dict[str, float | str]

OP, OPERATOR = "op", "operator"
"""Categories of a kernel: its canonical name, and domain, operator and type joined by `:`."""

_CONVOLUTIONS = frozenset({"Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "ConvInteger", "QLinearConv"})
_GEMMS = frozenset({"Gemm", "FusedGemm"})
_MATMULS = frozenset(
    {"MatMul", "FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", "MatMulInteger", "GemmFastGelu"}
)
_ALIGNMENTS = (8, 16, 32)


class FeatureEncoder(StrictModel):
    """Columns of a feature matrix: numbers as they are, strings one-hot.

    Attributes:
        numbers: Names of the numeric features, one column each.
        categories: Name of a string feature -> its values, one column each. An unknown value is encoded as
            zeros.
    """

    numbers: tuple[str, ...]
    categories: Mapping[str, tuple[str, ...]]

    @classmethod
    def fit(cls, rows: Sequence[Features]) -> FeatureEncoder:
        """Collect the features and categories of `rows`, which have equal names and types.

        Raises:
            InputError: There are no rows.
        """
        if not rows:
            raise InputError("a feature encoder needs at least one row")
        texts = sorted(name for name, value in rows[0].items() if isinstance(value, str))
        return cls(
            numbers=tuple(sorted(rows[0].keys() - set(texts))),
            categories={name: tuple(sorted({str(row[name]) for row in rows})) for name in texts},
        )

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns; `name=value` for the columns of a string feature."""
        one_hot = (f"{name}={value}" for name, values in self.categories.items() for value in values)
        return (*self.numbers, *one_hot)

    def transform(self, rows: Sequence[Features]) -> np.ndarray:
        """Encode `rows` as float32, shape [rows, columns]; unknown features are ignored.

        Raises:
            InputError: A numeric feature is missing from a row, or is not finite in float32.
        """
        matrix = np.zeros((len(rows), len(self.columns)), dtype=np.float32)
        max_value = float(np.finfo(np.float32).max)
        one_hot = [(name, value) for name, values in self.categories.items() for value in values]
        for index, row in enumerate(rows):
            for column, name in enumerate(self.numbers):
                value = row.get(name)
                if not isinstance(value, float | int) or not abs(value) <= max_value:
                    raise InputError(f"feature `{name}` must be a finite number, got {value!r}")
                matrix[index, column] = value
            matrix[index, len(self.numbers) :] = [row.get(name) == value for name, value in one_hot]
        return matrix


def make_features(kernel: KernelSpec) -> Features:
    """Return name -> value; text values are categories. All kernels have the same names."""
    inputs = [t for t in kernel.inputs if t.present]
    outputs = [t for t in kernel.outputs if t.present]
    first = inputs[0] if inputs else TensorSpec(name="input_0", dtype="float32", shape=())
    out = outputs[0] if outputs else first
    weights = kernel.constant_bytes
    written = sum(t.bytes for t in outputs)
    result: Features = {
        OP: kernel.op,
        OPERATOR: f"{kernel.domain}:{kernel.node_op}:{first.dtype}",
        "flops": _log2_plus_one(kernel.flops),
        "bytes": _log2_plus_one(kernel.bytes_moved),
        "intensity": _log2_plus_one(kernel.flops) - _log2_plus_one(kernel.bytes_moved),
        "weight_bytes": _log2_plus_one(weights),
        "read_bytes": _log2_plus_one(sum(t.bytes for t in inputs) - weights),
        "written_bytes": _log2_plus_one(written),
        "flowing_inputs": float(
            sum(t.present and position not in kernel.constants for position, t in enumerate(kernel.inputs))
        ),
        "batch": _log2_plus_one(out.shape[0] if out.shape else 1),
        "in_inner": _log2_plus_one(first.shape[-1] if first.shape else 1),
        "out_inner": _log2_plus_one(out.shape[-1] if out.shape else 1),
        "out_outer": _log2_plus_one(out.shape[1] if len(out.shape) > 1 else 1),
        "rank": float(len(out.shape)),
        "broadcast": _log2_plus_one(_compute_broadcast_ratio(kernel)),
        "axis": _log2_plus_one(_compute_axis_extent(kernel, first)),
        "axis_place": float(_compute_axis_distance(kernel, first)),
        "moved_inner": float(_moves_innermost_axis(kernel.attributes, first)),
    }
    return result | _make_contraction_features(kernel, first, out) | _make_window_features(kernel.attributes)


def _make_contraction_features(kernel: KernelSpec, first: TensorSpec, out: TensorSpec) -> Features:
    """Describe `groups` products of `rows` x `depth` by `depth` x `columns`; zeros for other kernels."""
    names = ("rows", "depth", "columns", "groups", *(f"aligned_{n}" for n in _ALIGNMENTS))
    result: Features = dict.fromkeys(names, 0.0)
    shape = _get_contraction_shape(kernel, first, out)
    if shape is None:
        return result
    rows, depth, columns, groups = shape
    result |= {
        "rows": _log2_plus_one(rows),
        "depth": _log2_plus_one(depth),
        "columns": _log2_plus_one(columns),
        "groups": _log2_plus_one(groups),
    }
    for name in _ALIGNMENTS:
        # A remainder leaves lanes of a vector or a tile idle.
        result[f"aligned_{name}"] = columns / (math.ceil(columns / name) * name) if columns else 0.0
    return result


def _get_contraction_shape(
    kernel: KernelSpec, first: TensorSpec, out: TensorSpec
) -> tuple[int, int, int, int] | None:
    attributes = kernel.attributes
    if kernel.node_op in _CONVOLUTIONS and len(out.shape) > 2 and len(kernel.inputs) > 1:
        weight = kernel.inputs[3 if kernel.node_op == "QLinearConv" else 1]
        groups = max(int(attributes.get("group", 1)), 1)
        channels = weight.shape[0]
        rows = out.elements // max(channels, 1)
        return rows, math.prod(weight.shape[1:]), channels // groups, groups
    if kernel.node_op in _GEMMS and len(first.shape) == 2 and len(out.shape) == 2:
        depth = first.shape[0 if attributes.get("transA") else 1]
        return out.shape[0], depth, out.shape[1], 1
    if kernel.node_op in _MATMULS and len(first.shape) > 0 and len(out.shape) > 0:
        depth = first.shape[-2] if attributes.get("transA") and len(first.shape) > 1 else first.shape[-1]
        second = kernel.inputs[1] if len(kernel.inputs) > 1 else first
        rows = out.shape[-2] if len(out.shape) > 1 else 1
        groups = math.prod(out.shape[:-2])
        if len(second.shape) <= 2:
            # One matrix for the whole batch: a runtime folds the batch into the rows.
            rows, groups = rows * groups, 1
        return rows, depth, out.shape[-1], groups
    return None


def _make_window_features(attributes: Mapping[str, Any]) -> Features:
    """Describe the window of a convolution or a pool."""

    def product(name: str) -> float:
        value = attributes.get(name)
        return float(math.prod(value)) if isinstance(value, list | tuple) and value else 1.0

    return {
        "window": product("kernel_shape"),
        "stride": product("strides"),
        "dilation": product("dilations"),
    }


def _compute_broadcast_ratio(kernel: KernelSpec) -> float:
    """Return the elements of the largest output over those of the smallest input."""
    sizes = [t.elements for t in kernel.inputs if t.present and t.elements]
    outs = [t.elements for t in kernel.outputs if t.present]
    return max(outs, default=1) / max(min(sizes, default=1), 1)


def _list_axes(kernel: KernelSpec, first: TensorSpec) -> list[int]:
    """List the axes of a softmax, normalization, reduction, concatenation, slice or pad."""
    rank = len(first.shape)
    if kernel.node_op == "Pad":
        pads = next(iter(kernel.values.values()), ())
        return [n for n in range(rank) if len(pads) == 2 * rank and (pads[n] or pads[n + rank])]
    axes = kernel.attributes.get("axis", kernel.attributes.get("axes"))
    if axes is None:
        # A slice lists its axes third, a reduction second.
        axes_input = {"Slice": 3}.get(kernel.node_op, 1 if kernel.node_op.startswith("Reduce") else None)
        axes = kernel.values.get(axes_input, ()) if axes_input is not None else ()
    listed = axes if isinstance(axes, list | tuple) else [axes]
    return [a % rank for a in listed if isinstance(a, int) and -rank <= a < rank]


def _compute_axis_extent(kernel: KernelSpec, first: TensorSpec) -> int:
    return math.prod(first.shape[a] for a in _list_axes(kernel, first))


def _compute_axis_distance(kernel: KernelSpec, first: TensorSpec) -> int:
    """Return the distance of the nearest axis from the innermost one, starting at 1; 0 without an axis."""
    return min((len(first.shape) - a for a in _list_axes(kernel, first)), default=0)


def _moves_innermost_axis(attributes: Mapping[str, Any], first: TensorSpec) -> bool:
    """Return whether a transpose moves the innermost axis, so that reads or writes lose their stride of 1."""
    order = attributes.get("perm")
    return isinstance(order, list | tuple) and bool(order) and order[-1] != len(first.shape) - 1


def _log2_plus_one(value: float) -> float:
    return math.log2(1.0 + max(value, 0.0))
