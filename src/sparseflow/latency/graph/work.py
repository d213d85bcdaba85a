"""Work of a kernel, from its shapes: floating-point operations and bytes moved.

A multiply-add counts as two operations. A function such as tanh counts as about the operations of a
polynomial approximation; models only need this convention to be consistent. Padded channels of blocked
layouts count, since they are computed. An operator without a rule counts one operation per output element and
is marked; that includes those with subgraphs (If, Loop, Scan), whose nodes are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from sparseflow.latency.graph.kernels import TensorSpec

Attributes = Mapping[str, Any]
Tensors = tuple[TensorSpec, ...]

FLOPS_PER_ELEMENT: Mapping[str, int] = {
    **dict.fromkeys(
        (
            "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Relu", "LeakyRelu", "PRelu", "ThresholdedRelu", "Clip",
            "Min", "Max", "Sum", "Mean", "Mod", "Sqrt", "Reciprocal", "Floor", "Ceil", "Round", "Sign",
            "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "Where",
            "IsNaN", "IsInf", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift", "Dropout",
        ),
        1,
    ),
    "BiasAdd": 2, "BatchNormalization": 2, "DequantizeLinear": 2, "QuantizeLinear": 3, "HardSigmoid": 3,
    "HardSwish": 4, "Exp": 4, "Log": 4, "Softsign": 3, "Sigmoid": 6, "QuickGelu": 8, "Swish": 7, "Elu": 6,
    "Selu": 7, "Celu": 7, "Softplus": 9, "Mish": 15, "Tanh": 8, "Erf": 10, "Sin": 6, "Cos": 6, "Pow": 8,
    "Gelu": 14, "FastGelu": 14, "BiasGelu": 15, "Softmax": 8, "LogSoftmax": 12, "BiasSoftmax": 9,
    "LayerNormalization": 8, "SimplifiedLayerNormalization": 5, "RMSNormalization": 5,
    "SkipLayerNormalization": 9, "SkipSimplifiedLayerNormalization": 6, "InstanceNormalization": 8,
    "GroupNormalization": 8, "GroupNorm": 8, "LpNormalization": 4,
}  # fmt: skip
"""Operator -> operations per element of its first output."""

DATA_MOVEMENT_OPS = frozenset(
    {
        "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose", "Concat", "Split", "Slice",
        "Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements", "Pad", "Expand", "Tile",
        "Cast", "Shape", "Size", "ConstantOfShape", "Range", "DepthToSpace", "SpaceToDepth", "ReorderInput",
        "ReorderOutput", "OneHot", "EyeLike", "MemcpyFromHost", "MemcpyToHost", "CastLike", "Trilu",
    }
)  # fmt: skip
"""Operators that compute nothing."""

SELECTION_OPS = frozenset({"Gather", "GatherElements", "GatherND", "Slice", "Split"})
"""Operators that read at most as much of their first input as they write."""

_REDUCTION_FLOPS = {
    "ReduceMean": 1, "ReduceSum": 1, "ReduceMax": 1, "ReduceMin": 1, "ReduceProd": 1, "ReduceL1": 2,
    "ReduceL2": 2, "ReduceSumSquare": 2, "ReduceLogSum": 1, "ReduceLogSumExp": 6, "ArgMax": 1, "ArgMin": 1,
    "CumSum": 1, "GlobalAveragePool": 1, "GlobalMaxPool": 1,
}  # fmt: skip
"""Operator -> operations per element of its first input."""


def _make_conv_rule(position: int) -> Callable[[Attributes, Tensors, Tensors], float]:
    """Return the rule of a convolution whose weight is the input at `position`."""

    def count_conv(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
        products = 2.0 * outputs[0].elements * math.prod(inputs[position].shape[1:])
        bias_and_sum = sum(t.present for t in inputs[2:4]) if position == 1 else 0
        return products + outputs[0].elements * (bias_and_sum + _get_activation_flops(attributes))

    return count_conv


def _count_conv_transpose(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    products = 2.0 * inputs[0].elements * math.prod(inputs[1].shape[1:])
    bias = len(inputs) > 2 and inputs[2].present
    return products + outputs[0].elements * bias


def _count_gemm(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    depth = inputs[0].shape[0 if attributes.get("transA") else -1]
    bias = len(inputs) > 2 and inputs[2].present
    return outputs[0].elements * (2.0 * depth + bias + _get_activation_flops(attributes))


def _count_matmul(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    shape = inputs[0].shape
    depth = shape[-2] if attributes.get("transA") and len(shape) > 1 else shape[-1] if shape else 1
    scaled = attributes.get("alpha", 1.0) != 1.0
    return outputs[0].elements * (2.0 * depth + scaled + _get_activation_flops(attributes))


def _count_pool(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    window, image = attributes.get("kernel_shape", ()), inputs[0].shape[2:]
    # A window may reach beyond the image, where there is nothing to pool.
    return float(outputs[0].elements * math.prod(map(min, window, image)))


def _count_top_k(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count a heap that holds the k largest elements: log2(k) comparisons per element, and at least one."""
    k = outputs[0].shape[attributes.get("axis", -1)]
    return inputs[0].elements * max(1.0, math.log2(max(k, 1)))


