"""Synthetic kernels: models of one operator at random sizes, layouts and types, optimized and extracted.

They cover operators that the networks of a collection lack. Fusions and layouts are those that onnxruntime
selects: a convolution before an activation becomes one kernel, and a convolution of suitable width runs in a
blocked layout. With `int8`, tensors are quantized before and after the operator, which onnxruntime replaces
by a quantized operator if it has one; with `float16` it adds casts where a provider lacks the type.

::

    OUT/kernels/          extracted kernels, as of `latency extract`
    OUT/synthetic.json    settings; written last, so that it marks a complete directory
"""

from __future__ import annotations

import logging
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pydantic

from sparseflow.core.config import StrictModel
from sparseflow.core.files import read_json, write_json
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError, RunError
from sparseflow.latency.graph.analysis import GRAPH_FILE, OPTIMIZED_FILE
from sparseflow.latency.graph.extraction import extract
from sparseflow.latency.graph.model_builder import MICROSOFT, ModelBuilder

if TYPE_CHECKING:
    import onnx

SETTINGS_FILE = "synthetic.json"

_MAX_ELEMENTS = 2**19
"""Maximum number of elements of a drawn tensor."""
_MAX_PRODUCTS = 2**26
"""Maximum number of multiply-adds of a drawn kernel."""

_CONVERSIONS = ("Cast", "DequantizeLinear", "QuantizeLinear")
_MAX_CONVERSIONS = 0.05
"""Largest share of the kernels that are conversions of one kind, which are in many models."""

logger = logging.getLogger(__name__)

DType = Literal["float32", "int8", "float16"]


class SyntheticKernelsConfig(StrictModel):
    """Number and kinds of synthetic kernels.

    Attributes:
        kernels: Minimum number of kernels.
        dtypes: Types; three of four kernels have the first one, but a third of convolutions and products.
        operators: Groups of operators, such as `conv` and `recurrent`; by default all.
        seed: Random seed of operators and sizes.
    """

    kernels: pydantic.PositiveInt = 500
    dtypes: list[DType] = pydantic.Field(default=["float32", "int8", "float16"], min_length=1)
    operators: list[str] | None = pydantic.Field(default=None, min_length=1)
    seed: int = 0

    @pydantic.field_validator("operators")
    @classmethod
    def _check_operators(cls, operators: list[str] | None) -> list[str] | None:
        unknown = sorted(set(operators or ()) - set(_GROUPS))
        if unknown:
            raise ValueError(f"unknown {', '.join(unknown)}; expected some of: {', '.join(_GROUPS)}")
        return operators


def write_synthetic_kernels(
    config: SyntheticKernelsConfig,
    out_dir: Path | str,
    *,
    provider: str = "cpu",
    progress: Progress | None = None,
) -> Path:
    """Write synthetic kernels and return the directory; a complete one of equal settings is kept.

    Args:
        config: Number and kinds.
        out_dir: Directory.
        provider: Provider that optimizes the models.
        progress: Receives a message and the fraction done.

    Raises:
        DeviceError: The provider is not available.
        RunError: onnxruntime rejects every model.
    """
    folder = Path(out_dir)
    settings = config.model_dump(mode="json") | {"provider": provider}
    marker = folder / SETTINGS_FILE
    if marker.is_file() and read_json(marker) == settings:
        return folder
    marker.unlink(missing_ok=True)
    generator = random.Random(config.seed)
    names = config.operators or [*_CONTRACTIONS, *_CONTRACTIONS, *_GROUPS]
    kernel_ids: set[str] = set()
    counts: Counter[str] = Counter()
    problem: Exception | None = None
    with tempfile.TemporaryDirectory(prefix="sparseflow-synthetic-") as temporary:
        path = Path(temporary) / "model.onnx"
        # Some models repeat kernels or are rejected.
        for number in range(4 * config.kernels):
            name = names[number % len(names)]
            is_varied = name in _CONTRACTIONS or generator.random() < 0.25
            dtype = generator.choice(config.dtypes) if is_varied else config.dtypes[0]
            builder = _KernelBuilder(generator, dtype)
            _GROUPS[name](builder)
            path.write_bytes(builder.build_model().SerializeToString())
            try:
                results = extract(path, folder, provider=provider, check=False, threads=1)
            except (InputError, RunError) as error:
                logger.debug("onnxruntime rejects a synthetic %s of %s: %s", name, dtype, error)
                problem = error
                continue
            for result in results:
                if result.kernel_id in kernel_ids or result.path is None:
                    continue
                if result.op not in _CONVERSIONS or counts[result.op] < _MAX_CONVERSIONS * config.kernels:
                    counts[result.op] += 1
                    kernel_ids.add(result.kernel_id)
                else:
                    for suffix in (".onnx", ".json", ".npz"):
                        result.path.with_suffix(suffix).unlink(missing_ok=True)
            if progress is not None:
                progress(name, min(len(kernel_ids) / config.kernels, 1.0))
            if len(kernel_ids) >= config.kernels:
                break
    if not kernel_ids:
        raise RunError(f"no synthetic kernel could be created: {problem}")
    for name in (GRAPH_FILE, OPTIMIZED_FILE):
        (folder / name).unlink(missing_ok=True)
    write_json(marker, settings)
    return folder


