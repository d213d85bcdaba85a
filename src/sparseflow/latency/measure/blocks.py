"""Small networks whose kernels cover common operators at several sizes.

Each block is an ONNX file of a few nodes, written with `onnx.helper`, so that onnxruntime fuses and lays out
its kernels as in a full network. Those of `list_blocks` calibrate a predictor; `list_training_blocks` has
more sizes, to train one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseflow.core.files import write_atomic
from sparseflow.latency.graph.model_builder import ModelBuilder

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, kw_only=True)
class Block:
    """One small network.

    Attributes:
        name: Name of the file.
        build: Returns the ONNX model.
    """

    name: str
    build: Callable[[], onnx.ModelProto]

    def write(self, folder: Path) -> Path:
        """Write the model into a directory, which is created if it is missing, and return its file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.onnx"
        write_atomic(path, self.build().SerializeToString())
        return path


class _GraphBuilder(ModelBuilder):
    """Layers with random weights, of a model with one float input."""

    def __init__(self, *shape: int) -> None:
        import numpy as np

        super().__init__()
        self.input = self.add_input(shape)
        self._generator = np.random.default_rng(0)

    def add_weight(self, rows: int, *columns: int) -> str:
        """Add a weight with the variance of an initialized layer and return its name."""
        import numpy as np

        fan_in = math.prod(columns) if len(columns) > 1 else rows
        values = self._generator.standard_normal((rows, *columns), dtype=np.float32)
        return self.add_constant(values / np.float32(fan_in**0.5))

    def add_float(self, value: float) -> str:
        return self.add_constant(value, "float32")

    def add_integers(self, *values: int) -> str:
        return self.add_constant(values, "int64")

    def conv(self, tensor: str, channels: int, filters: int, size: int, **attributes: Any) -> str:
        """Add a convolution with bias that keeps height and width at stride 1."""
        weight = self.add_weight(filters, channels // attributes.get("group", 1), size, size)
        padding = [size // 2] * 4
        return self.add_node(
            "Conv", tensor, weight, self.add_weight(filters), kernel_shape=[size, size], pads=padding,
            **attributes,
        )  # fmt: skip

    def linear(self, tensor: str, depth: int, columns: int) -> str:
        return self.add_node(
            "Add", self.add_node("MatMul", tensor, self.add_weight(depth, columns)), self.add_weight(columns)
        )

    def layer_norm(self, tensor: str, width: int) -> str:
        return self.add_node(
            "LayerNormalization", tensor, self.add_weight(width), self.add_weight(width), axis=-1
        )

    def gelu(self, tensor: str) -> str:
        scaled = self.add_node("Erf", self.add_node("Div", tensor, self.add_float(2.0**0.5)))
        shifted = self.add_node("Add", scaled, self.add_float(1.0))
        return self.add_node("Mul", self.add_node("Mul", tensor, shifted), self.add_float(0.5))


def list_blocks() -> list[Block]:
    """List the blocks that calibrate a predictor: about 40 kernels."""
    return [
        _make_block(_build_residual, channels=32, size=28, kernel=3, batch=1),
        _make_block(_build_residual, channels=128, size=14, kernel=3, batch=1),
        _make_block(_build_residual, channels=128, size=28, kernel=1, batch=1),
        _make_block(_build_inverted, channels=24, expansion=6, size=28, kernel=3),
        _make_block(_build_attention, tokens=64, width=192, heads=3, layers=6),
        _make_block(_build_attention, tokens=128, width=384, heads=6, layers=4),
        _make_block(_build_mlp, batch=1, width=1024, activation="Relu"),
        _make_block(_build_mlp, batch=16, width=256, activation="Tanh"),
        _make_block(_build_elementwise, length=200, width=768),
        _make_block(_build_arithmetic, length=256, width=64),
        _make_block(_build_pyramid, channels=32, size=32),
        _make_block(_build_signal, channels=64, length=128),
    ]


def list_training_blocks() -> list[Block]:
    """List the blocks that a shipped predictor is trained on."""
    blocks = [
        _make_block(_build_residual, channels=channels, size=size, kernel=kernel, batch=batch)
        for channels, size, kernel, batch in (
            (8, 64, 3, 1), (16, 112, 3, 1), (24, 40, 5, 1), (48, 20, 3, 1), (64, 56, 3, 1), (96, 7, 3, 1),
            (256, 14, 3, 1), (512, 7, 3, 1), (16, 16, 3, 4), (64, 14, 1, 1), (256, 28, 1, 1), (768, 7, 1, 1),
        )
    ]  # fmt: skip
    blocks += [
        _make_block(_build_inverted, channels=channels, expansion=expansion, size=size, kernel=kernel)
        for channels, expansion, size, kernel in (
            (16, 4, 56, 3), (32, 6, 14, 5), (64, 3, 20, 3), (96, 6, 7, 5), (24, 2, 80, 3),
        )
    ]  # fmt: skip
    blocks += [
        _make_block(_build_attention, tokens=tokens, width=width, heads=heads)
        for tokens, width, heads in (
            (16, 64, 2), (32, 128, 4), (50, 384, 6), (128, 256, 4), (197, 192, 3), (64, 768, 12),
            (256, 128, 2), (384, 64, 1), (8, 512, 8),
        )
    ]  # fmt: skip
    blocks += [
        _make_block(_build_mlp, batch=batch, width=width, activation=activation)
        for batch, width, activation in (
            (1, 32, "Relu"), (1, 256, "Tanh"), (8, 64, "Sigmoid"), (32, 512, "Relu"), (64, 128, "Relu"),
            (1, 2048, "Relu"), (128, 1024, "Tanh"),
        )
    ]  # fmt: skip
    blocks += [
        _make_block(_build_elementwise, length=length, width=width)
        for length, width in ((1, 64), (16, 256), (64, 64), (512, 512), (128, 3072))
    ]
    blocks += [
        _make_block(_build_arithmetic, length=length, width=width)
        for length, width in ((1, 32), (49, 96), (128, 256), (1024, 64))
    ]
    blocks += [
        _make_block(_build_pyramid, channels=channels, size=size)
        for channels, size in ((8, 32), (32, 16), (64, 40), (16, 96))
    ]
    blocks += [
        _make_block(_build_signal, channels=channels, length=length)
        for channels, length in ((16, 256), (64, 400), (128, 100), (1, 4000))
    ]
    return blocks


def _make_block(build: Callable[..., onnx.ModelProto], **parameters: Any) -> Block:
    kind = build.__name__.removeprefix("_build_")
    name = "_".join((kind, *(str(value).lower() for value in parameters.values())))
    return Block(name=name, build=partial(build, **parameters))


def _build_residual(*, channels: int, size: int, kernel: int, batch: int) -> onnx.ModelProto:
    """Build convolutions with ReLU and a residual sum, strided reduction, pooling and a classifier."""
    graph = _GraphBuilder(batch, channels, size, size)
    first = graph.add_node("Relu", graph.conv(graph.input, channels, channels, kernel))
    second = graph.add_node("Relu", graph.conv(first, channels, channels, kernel))
    total = graph.add_node(
        "Relu", graph.add_node("Add", graph.conv(second, channels, channels, kernel), first)
    )
    pooled = graph.add_node("MaxPool", total, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    reduced = graph.conv(pooled, channels, 2 * channels, kernel, strides=[2, 2])
    features = graph.add_node("Flatten", graph.add_node("GlobalAveragePool", reduced))
    classes = graph.add_node("Gemm", features, graph.add_weight(2 * channels, 100), graph.add_weight(100))
    return graph.build(classes)


def _build_inverted(*, channels: int, expansion: int, size: int, kernel: int) -> onnx.ModelProto:
    """Build an inverted residual with a depthwise convolution and squeeze-and-excitation."""
    graph = _GraphBuilder(1, channels, size, size)
    width = channels * expansion
    hidden = graph.add_node(
        "Clip", graph.conv(graph.input, channels, width, 1), graph.add_float(0.0), graph.add_float(6.0)
    )
    hidden = graph.conv(hidden, width, width, kernel, group=width)
    hidden = graph.add_node("Mul", hidden, graph.add_node("Sigmoid", hidden))
    squeezed = graph.add_node("GlobalAveragePool", hidden)
    squeezed = graph.add_node("Relu", graph.conv(squeezed, width, max(width // 4, 8), 1))
    gate = graph.add_node("HardSigmoid", graph.conv(squeezed, max(width // 4, 8), width, 1))
    narrow = graph.conv(graph.add_node("Mul", hidden, gate), width, channels, 1)
    wide = graph.conv(narrow, channels, width, 1)
    hidden = graph.conv(graph.add_node("HardSwish", wide), width, channels, 1)
    return graph.build(graph.add_node("Add", hidden, narrow))


def _build_attention(*, tokens: int, width: int, heads: int, layers: int = 1) -> onnx.ModelProto:
    """Build transformer layers: attention, layer norms and a feed-forward part with GELU.

    Several layers have the kernels of one, but their weights do not stay in a cache.
    """
    graph = _GraphBuilder(1, tokens, width)
    hidden = graph.input
    for _ in range(layers):
        normed = graph.layer_norm(hidden, width)
        split_shape = graph.add_integers(1, tokens, heads, width // heads)
        query, key, value = (
            graph.add_node("Reshape", graph.linear(normed, width, width), split_shape) for _ in range(3)
        )
        query, value = (graph.add_node("Transpose", part, perm=[0, 2, 1, 3]) for part in (query, value))
        key = graph.add_node("Transpose", key, perm=[0, 2, 3, 1])
        scores = graph.add_node(
            "Div", graph.add_node("MatMul", query, key), graph.add_float((width / heads) ** 0.5)
        )
        mixed = graph.add_node("MatMul", graph.add_node("Softmax", scores, axis=-1), value)
        merged = graph.add_node("Transpose", mixed, perm=[0, 2, 1, 3])
        merged = graph.add_node("Reshape", merged, graph.add_integers(1, tokens, width))
        total = graph.add_node("Add", graph.linear(merged, width, width), hidden)
        wide = graph.gelu(graph.linear(graph.layer_norm(total, width), width, 4 * width))
        hidden = graph.add_node("Add", graph.linear(wide, 4 * width, width), total)
    return graph.build(hidden)


def _build_mlp(*, batch: int, width: int, activation: str) -> onnx.ModelProto:
    """Build two linear layers with an activation, and a softmax over classes."""
    graph = _GraphBuilder(batch, width)
    hidden = graph.input
    for columns in (width, 2 * width):
        depth = width
        hidden = graph.add_node("Gemm", hidden, graph.add_weight(depth, columns), graph.add_weight(columns))
        hidden = graph.add_node(activation, hidden)
    classes = graph.add_node("Gemm", hidden, graph.add_weight(2 * width, 10), graph.add_weight(10))
    return graph.build(graph.add_node("Softmax", classes, axis=-1))


def _build_elementwise(*, length: int, width: int) -> onnx.ModelProto:
    """Build elementwise operators, reductions and data movement on a matrix."""
    graph = _GraphBuilder(1, length, width)
    hidden = graph.add_node("Mul", graph.add_node("Tanh", graph.input), graph.add_weight(width))
    mean = graph.add_node("ReduceMean", hidden, axes=[-1], keepdims=1)
    centered = graph.add_node("Sub", hidden, mean)
    variance = graph.add_node(
        "ReduceMean", graph.add_node("Pow", centered, graph.add_float(2.0)), axes=[-1], keepdims=1
    )
    hidden = graph.add_node("Div", centered, graph.add_node("Sqrt", variance))
    hidden = graph.add_node(
        "Exp", graph.add_node("Clip", hidden, graph.add_float(-4.0), graph.add_float(4.0))
    )
    positive = graph.add_node("Greater", hidden, graph.add_float(1.0))
    hidden = graph.add_node("Where", positive, hidden, graph.input)
    first, second = graph.add_split_node("Split", hidden, outputs=2, axis=-1)
    hidden = graph.add_node(
        "Concat", graph.add_node("Mul", first, graph.add_node("Sigmoid", second)), second, axis=-1
    )
    hidden = graph.add_node("Transpose", hidden, perm=[0, 2, 1])
    bounds = [graph.add_integers(value) for value in (0, max(length // 2, 1), 2)]
    sliced = graph.add_node("Slice", hidden, *bounds)
    return graph.build(graph.add_node("Softmax", sliced, axis=-1))


def _build_arithmetic(*, length: int, width: int) -> onnx.ModelProto:
    """Build further elementwise operators, reductions, normalizations and lookups."""
    graph = _GraphBuilder(1, width, length)
    hidden = graph.add_node("Neg", graph.input)
    hidden = graph.add_node("Add", graph.add_node("Cos", hidden), graph.add_node("Sin", hidden))
    hidden = graph.add_node("Log", graph.add_node("Softplus", hidden))
    hidden = graph.add_node(
        "Max", graph.add_node("Elu", hidden), graph.add_node("Reciprocal", graph.add_node("Exp", hidden))
    )
    hidden = graph.add_node("InstanceNormalization", hidden, graph.add_weight(width), graph.add_weight(width))
    hidden = graph.add_node("PRelu", hidden, graph.add_weight(width, 1))
    mask = graph.add_node("Not", graph.add_node("Equal", hidden, graph.add_float(0.0)))
    hidden = graph.add_node("Mul", hidden, graph.add_node("Cast", mask, to=1))
    hidden = graph.add_node("Sub", hidden, graph.add_node("ReduceMax", hidden, axes=[-1], keepdims=1))
    hidden = graph.add_node(
        "Div", hidden, graph.add_node("ReduceSum", hidden, graph.add_integers(-1), keepdims=1)
    )
    picked = graph.add_node("ArgMax", hidden, axis=-1, keepdims=0)
    rows = graph.add_node("Gather", graph.add_weight(max(length, 2), width), picked)
    hidden = graph.add_node(
        "Expand",
        graph.add_node("ReduceMean", rows, axes=[1], keepdims=1),
        graph.add_integers(1, width, width),
    )
    return graph.build(
        graph.add_node("LogSoftmax", graph.add_node("Tile", hidden, graph.add_integers(1, 1, 2)), axis=-1)
    )


def _build_pyramid(*, channels: int, size: int) -> onnx.ModelProto:
    """Build a feature pyramid: pooling, upsampling, concatenation and a transposed convolution."""
    graph = _GraphBuilder(1, channels, size, size)
    half = graph.add_node("MaxPool", graph.input, kernel_shape=[2, 2], strides=[2, 2])
    half = graph.add_node("LeakyRelu", graph.conv(half, channels, 2 * channels, 3), alpha=0.1)
    resized = graph.add_node(
        "Resize", half, "", graph.add_constant((1.0, 1.0, 2.0, 2.0), "float32"), mode="nearest"
    )
    merged = graph.add_node("Concat", resized, graph.input, axis=1)
    merged = graph.conv(merged, 3 * channels, channels, 3)
    merged = graph.add_node("Mul", merged, graph.add_node("Sigmoid", merged))
    pooled = graph.add_node("AveragePool", merged, kernel_shape=[2, 2], strides=[2, 2])
    weight = graph.add_weight(channels, channels, 2, 2)
    enlarged = graph.add_node("ConvTranspose", pooled, weight, kernel_shape=[2, 2], strides=[2, 2])
    linear = graph.add_node(
        "Resize", enlarged, "", graph.add_constant((1.0, 1.0, 0.5, 0.5), "float32"), mode="linear"
    )
    return graph.build(graph.add_node("Pad", linear, graph.add_integers(0, 0, 1, 1, 0, 0, 1, 1)))


def _build_signal(*, channels: int, length: int) -> onnx.ModelProto:
    """Build convolutions over time, and their reduction to one vector."""
    graph = _GraphBuilder(1, channels, length)
    hidden = graph.input
    for stride in (1, 2):
        weight = graph.add_weight(channels if stride == 1 else 2 * channels, channels, 5)
        hidden = graph.add_node("Conv", hidden, weight, kernel_shape=[5], pads=[2, 2], strides=[stride])
        hidden = graph.add_node("Relu", hidden)
    hidden = graph.add_node("Sqrt", graph.add_node("Abs", hidden))
    return graph.build(
        graph.add_node(
            "ReduceMean", graph.add_node("Unsqueeze", hidden, graph.add_integers(0)), axes=[-1], keepdims=0
        )
    )
