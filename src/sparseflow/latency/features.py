"""What a regressor gets to know of a kernel: numbers and two names, all from its shapes and attributes.

Sizes are base-2 logarithms, since latency follows products of them. A contraction (convolution, matrix
product) is told as `rows` x `depth` x `columns` in `groups` independent parts; everything else by the
elements that it reads and writes and by the extents along which it works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sparseflow.latency.kernels import Kernel, Tensor

Features = dict[str, float | str]

_CONVOLUTIONS = frozenset({"Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "ConvInteger", "QLinearConv"})
_GEMMS = frozenset({"Gemm", "FusedGemm"})
_MATMULS = frozenset(
    {"MatMul", "FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", "MatMulInteger", "GemmFastGelu"}
)
_ALIGNMENTS = (8, 16, 32)


def features(kernel: Kernel) -> Features:
    """Name -> value; a text is a category. Every kernel has the same names."""
    inputs = [t for t in kernel.inputs if t.present]
    outputs = [t for t in kernel.outputs if t.present]
    first = inputs[0] if inputs else Tensor(name="input_0", dtype="float32", shape=())
    out = outputs[0] if outputs else first
    weights = kernel.constant_bytes
    written = sum(t.bytes for t in outputs)
    found: Features = {
        "op": kernel.op,
        "operator": f"{kernel.domain}:{kernel.node_op}:{first.dtype}",
        "flops": _log(kernel.flops),
        "bytes": _log(kernel.bytes_moved),
        "intensity": _log(kernel.flops) - _log(kernel.bytes_moved),
        "weight_bytes": _log(weights),
        "read_bytes": _log(sum(t.bytes for t in inputs) - weights),
        "written_bytes": _log(written),
        "flowing_inputs": float(
            sum(t.present and position not in kernel.constants for position, t in enumerate(kernel.inputs))
        ),
        "batch": _log(out.shape[0] if out.shape else 1),
        "in_inner": _log(first.shape[-1] if first.shape else 1),
        "out_inner": _log(out.shape[-1] if out.shape else 1),
        "out_outer": _log(out.shape[1] if len(out.shape) > 1 else 1),
        "rank": float(len(out.shape)),
        "broadcast": _log(_broadcast(kernel)),
        "axis": _log(_axis_extent(kernel, first)),
        "axis_place": float(_axis_place(kernel, first)),
        "moved_inner": float(_moves_inner(kernel.attributes, first)),
    }
    return found | _contraction(kernel, first, out) | _window(kernel.attributes)


def _contraction(kernel: Kernel, first: Tensor, out: Tensor) -> Features:
    """A product of `rows` x `depth` by `depth` x `columns`, `groups` times; zeros where it is none."""
    names = ("rows", "depth", "columns", "groups", *(f"aligned_{n}" for n in _ALIGNMENTS))
    found: Features = dict.fromkeys(names, 0.0)
    shape = _product(kernel, first, out)
    if shape is None:
        return found
    rows, depth, columns, groups = shape
    found |= {"rows": _log(rows), "depth": _log(depth), "columns": _log(columns), "groups": _log(groups)}
    for name in _ALIGNMENTS:
        # A remainder leaves lanes of a vector or a tile idle.
        found[f"aligned_{name}"] = columns / (math.ceil(columns / name) * name) if columns else 0.0
    return found


def _product(kernel: Kernel, first: Tensor, out: Tensor) -> tuple[int, int, int, int] | None:
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


def _window(attributes: Mapping[str, Any]) -> Features:
    """Window of a convolution or a pool."""

    def product(name: str) -> float:
        value = attributes.get(name)
        return float(math.prod(value)) if isinstance(value, list | tuple) and value else 1.0

    return {
        "window": product("kernel_shape"),
        "stride": product("strides"),
        "dilation": product("dilations"),
    }


def _broadcast(kernel: Kernel) -> float:
    """Elements of the output over those of the smallest input that flows or stands still."""
    sizes = [t.elements for t in kernel.inputs if t.present and t.elements]
    outs = [t.elements for t in kernel.outputs if t.present]
    return max(outs, default=1) / max(min(sizes, default=1), 1)


def _axes(kernel: Kernel, first: Tensor) -> list[int]:
    """Axes along which a softmax, a normalisation, a reduction, a concatenation, a slice or a pad works."""
    rank = len(first.shape)
    if kernel.node_op == "Pad":
        pads = next(iter(kernel.values.values()), ())
        return [n for n in range(rank) if len(pads) == 2 * rank and (pads[n] or pads[n + rank])]
    given = kernel.attributes.get("axis", kernel.attributes.get("axes"))
    if given is None:
        # A slice lists its axes third, a reduction second.
        place = {"Slice": 3}.get(kernel.node_op, 1 if kernel.node_op.startswith("Reduce") else None)
        given = kernel.values.get(place, ()) if place is not None else ()
    listed = given if isinstance(given, list | tuple) else [given]
    return [a % rank for a in listed if isinstance(a, int) and -rank <= a < rank]


def _axis_extent(kernel: Kernel, first: Tensor) -> int:
    return math.prod(first.shape[a] for a in _axes(kernel, first))


def _axis_place(kernel: Kernel, first: Tensor) -> int:
    """How far from the innermost extent the nearest axis is, 1 being that extent; 0 without an axis."""
    return min((len(first.shape) - a for a in _axes(kernel, first)), default=0)


def _moves_inner(attributes: Mapping[str, Any], first: Tensor) -> bool:
    """Whether a transposition moves the innermost extent, so that reads or writes lose their stride of 1."""
    order = attributes.get("perm")
    return isinstance(order, list | tuple) and bool(order) and order[-1] != len(first.shape) - 1


def _log(value: float) -> float:
    return math.log2(1.0 + max(value, 0.0))