class _KernelBuilder(ModelBuilder):
    """Builds a model of an operator; inputs and outputs are quantized if its type is `int8`."""

    def __init__(self, generator: random.Random, dtype: str) -> None:
        import numpy as np

        super().__init__()
        self.generator, self.dtype = generator, dtype
        self.numpy = np.random.default_rng(generator.getrandbits(32))
        self._outputs: list[str] = []

    def draw(self, low: int, high: int) -> int:
        """Draw a size, uniform in its logarithm."""
        return round(math.exp(self.generator.uniform(math.log(low), math.log(max(low, high)))))

    def draw_width(self, low: int, high: int) -> int:
        """Draw a number of channels, mostly a multiple of 16."""
        width = self.draw(low, high)
        return width if width < 16 or self.generator.random() < 0.25 else width // 16 * 16

    def choose(self, *values: Any) -> Any:
        return self.generator.choice(values)

    def draw_shape(self, rank: int, max_elements: int = _MAX_ELEMENTS) -> list[int]:
        """Draw extents; the first one is mostly 1, as a batch."""
        shape, remaining = [self.choose(1, 1, 1, 2, 4)], self.draw(4, max_elements)
        for _ in range(rank - 2):
            shape.append(self.draw_width(1, max(round(remaining ** (1 / 2)), 1)))
            remaining = max(remaining // shape[-1], 1)
        return [*shape, remaining][-rank:]

    def add_input(self, shape: Sequence[int], dtype: str | None = None) -> str:
        """Add an input of the model, by default of the model's type."""
        stored = dtype or ("uint8" if self.dtype == "int8" else self.dtype)
        name = super().add_input(shape, stored)
        return self._dequantize(name, "uint8") if stored == "uint8" else name

    def add_weight(self, shape: list[int], dtype: str | None = None) -> str:
        """Add a random weight, by default of the model's type."""
        stored = dtype or self.dtype
        if stored == "int8":
            return self._dequantize(self.add_constant(self.numpy.integers(-99, 99, shape, "int8")), "int8")
        return self.add_constant(self.numpy.standard_normal(shape).astype(stored))

    def add_indices(self, shape: list[int], high: int) -> str:
        """Add random indices in [0, high)."""
        return self.add_constant(self.numpy.integers(0, high, shape))

    def add_main_node(self, op: str, *inputs: str, outputs: int, domain: str = "", **attributes: Any) -> str:
        """Add a node and return its first output; the others are outputs of the model."""
        names = self.add_split_node(op, *inputs, outputs=outputs, domain=domain, **attributes)
        self._outputs.extend(names[1:])
        return names[0]

    def add_output(self, name: str, *, quantize: bool = True) -> None:
        if self.dtype == "int8" and quantize:
            name = self.add_node("QuantizeLinear", name, *self._add_scale("uint8"))
        self._outputs.append(name)

    def build_model(self) -> onnx.ModelProto:
        return self.build(*self._outputs)

    def _add_scale(self, dtype: str) -> tuple[str, str]:
        zero = 128 if dtype == "uint8" else 0
        return self.add_constant(0.02, "float32"), self.add_constant(zero, dtype)

    def _dequantize(self, name: str, dtype: str) -> str:
        return self.add_node("DequantizeLinear", name, *self._add_scale(dtype))


_ACTIVATIONS = ("", "", "Relu", "Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid")


def _activate(b: _KernelBuilder, name: str) -> str:
    """Add an activation after a product; the range of a quantized result contains it."""
    op = b.choose(*_ACTIVATIONS) if b.dtype != "int8" else ""
    return b.add_node(op, name) if op else name


def _add_conv(b: _KernelBuilder) -> None:
    dims, size = b.choose(1, 2, 2, 2), b.choose(1, 1, 1, 3, 3, 3, 5, 7)
    channels, filters = b.draw_width(3, 512), b.draw_width(4, 512)
    groups = b.choose(1, 1, 1, 1, channels, channels, 4)
    if groups > 1:
        channels = max(channels // groups, 1) * groups
    if groups > 1 or b.choose(0, 1):
        filters = channels
    stride = b.choose(1, 1, 2)
    weight = [filters, channels // groups, *[size] * dims]
    pixels = max(min(_MAX_PRODUCTS // math.prod(weight), _MAX_ELEMENTS // max(channels, filters)), 1)
    extent = max(b.draw(2, max(round(pixels ** (1 / dims)), 2)) * stride, size)
    inputs = [b.add_input([b.choose(1, 1, 1, 2), channels, *[extent] * dims]), b.add_weight(weight)]
    if b.dtype != "int8":
        inputs.append(b.add_weight([filters]))
    product = b.add_node(
        "Conv", *inputs, group=groups, kernel_shape=[size] * dims, strides=[stride] * dims,
        pads=[size // 2] * (2 * dims),
    )  # fmt: skip
    is_residual = stride == 1 and channels == filters and b.dtype != "int8" and b.choose(0, 0, 1)
    if is_residual:
        b.add_output(b.add_node("Relu", b.add_node("Add", product, inputs[0])))
    else:
        b.add_output(_activate(b, product))


def _add_conv_transpose(b: _KernelBuilder) -> None:
    channels, filters, size = b.draw_width(4, 256), b.draw_width(4, 256), b.choose(2, 3, 4)
    extent = b.draw(2, max(round((_MAX_PRODUCTS / (channels * filters * size**2)) ** 0.5), 3))
    inputs = b.add_input([1, channels, extent, extent]), b.add_weight([channels, filters, size, size])
    b.add_output(b.add_node("ConvTranspose", *inputs, strides=[2, 2], kernel_shape=[size, size]))


def _draw_product(b: _KernelBuilder) -> tuple[int, int, int]:
    """Draw rows, depth and columns of a matrix product."""
    depth, columns = b.draw_width(8, 2048), b.draw_width(4, 2048)
    return b.draw(1, max(_MAX_PRODUCTS // (depth * columns), 1) if b.choose(0, 1) else 256), depth, columns


def _add_matmul(b: _KernelBuilder) -> None:
    rows, depth, columns = _draw_product(b)
    product = b.add_node("MatMul", b.add_input([1, rows, depth]), b.add_weight([depth, columns]))
    if b.dtype != "int8" and b.choose(0, 1):
        product = b.add_node("Add", product, b.add_weight([columns]))
    b.add_output(product)


def _add_batched_matmul(b: _KernelBuilder) -> None:
    heads, depth = b.choose(1, 3, 6, 8, 12), b.choose(16, 32, 64, 64, 100)
    rows, columns = b.draw(4, 512), b.draw(4, 512)
    first, second = b.add_input([1, heads, rows, depth]), b.add_input([1, heads, depth, columns])
    if b.choose(0, 1):
        second = b.add_node("Transpose", b.add_input([1, heads, columns, depth]), perm=[0, 1, 3, 2])
    product = b.add_node("MatMul", first, second)
    if b.dtype == "float32" and b.choose(0, 1):
        product = b.add_node("Mul", product, b.add_constant(0.125, "float32"))
    b.add_output(product)


def _add_gemm(b: _KernelBuilder) -> None:
    rows, depth, columns = _draw_product(b)
    transposed = b.choose(0, 1)
    weight = b.add_weight([columns, depth] if transposed else [depth, columns])
    bias = [] if b.dtype == "int8" else [b.add_weight([columns])]
    product = b.add_node("Gemm", b.add_input([rows, depth]), weight, *bias, transB=transposed)
    b.add_output(_activate(b, product))


def _add_integer_product(b: _KernelBuilder) -> None:
    """Add a product of float inputs and weights of four or eight bits, or a convolution with eight bits."""
    kind = b.choose("nbits", "nbits", "matmul", "conv")
    b.dtype = "float32"
    attributes: dict[str, Any] = {}
    if kind == "nbits":
        rows, depth, columns = _draw_product(b)
        depth = max(depth // 32, 1) * 32
        blocks = [columns, depth // 32, 16]
        weight = b.add_constant(b.numpy.integers(0, 256, blocks, "uint8"))
        inputs = b.add_input([1, rows, depth]), weight, b.add_weight([columns * depth // 32])
        product = b.add_node(
            "MatMulNBits", *inputs, domain=MICROSOFT, K=depth, N=columns, bits=4, block_size=32
        )
        b.add_output(product)
        return
    if kind == "matmul":
        rows, depth, columns = _draw_product(b)
        x, weight, operator = b.add_input([1, rows, depth]), [depth, columns], "MatMulInteger"
    else:
        channels, filters, size = b.draw_width(3, 256), b.draw_width(4, 256), b.choose(1, 3, 3, 5)
        weight = [filters, channels, size, size]
        extent = max(b.draw(size, round((_MAX_PRODUCTS / math.prod(weight)) ** 0.5)), size)
        x, operator = b.add_input([1, channels, extent, extent]), "ConvInteger"
        attributes = {"kernel_shape": [size] * 2, "pads": [size // 2] * 4}
    quantized, scale, zero = b.add_split_node("DynamicQuantizeLinear", x, outputs=3)
    integers = b.add_constant(b.numpy.integers(-99, 99, weight, "int8"))
    product = b.add_node(operator, quantized, integers, zero, **attributes)
    scale = b.add_node("Mul", scale, b.add_constant(0.01, "float32"))
    b.add_output(b.add_node("Mul", b.add_node("Cast", product, to=1), scale))


def _add_pool(b: _KernelBuilder) -> None:
    op, size = b.choose("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"), b.choose(2, 3, 3, 5)
    shape = b.draw_shape(3, 2**16)
    extent = max(round(shape[2] ** 0.5), size)
    x = b.add_input([*shape[:2], extent, extent])
    if b.dtype != "int8" and b.choose(0, 1):
        # Pooling after a convolution has its blocked layout.
        channels = b.draw_width(16, 512)
        x = b.add_node("Conv", x, b.add_weight([channels, shape[1], 1, 1]), kernel_shape=[1, 1])
    window: dict[str, Any] = (
        {} if op.startswith("Global") else {"kernel_shape": [size] * 2, "strides": [b.choose(1, 2)] * 2}
    )
    b.add_output(b.add_node(op, x, **window))


_UNARY = (
    "Relu", "Sigmoid", "Tanh", "Erf", "Exp", "Abs", "Neg", "Sqrt", "Log", "Reciprocal", "Floor", "Ceil",
    "Round", "Sign", "HardSigmoid", "HardSwish", "Softplus", "Softsign", "Elu", "Selu", "LeakyRelu", "Sin",
    "Cos", "Not", "IsNaN", "Celu", "ThresholdedRelu",
)  # fmt: skip


def _add_unary(b: _KernelBuilder) -> None:
    op = b.choose(*_UNARY)
    if op == "Not":
        b.dtype = "bool"
    b.add_output(b.add_node(op, b.add_input(b.draw_shape(b.choose(1, 2, 3, 4)))), quantize=op != "IsNaN")


def _add_binary(b: _KernelBuilder) -> None:
    op = b.choose(
        "Add", "Sub", "Mul", "Div", "Add", "Mul", "Max", "Min", "Pow", "Greater", "Less", "Equal", "Where",
        "PRelu",
    )  # fmt: skip
    shape = b.draw_shape(b.choose(2, 3, 4))
    other = b.choose(shape, shape, shape[-1:], [1], [*shape[:-1], 1], [shape[1], *[1] * (len(shape) - 2)])
    if op == "Pow":
        exponent = b.add_constant(b.choose(2.0, 3.0, 0.5), b.dtype if b.dtype != "int8" else "float32")
        b.add_output(b.add_node("Pow", b.add_input(shape), exponent))
        return
    second = b.add_input(other) if other == shape else b.add_weight(other)
    if op == "Where":
        condition = b.add_input(b.choose(shape, shape[-1:]), "bool")
        b.add_output(b.add_node("Where", condition, b.add_input(shape), second))
        return
    b.add_output(b.add_node(op, b.add_input(shape), second), quantize=op not in ("Greater", "Less", "Equal"))


def _add_normalization(b: _KernelBuilder) -> None:
    op = b.choose(
        "Softmax", "Softmax", "LogSoftmax", "LayerNormalization", "LayerNormalization", "BatchNormalization",
        "InstanceNormalization", "LpNormalization", "LRN", "MeanVarianceNormalization",
    )  # fmt: skip
    shape = b.draw_shape(4 if op in ("LRN", "MeanVarianceNormalization") else b.choose(3, 4))
    x = b.add_input(shape)
    if op == "LayerNormalization":
        result = b.add_node(op, x, b.add_weight(shape[-1:]), b.add_weight(shape[-1:]))
    elif op == "BatchNormalization":
        scale, bias, mean = (b.add_weight(shape[1:2]) for _ in range(3))
        variance = b.add_constant(
            b.numpy.random(shape[1]) + 1.0, "float16" if b.dtype == "float16" else "float32"
        )
        result = b.add_node(op, x, scale, bias, mean, variance)
    elif op == "InstanceNormalization":
        result = b.add_node(op, x, b.add_weight(shape[1:2]), b.add_weight(shape[1:2]))
    else:
        attributes: dict[str, Any] = {"axis": b.choose(-1, -1, 1)}
        if op == "LRN":
            attributes = {"size": 5}
        elif op == "MeanVarianceNormalization":
            attributes = {}
        result = b.add_node(op, x, **attributes)
    b.add_output(result)


def _add_reduction(b: _KernelBuilder) -> None:
    op = b.choose(
        "ReduceMean", "ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2",
        "ReduceL1", "ReduceSumSquare", "ReduceLogSumExp", "ArgMax", "ArgMin", "CumSum",
    )  # fmt: skip
    shape = b.draw_shape(b.choose(3, 4))
    x, axis = b.add_input(shape), b.choose(-1, -1, 1)
    axes = b.choose([axis], [axis], list(range(2, len(shape))))
    if op.startswith("Arg"):
        b.add_output(b.add_node(op, x, axis=axis), quantize=False)
    elif op in ("ReduceSum", "CumSum"):
        b.add_output(b.add_node(op, x, b.add_constant(axes if op == "ReduceSum" else axis, "int64")))
    else:
        b.add_output(b.add_node(op, x, axes=axes, keepdims=b.choose(0, 1)))


def _add_movement(b: _KernelBuilder) -> None:
    op = b.choose(
        "Transpose", "Transpose", "Concat", "Concat", "Split", "Slice", "Pad", "Expand", "Tile", "Reshape",
        "Squeeze", "Cast", "DepthToSpace", "SpaceToDepth", "Resize", "Resize", "Trilu",
    )  # fmt: skip
    shape = b.draw_shape(4 if op in ("DepthToSpace", "SpaceToDepth", "Resize") else b.choose(3, 4))
    if op in ("DepthToSpace", "SpaceToDepth"):
        shape = [1, 4 * max(shape[1] // 4, 1), *[2 * max(round(shape[3] ** 0.5) // 2, 1)] * 2]
    if op == "Resize":
        shape = [1, shape[1], *[max(round(shape[3] ** 0.5), 2)] * 2]
    if op == "Squeeze":
        shape[0] = 1
    num_outputs = b.choose(2, 3) if op == "Split" else 1
    shape[-1] *= num_outputs
    rank, quantize = len(shape), True
    x = b.add_input(shape)
    inputs: list[str] = [x]
    attributes: dict[str, Any] = {}
    if op == "Transpose":
        order = list(range(rank))
        b.generator.shuffle(order)
        attributes = {
            "perm": b.choose(order, [*range(rank - 2), rank - 1, rank - 2], [0, 2, 1, *range(3, rank)])
        }
    elif op == "Concat":
        inputs, attributes = (
            [x, *(b.add_input(shape) for _ in range(b.draw(1, 4)))],
            {"axis": b.choose(1, -1)},
        )
    elif op == "Split":
        attributes = {"axis": -1}
    elif op == "Slice":
        axis = b.choose(1, -1)
        ends = [max(shape[axis] // 2, 1)], [axis], [b.choose(1, 1, 2)]
        inputs += [b.add_constant(value, "int64") for value in ([0], *ends)]
    elif op == "Pad":
        pads = [0] * (rank - 1) + [1] + [0] * (rank - 1) + [1]
        inputs.append(b.add_constant(pads, "int64"))
    elif op == "Expand":
        inputs = [b.add_input([1, *shape[1:-1], 1]), b.add_constant(shape, "int64")]
    elif op == "Tile":
        inputs.append(b.add_constant([1] * (rank - 1) + [2], "int64"))
    elif op == "Reshape":
        inputs.append(b.add_constant([shape[0], -1], "int64"))
    elif op == "Squeeze":
        inputs.append(b.add_constant([0], "int64"))
    elif op == "Cast":
        attributes, quantize = {"to": b.choose(1, 6, 7, 9, 10)}, False
    elif op in ("DepthToSpace", "SpaceToDepth"):
        attributes = {"blocksize": 2}
    elif op == "Resize":
        mode = b.choose("nearest", "linear", "linear", "cubic")
        inputs += ["", b.add_constant([1.0, 1.0, 2.0, 2.0], "float32")]
        attributes = {"mode": mode, "coordinate_transformation_mode": b.choose("asymmetric", "half_pixel")}
    b.add_output(b.add_main_node(op, *inputs, outputs=num_outputs, **attributes), quantize=quantize)


def _add_lookup(b: _KernelBuilder) -> None:
    op = b.choose("Gather", "Gather", "GatherElements", "GatherND", "ScatterND", "ScatterElements", "OneHot")
    rows, width, count = b.draw(16, 4096), b.draw(1, 512), b.draw(1, 1024)
    if op == "OneHot":
        indices = b.add_input([count], "int64")
        inputs = indices, b.add_constant(min(rows, 512)), b.add_constant([0.0, 1.0], "float32")
        b.add_output(b.add_node(op, *inputs), quantize=False)
        return
    rows = max(min(rows, _MAX_ELEMENTS // width), 2)
    if op == "Gather" and b.choose(0, 1):
        result = b.add_node(op, b.add_weight([rows, width]), b.add_input([1, count], "int64"))
        b.add_output(result)
        return
    table = b.add_input([rows, width])
    if op == "Gather":
        result = b.add_node(op, table, b.add_indices([count], rows))
    elif op == "GatherElements":
        result = b.add_node(op, table, b.add_indices([min(count, rows), width], rows), axis=0)
    elif op == "GatherND":
        result = b.add_node(op, table, b.add_indices([count, 1], rows))
    elif op == "ScatterND":
        result = b.add_node(op, table, b.add_indices([count, 1], rows), b.add_input([count, width]))
    else:
        count = min(count, rows)
        result = b.add_node(
            op, table, b.add_indices([count, width], rows), b.add_input([count, width]), axis=0
        )
    b.add_output(result)


def _add_selection(b: _KernelBuilder) -> None:
    op = b.choose("TopK", "NonZero", "NonMaxSuppression", "Compress", "Unique", "RoiAlign", "GridSample")
    b.dtype = "float32"
    shape = b.draw_shape(2, 2**14)
    if op == "TopK":
        x, k = b.add_input(shape), b.draw(1, max(min(shape[-1], 300), 1))
        b.add_output(b.add_main_node(op, x, b.add_constant([k]), outputs=2))
    elif op == "NonMaxSuppression":
        boxes, classes = b.draw(16, 2000), b.draw(1, 80)
        inputs = (
            b.add_input([1, boxes, 4]),
            b.add_input([1, classes, boxes]),
            b.add_constant([b.choose(10, 100)]),
        )
        b.add_output(
            b.add_node(op, *inputs, b.add_constant([0.5], "float32"), b.add_constant([0.05], "float32"))
        )
    elif op == "Compress":
        mask = b.add_constant(b.numpy.random(shape[-1]) < 0.5)
        b.add_output(b.add_node(op, b.add_input(shape), mask, axis=-1))
    elif op == "RoiAlign":
        channels, regions = b.draw(4, 256), b.draw(1, 50)
        corners = b.numpy.random([regions, 2]) * 10
        rois = b.add_constant([[*c, *(c + 10)] for c in corners], "float32")
        x = b.add_input([1, channels, 28, 28])
        b.add_output(b.add_node(op, x, rois, b.add_indices([regions], 1), output_height=7, output_width=7))
    elif op == "GridSample":
        extent = b.draw(4, 64)
        grid = b.add_input([1, extent, extent, 2])
        b.add_output(b.add_node(op, b.add_input([1, b.draw(1, 64), extent, extent]), grid))
    else:
        b.add_output(b.add_node(op, b.add_input(shape)))


def _add_recurrent(b: _KernelBuilder) -> None:
    op = b.choose("LSTM", "LSTM", "GRU", "GRU", "RNN")
    is_quantized = b.dtype == "int8" and op == "LSTM"
    b.dtype = "float32"
    gates, directions = {"LSTM": 4, "GRU": 3, "RNN": 1}[op], b.choose(1, 1, 2)
    width, hidden, batch = b.draw(4, 512), b.draw_width(8, 512), b.choose(1, 1, 1, 4)
    steps = b.draw(
        1, max(min(_MAX_PRODUCTS // (gates * hidden * (width + hidden) * batch * directions), 100), 1)
    )
    x = b.add_input([steps, batch, width])
    attributes: dict[str, Any] = {
        "hidden_size": hidden, "direction": "bidirectional" if directions == 2 else "forward"
    }  # fmt: skip
    if is_quantized:
        weights = [
            b.add_constant(b.numpy.integers(-99, 99, [directions, depth, 4 * hidden], "int8"))
            for depth in (width, hidden)
        ]
        scale = b.add_constant([0.01] * directions, "float32"), b.add_constant([0] * directions, "int8")
        b.add_output(
            b.add_node(
                "DynamicQuantizeLSTM", x, *weights, "", "", "", "", "", *scale, *scale,
                domain=MICROSOFT, **attributes,
            )
        )  # fmt: skip
        return
    if op == "GRU":
        attributes["linear_before_reset"] = b.choose(0, 1)
    b.add_output(
        b.add_node(
            op,
            x,
            b.add_weight([directions, gates * hidden, width]),
            b.add_weight([directions, gates * hidden, hidden]),
            b.add_weight([directions, 2 * gates * hidden]),
            **attributes,
        )
    )


def _add_transformer(b: _KernelBuilder) -> None:
    """Add an operator that onnxruntime's optimizer creates in transformers."""
    op = b.choose(
        "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization", "RotaryEmbedding", "MultiHeadAttention", "GroupQueryAttention",
    )  # fmt: skip
    b.dtype = "float32"
    heads, size, tokens = b.choose(3, 4, 8, 12), b.choose(32, 64), b.draw(1, 256)
    width = heads * size
    x = b.add_input([1, tokens, width])
    attributes: dict[str, Any] = {}
    inputs: list[str] = []
    if op == "BiasGelu":
        inputs = [b.add_weight([width])]
    elif op.startswith("Skip"):
        inputs = [b.add_input([1, tokens, width]), b.add_weight([width])]
        attributes = {"epsilon": 1e-5}
    elif op == "RotaryEmbedding":
        tables = [b.add_weight([tokens, size // 2]) for _ in range(2)]
        inputs, attributes = [b.add_indices([1, tokens], tokens), *tables], {"num_heads": heads}
    elif op == "MultiHeadAttention":
        keys = b.draw(1, 256)
        inputs, attributes = [b.add_input([1, keys, width]) for _ in range(2)], {"num_heads": heads}
    elif op == "GroupQueryAttention":
        key_heads, past = b.choose(1, heads), b.draw(1, 512)
        inputs = [b.add_input([1, tokens, key_heads * size]) for _ in range(2)]
        inputs += [b.add_input([1, key_heads, past, size]) for _ in range(2)]
        total = past + tokens
        inputs += [b.add_constant([total - 1], "int32"), b.add_constant(total, "int32")]
        attributes = {"num_heads": heads, "kv_num_heads": key_heads}
    outputs = 3 if op == "GroupQueryAttention" else 1
    b.add_output(b.add_main_node(op, x, *inputs, domain=MICROSOFT, outputs=outputs, **attributes))


_CONTRACTIONS = ("conv", "matmul", "gemm")
"""Groups that occur three times as often as the others, and in all types."""

_GROUPS: Mapping[str, Callable[[_KernelBuilder], None]] = {
    "conv": _add_conv,
    "matmul": _add_matmul,
    "unary": _add_unary,
    "binary": _add_binary,
    "gemm": _add_gemm,
    "movement": _add_movement,
    "normalization": _add_normalization,
    "batched_matmul": _add_batched_matmul,
    "reduction": _add_reduction,
    "pool": _add_pool,
    "lookup": _add_lookup,
    "recurrent": _add_recurrent,
    "transformer": _add_transformer,
    "integer_product": _add_integer_product,
    "conv_transpose": _add_conv_transpose,
    "selection": _add_selection,
}
"""Group of operators -> function that adds one of them to a model."""
