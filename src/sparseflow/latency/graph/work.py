"""Work of a kernel, from its shapes: floating-point operations and bytes moved.

A multiply-add counts as two operations. A function such as tanh counts as about the operations of a
polynomial approximation, and a step of a loop that no vector unit executes (a comparison of a sort, an
address, a power) as `SCALAR`; models only need this convention to be consistent. Padded channels of blocked
layouts count, since they are computed. If, Loop and Scan have the work of their bodies, see `Body`. An
operator without a rule counts one operation per output element and is marked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sparseflow.latency.graph.kernels import Body, TensorSpec

Attributes = Mapping[str, Any]
Tensors = tuple[TensorSpec, ...]
Rule = Callable[[Attributes, Tensors, Tensors], float]

SCALAR = 16
"""Operations of a vector unit in the time of one step that it does not execute."""

FLOPS_PER_ELEMENT: Mapping[str, int] = {
    **dict.fromkeys(
        (
            "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Relu", "LeakyRelu", "PRelu", "ThresholdedRelu", "Clip",
            "Min", "Max", "Sum", "Mean", "Mod", "Sqrt", "Reciprocal", "Floor", "Ceil", "Round", "Sign",
            "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "Where",
            "IsNaN", "IsInf", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift", "Dropout",
            "MulInteger",
        ),
        1,
    ),
    **dict.fromkeys(("BiasAdd", "BatchNormalization", "DequantizeLinear", "Shrink", "GatedAdd"), 2),
    **dict.fromkeys(("QuantizeLinear", "HardSigmoid", "Softsign", "BiasDropout", "Bernoulli"), 3),
    **dict.fromkeys(("HardSwish", "Exp", "Log", "LpNormalization", "QLinearConcat", "ComplexMul"), 4),
    **dict.fromkeys(("SimplifiedLayerNormalization", "RMSNormalization", "QLinearWhere", "QLinearMul"), 5),
    **dict.fromkeys(("Sigmoid", "Elu", "Sin", "Cos", "SkipSimplifiedLayerNormalization", "QLinearAdd"), 6),
    **dict.fromkeys(("Selu", "Celu", "Swish", "SwiGLU", "QLinearLeakyRelu"), 7),
    **dict.fromkeys(
        (
            "Tanh", "Pow", "Softmax", "QuickGelu", "LayerNormalization", "InstanceNormalization", "Hardmax",
            "GroupNormalization", "GroupNorm", "MeanVarianceNormalization", "RotaryEmbedding", "GatedRMSNorm",
            "BranchwiseRMSNorm", "GemmaRotaryEmbedding", "MRotaryEmbedding", "ComplexMulConj", "ScaledSiLU",
        ),
        8,
    ),
    **dict.fromkeys(("Softplus", "BiasSoftmax", "SkipLayerNormalization", "SkipGroupNorm"), 9),
    **dict.fromkeys(("Erf", "QLinearSigmoid", "EmbedLayerNormalization", "QEmbedLayerNormalization"), 10),
    **dict.fromkeys(("LogSoftmax", "QLinearSoftmax", "RandomNormal", "RandomNormalLike"), 12),
    **dict.fromkeys(("Gelu", "FastGelu", "BiasGelu", "Mish", "BiasSplitGelu"), 15),
    **dict.fromkeys(("RandomUniform", "RandomUniformLike", "Multinomial", "AffineGrid"), SCALAR),
    **dict.fromkeys(("HannWindow", "HammingWindow", "BlackmanWindow", "MelWeightMatrix"), SCALAR),
    **dict.fromkeys(
        ("Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "MaxUnpool"), 2 * SCALAR
    ),
}  # fmt: skip
"""Operator -> operations per element of its first output."""

FLOPS_PER_INPUT_ELEMENT: Mapping[str, int] = {
    **dict.fromkeys(
        (
            "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceLogSum", "ArgMax",
            "ArgMin", "GlobalAveragePool", "GlobalMaxPool", "ReduceSumInteger", "IsAllFinite",
        ),
        1,
    ),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSumSquare", "QLinearGlobalAveragePool"), 2),
    **dict.fromkeys(("QLinearReduceMean", "DynamicQuantizeLinear", "CumSum", "CumProd"), 4),
    **dict.fromkeys(("ReduceLogSumExp", "GlobalLpPool"), 6),
    **dict.fromkeys(("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"), 12),
    **dict.fromkeys(("NonZero", "Compress", "Col2Im", "NGramRepeatBlock", "MurmurHash3"), SCALAR),
}  # fmt: skip
"""Operator -> operations per element of its first input."""

DATA_MOVEMENT_OPS = frozenset(
    {
        "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose", "Concat", "Split",
        "Slice", "Gather", "GatherElements", "GatherND", "Scatter", "ScatterND", "ScatterElements",
        "TensorScatter", "Pad", "Expand", "Tile", "Cast", "CastLike", "BitCast", "Shape", "Size",
        "Constant", "ConstantOfShape", "Range", "DepthToSpace", "SpaceToDepth", "ReorderInput",
        "ReorderOutput", "OneHot", "EyeLike", "Trilu", "ReverseSequence", "CenterCropPad",
        "MemcpyFromHost", "MemcpyToHost", "ExpandDims", "UnfoldTensor", "GatherBlockQuantized",
        "TorchEmbedding", "RemovePadding", "RestorePadding", "Optional", "OptionalGetElement",
        "OptionalHasElement", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
        "SequenceInsert", "SequenceLength", "SplitToSequence", "ConcatFromSequence",
    }
)  # fmt: skip
"""Operators that compute nothing."""

SELECTION_OPS = frozenset({"Gather", "GatherElements", "GatherND", "GatherBlockQuantized", "Slice", "Split"})
"""Operators that read at most as much of their first input as they write."""

CONTROL_FLOW_OPS = frozenset({"If", "Loop", "Scan"})
"""Operators with the work of their bodies."""

_INTERPOLATION_TAPS = {"nearest": 0, "linear": 2, "bilinear": 2, "cubic": 4, "bicubic": 4}
"""Mode of an interpolation -> samples that it mixes along an axis."""


def count_flops(
    node_op: str, attributes: Attributes, inputs: Tensors, outputs: Tensors, bodies: Iterable[Body] = ()
) -> tuple[float, bool]:
    """Return the operations of one run, and whether a rule exists for the operator.

    Args:
        node_op: Operator of the node.
        attributes: Attributes in JSON types.
        inputs: Inputs by position.
        outputs: Outputs by position.
        bodies: Subgraphs of the node.
    """
    num_outputs = float(outputs[0].elements if outputs else 0)
    if node_op in CONTROL_FLOW_OPS:
        listed = tuple(bodies)
        known = bool(listed) and all(kernel.flops_known for body in listed for kernel in body.kernels)
        return (sum(body.flops for body in listed), True) if known else (num_outputs, False)
    try:
        if node_op in _RULES:
            return float(_RULES[node_op](attributes, inputs, outputs)), True
        if node_op in DATA_MOVEMENT_OPS:
            return 0.0, True
        if node_op in FLOPS_PER_ELEMENT:
            return FLOPS_PER_ELEMENT[node_op] * num_outputs, True
        if node_op in FLOPS_PER_INPUT_ELEMENT:
            return float(FLOPS_PER_INPUT_ELEMENT[node_op] * inputs[0].elements), True
    except (IndexError, KeyError, TypeError, ValueError):
        # An operator of that name with other inputs than ONNX's or onnxruntime's.
        return num_outputs, False
    return num_outputs, False


def count_bytes_moved(node_op: str, inputs: Tensors, outputs: Tensors, bodies: Iterable[Body] = ()) -> float:
    """Return the bytes of all inputs and outputs, or those of its bodies if these are more.

    Of a lookup's table only the selected part counts.
    """
    written = sum(t.bytes for t in outputs)
    read = [t.bytes for t in inputs]
    if node_op in SELECTION_OPS and read:
        read[0] = min(read[0], written)
    return max(float(written + sum(read)), sum(body.bytes_moved for body in bodies))


def _make_conv_rule(position: int) -> Rule:
    """Return the rule of a convolution whose weight is the input at `position`."""

    def count_conv(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
        products = 2.0 * outputs[0].elements * math.prod(inputs[position].shape[1:])
        bias_and_sum = sum(t.present for t in inputs[2:4]) if position == 1 else 0
        return products + outputs[0].elements * (bias_and_sum + _get_activation_flops(attributes))

    return count_conv


def _make_conv_transpose_rule(position: int) -> Rule:
    """Return the rule of a transposed convolution whose weight is the input at `position`."""

    def count_conv_transpose(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
        products = 2.0 * inputs[0].elements * math.prod(inputs[position].shape[1:])
        return products + outputs[0].elements * (position == 1 and _has(inputs, 2))

    return count_conv_transpose


def _count_deform_conv(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    # Each sample of the window is a mixture of four pixels.
    samples = inputs[0].shape[1] * math.prod(inputs[1].shape[2:]) * outputs[0].elements / outputs[0].shape[1]
    return _make_conv_rule(1)(attributes, inputs[:2], outputs) + 4 * SCALAR * samples


def _count_gemm(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    depth = inputs[0].shape[0 if attributes.get("transA") else -1]
    return outputs[0].elements * (2.0 * depth + _has(inputs, 2) + _get_activation_flops(attributes))


def _count_matmul(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    shape = inputs[0].shape
    depth = shape[-2] if attributes.get("transA") and len(shape) > 1 else shape[-1] if shape else 1
    scaled = attributes.get("alpha", 1.0) != 1.0
    return outputs[0].elements * (2.0 * depth + scaled + _get_activation_flops(attributes))


def _count_matmul_n_bits(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count a product with weights of a few bits, which are converted once per run."""
    depth, columns = int(attributes["K"]), int(attributes["N"])
    return 2.0 * depth * (outputs[0].elements + columns)