def _count_resize(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    mode = attributes.get("mode", "nearest")
    taps = {"nearest": 1, "linear": 2}.get(mode)
    if taps is None:
        raise ValueError(f"the mode {mode}, whose time per operation is far above that of others")
    spatial = max(len(outputs[0].shape) - 2, 0)
    return float(outputs[0].elements * (0 if taps == 1 else 2 * taps**spatial))


def _count_attention(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count packed attention: projection of query, key and value, two products and a softmax."""
    batch, length, width = inputs[0].shape
    if len(inputs[1].shape) != 2:
        raise ValueError("ONNX's attention, whose second input is the key and not the weights")
    projected = inputs[1].shape[-1]
    value = outputs[0].shape[-1]
    heads = int(attributes.get("num_heads", 1))
    products = 2.0 * batch * length * length * ((projected - value) / 2 + value)
    return 2.0 * batch * length * width * projected + products + 8.0 * batch * heads * length * length


def _count_multi_head(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    if len(inputs) < 3 or not inputs[2].present or len(inputs[0].shape) != 3 or len(inputs[1].shape) != 3:
        raise ValueError("a packed or cached form")
    (batch, queries, width), keys = inputs[0].shape, inputs[1].shape[1]
    heads = int(attributes.get("num_heads", 1))
    return (
        2.0 * batch * queries * keys * (width + outputs[0].shape[-1]) + 8.0 * batch * heads * queries * keys
    )


def _get_activation_flops(attributes: Attributes) -> int:
    name = attributes.get("activation")
    return FLOPS_PER_ELEMENT.get(name, 1) if name else 0


_RULES: Mapping[str, Callable[[Attributes, Tensors, Tensors], float]] = {
    **dict.fromkeys(("Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "ConvInteger"), _make_conv_rule(1)),
    "QLinearConv": _make_conv_rule(3),
    "ConvTranspose": _count_conv_transpose,
    **dict.fromkeys(("Gemm", "FusedGemm"), _count_gemm),
    **dict.fromkeys(
        ("MatMul", "FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", "MatMulInteger"), _count_matmul
    ),
    **dict.fromkeys(("MaxPool", "AveragePool", "NhwcMaxPool"), _count_pool),
    **dict.fromkeys(("Resize", "Upsample"), _count_resize),
    "TopK": _count_top_k,
    "Attention": _count_attention,
    "MultiHeadAttention": _count_multi_head,
}


def count_flops(
    node_op: str, attributes: Attributes, inputs: Tensors, outputs: Tensors
) -> tuple[float, bool]:
    """Return the operations of one run, and whether a rule exists for the operator.

    Args:
        node_op: Operator of the node.
        attributes: Attributes in JSON types.
        inputs: Inputs by position.
        outputs: Outputs by position.
    """
    num_outputs = float(outputs[0].elements if outputs else 0)
    try:
        if node_op in _RULES:
            return _RULES[node_op](attributes, inputs, outputs), True
        if node_op in DATA_MOVEMENT_OPS:
            return 0.0, True
        if node_op in FLOPS_PER_ELEMENT:
            return FLOPS_PER_ELEMENT[node_op] * num_outputs, True
        if node_op in _REDUCTION_FLOPS:
            return float(_REDUCTION_FLOPS[node_op] * inputs[0].elements), True
    except (IndexError, ValueError):
        # An operator of that name with other inputs than ONNX's or onnxruntime's.
        return num_outputs, False
    return num_outputs, False


def count_bytes_moved(node_op: str, inputs: Tensors, outputs: Tensors) -> float:
    """Return the bytes of all inputs and outputs; of a lookup's table only the selected part counts."""
    written = sum(t.bytes for t in outputs)
    read = [t.bytes for t in inputs]
    if node_op in SELECTION_OPS and read:
        read[0] = min(read[0], written)
    return float(written + sum(read))