def _count_einsum(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count a multiply-add for each combination of indices; a single operand is only moved or summed."""
    terms = str(attributes["equation"]).replace(" ", "").split("->")[0].split(",")
    extents: dict[str, int] = {}
    for term, tensor in zip(terms, inputs, strict=True):
        start, _, end = term.partition("...")
        indices = [*start, *(f".{n}" for n in range(len(start + end) - len(tensor.shape), 0)), *end]
        for index, extent in zip(indices, tensor.shape, strict=True):
            extents[index] = max(extent, extents.get(index, 1))
    operations = 2.0 * (len(terms) - 1) if len(terms) > 1 else 1.0
    return operations * math.prod(extents.values())


def _count_pool(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    window, image = attributes.get("kernel_shape", ()), inputs[0].shape[2:]
    # A window may reach beyond the image, where there is nothing to pool.
    return float(outputs[0].elements * math.prod(map(min, window, image)))


def _count_recurrent(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count a product with both weights, of all gates and directions, and the gates of every step."""
    steps = math.prod(inputs[0].shape[:2])
    weight, recurrence = inputs[1], inputs[2]
    gates = weight.elements / inputs[0].shape[-1]
    return steps * (2.0 * (weight.elements + recurrence.elements) + 8.0 * gates)


def _count_top_k(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count a heap that holds the k largest elements: log2(k) comparisons per element, and at least one."""
    k = outputs[0].shape[attributes.get("axis", -1)]
    return inputs[0].elements * max(1.0, math.log2(max(k, 1)))


def _count_sort(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    return SCALAR * inputs[0].elements * math.log2(2 + inputs[0].elements)


def _count_non_max_suppression(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count a sort of the scores of each class, and their overlaps with the selected boxes of the class."""
    scores = inputs[1]
    classes = math.prod(scores.shape[:2])
    selected = outputs[0].shape[0] / max(classes, 1)
    return scores.elements * (SCALAR * math.log2(2 + scores.shape[2]) + 12.0 * selected)


def _count_resize(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    taps = _INTERPOLATION_TAPS[attributes.get("mode", "nearest")]
    spatial = max(len(outputs[0].shape) - 2, 0)
    # Only the weights of two taps are computed once per row and column.
    return float(outputs[0].elements * (2 * taps**spatial if taps else 0) * (SCALAR if taps > 2 else 1))


def _count_grid_sample(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    taps = _INTERPOLATION_TAPS[attributes.get("mode", "linear")]
    return float(outputs[0].elements * SCALAR * max(taps, 1) ** (len(inputs[0].shape) - 2))


def _count_roi_align(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    # By default as many samples as pixels, about two along each axis.
    samples = int(attributes.get("sampling_ratio", 0)) or 2
    return 8.0 * outputs[0].elements * samples**2


def _count_roi_pool(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    return outputs[0].elements * max(1.0, math.prod(inputs[0].shape[2:]) / math.prod(outputs[0].shape[2:]))


def _count_lrn(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    return outputs[0].elements * (2.0 * int(attributes["size"]) + 4 * SCALAR)


def _count_dft(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count a fast transform of lengths that are powers of 2; the others are summed directly."""
    axis = int(attributes.get("axis", 1))
    length = inputs[0].shape[axis if axis >= 0 else len(inputs[0].shape) + axis]
    steps = math.log2(length) if length & (length - 1) == 0 else length
    return SCALAR * inputs[0].elements * max(steps, 1.0)


def _count_stft(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    return SCALAR * outputs[0].elements * math.log2(2 + outputs[0].shape[2])


def _count_determinant(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    return inputs[0].elements * inputs[0].shape[-1]


def _count_attention(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count two products and a softmax; with a matrix as second input also its product with the tokens."""
    query, result = inputs[0], outputs[0]
    heads = int(attributes.get("num_heads", attributes.get("q_num_heads", 1)))
    tokens = math.prod(query.shape[:2])
    if len(query.shape) not in (3, 4, 5):
        raise ValueError("another operator of this name")
    if _has(inputs, 1) and len(inputs[1].shape) == 2:
        # The matrix projects tokens to queries, keys and values.
        keys = query.shape[1] + (inputs[4].shape[-2] if _has(inputs, 4) and len(inputs[4].shape) == 5 else 0)
        projected, value = inputs[1].shape[-1], result.shape[-1]
        products = 2.0 * tokens * keys * ((projected - value) / 2 + value)
        return 2.0 * tokens * inputs[1].elements + products + 8.0 * tokens * heads * keys
    if len(outputs) > 1 and len(outputs[1].shape) == 4:
        keys = outputs[1].shape[2]  # with those of earlier steps
    elif _has(inputs, 1):
        keys = inputs[1].shape[2 if len(inputs[1].shape) == 4 else 1]
    else:
        keys = query.shape[1]
    packed = not _has(inputs, 1) or len(query.shape) == 5
    rows = tokens * heads if len(query.shape) == 3 else math.prod(query.shape[:3])
    width = result.elements if packed else query.elements
    return 2.0 * keys * (width + result.elements) + 8.0 * rows * keys


def _count_linear_attention(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count an update of the state of each head, and its product with the query."""
    heads = int(attributes.get("num_heads", attributes.get("q_num_heads", 1)))
    return 6.0 * outputs[0].elements * inputs[0].shape[-1] / heads


def _count_mixture_of_experts(attributes: Attributes, inputs: Tensors, outputs: Tensors) -> float:
    """Count the layers of the selected experts, whose weights are [expert, ...]."""
    tokens = inputs[0].elements / inputs[0].shape[-1]
    weights = sum(t.elements / t.shape[0] for t in inputs[2:] if len(t.shape) == 3)
    return 2.0 * tokens * int(attributes.get("k", 1)) * weights


def _has(inputs: Tensors, position: int) -> bool:
    return len(inputs) > position and inputs[position].present


def _get_activation_flops(attributes: Attributes) -> int:
    name = attributes.get("activation")
    return FLOPS_PER_ELEMENT.get(name, 1) if name else 0


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        ("Conv", "FusedConv", "NhwcConv", "NhwcFusedConv", "ConvInteger", "CausalConvWithState"),
        _make_conv_rule(1),
    ),
    "QLinearConv": _make_conv_rule(3),
    **dict.fromkeys(("ConvTranspose", "ConvTransposeWithDynamicPads"), _make_conv_transpose_rule(1)),
    "QLinearConvTranspose": _make_conv_transpose_rule(3),
    "DeformConv": _count_deform_conv,
    **dict.fromkeys(("Gemm", "FusedGemm", "QGemm", "GemmFastGelu", "GemmFloat8"), _count_gemm),
    **dict.fromkeys(
        (
            "MatMul", "FusedMatMul", "TransposeMatMul", "FusedMatMulActivation", "MatMulInteger",
            "MatMulInteger16", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul",
            "QOrderedMatMul", "CDist",
        ),
        _count_matmul,
    ),
    **dict.fromkeys(
        (
            "MatMulNBits", "MatMulBnb4", "MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight",
        ),
        _count_matmul_n_bits,
    ),
    "Einsum": _count_einsum,
    **dict.fromkeys(
        ("MaxPool", "AveragePool", "LpPool", "NhwcMaxPool", "MaxpoolWithMask", "QLinearAveragePool"),
        _count_pool,
    ),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "DynamicQuantizeLSTM"), _count_recurrent),
    **dict.fromkeys(("Resize", "Upsample"), _count_resize),
    "GridSample": _count_grid_sample,
    **dict.fromkeys(("RoiAlign", "CropAndResize"), _count_roi_align),
    "MaxRoiPool": _count_roi_pool,
    "TopK": _count_top_k,
    "Unique": _count_sort,
    "NonMaxSuppression": _count_non_max_suppression,
    "LRN": _count_lrn,
    **dict.fromkeys(("DFT", "Rfft", "Irfft"), _count_dft),
    "STFT": _count_stft,
    **dict.fromkeys(
        (
            "Attention", "MultiHeadAttention", "GroupQueryAttention", "QAttention", "SparseAttention",
            "DecoderMaskedMultiHeadAttention", "PackedAttention", "PackedMultiHeadAttention",
        ),
        _count_attention,
    ),
    **dict.fromkeys(("LinearAttention", "GatedDeltaNet"), _count_linear_attention),
    **dict.fromkeys(("Det", "Inverse"), _count_determinant),
    **dict.fromkeys(("MoE", "QMoE"), _count_mixture_of_experts),
}  # fmt: skip
