"""Synthetic transformer layers for measurements: plain torch, random weights.

::

    embed      linear(patches(pixels)) + positions
    attention  x + proj(attention(qkv(norm(x))))
    mlp        x + down(gelu(up(norm(x))))
    head       linear(norm(mean over tokens))

FLOPs are those of matrix products; a multiply-add counts as two. Bytes are those of weights, input and
output, and twice (written and read) those of intermediate tensors: the norm's output, queries, keys and
values, the attention output, and hidden channels. Elementwise operations are assumed to be fused into
products. Memory is that of weights and of the largest set of activations alive at the same time. Models that
count differently need a proxy fitted to their own layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.core.checks import check_at_least, check_one_of
from sparseflow.core.layers import LAYER_TYPES, PRECISIONS, LayerNode
from sparseflow.errors import InputError

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_ALIGNMENT = 256
"""Elements; tensors of a pool start at multiples of this, like separate allocations."""

_BLOCK = 2**20
_PATCHES = (8, 14, 16, 32)
_CLASSES = (10, 101, 400, 1000)
_HEAD_DIMS = (32, 48, 64, 80, 96, 128)
_MAX_ATTEMPTS_PER_LAYER = 1000


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Configuration of a synthetic layer.

    Attributes:
        layer_type: One of `LAYER_TYPES`.
        precision: Precision of weights and activations.
        batch: Batch size.
        seq_len: Tokens per sample.
        embed_dim: Width of a token.
        inner: Side of a patch in pixels (embed), heads (attention), hidden channels (mlp), classes (head).
        head_dim: Width of a head (attention), else 0.
    """

    layer_type: str
    precision: str
    batch: int
    seq_len: int
    embed_dim: int
    inner: int
    head_dim: int = 0

    @property
    def name(self) -> str:
        label = (
            f"{self.layer_type}-{self.precision}-b{self.batch}-s{self.seq_len}-c{self.embed_dim}-{self.inner}"
        )
        return f"{label}x{self.head_dim}" if self.head_dim else label

    def to_node(self, id: int = 0) -> LayerNode:
        """Describe the layer's cost."""
        b, s, c = self.batch, self.seq_len, self.embed_dim
        rows, size, norm = b * s, _BYTES[self.precision], 2 * c
        x = rows * c
        if self.layer_type == "attention":
            width = self.inner * self.head_dim
            weights = norm + 3 * width * (c + 1) + c * (width + 1)
            flops = 2 * rows * (4 * c * width + 2 * s * width)
            input_size, output_size, moved_size = x, x, 2 * x + 2 * rows * (c + 4 * width)
            activation_size = 3 * x + 4 * rows * width
        elif self.layer_type == "mlp":
            weights = norm + self.inner * (c + 1) + c * (self.inner + 1)
            flops = 4 * rows * c * self.inner
            input_size, output_size, moved_size = x, x, 2 * x + 2 * rows * (c + self.inner)
            activation_size = 2 * x + rows * self.inner + rows * max(c, self.inner)
        elif self.layer_type == "embed":
            patch = 3 * self.inner**2
            weights, flops = c * (patch + 1) + s * c, 2 * rows * patch * c
            input_size, output_size = rows * patch, x
            moved_size = input_size + output_size
            activation_size = input_size + max(moved_size, 3 * output_size)
        else:
            weights, flops = norm + self.inner * (c + 1), 2 * b * c * self.inner
            input_size, output_size = x, b * self.inner
            moved_size = input_size + output_size + 4 * b * c
            activation_size = input_size + output_size + 2 * b * c
        return LayerNode(
            id=id, name=self.name, layer_type=self.layer_type, flops=float(flops),
            bytes=float(size * (weights + moved_size)), weight_bytes=size * weights,
            memory_bytes=size * (weights + activation_size), seq_len=s, embed_dim=c,
            num_heads=self.inner if self.layer_type == "attention" else 0,
            mlp_ratio=self.inner / c if self.layer_type == "mlp" else 0.0,
            precision=self.precision, batch_size=b,
            traffic_in_bytes=size * input_size, traffic_out_bytes=size * output_size,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayerGrid:
    """Log-uniform distribution of layer configurations.

    Attributes:
        types: Layer types.
        precisions: Precisions of weights and activations.
        batch: Range of the batch size; sampled as powers of two.
        seq_len: Range of tokens per sample.
        embed_dim: Range of the width; three in four are multiples of 64, the others of 8.
        mlp_ratio: Range of hidden channels over width.
        rows: Maximum number of tokens in a batch.
        flops: Maximum FLOPs.

    Raises:
        InputError: A name is unknown, or a range is empty.
    """

    types: tuple[str, ...] = LAYER_TYPES
    precisions: tuple[str, ...] = ("float32",)
    batch: tuple[int, int] = (1, 64)
    seq_len: tuple[int, int] = (16, 4096)
    embed_dim: tuple[int, int] = (128, 1536)
    mlp_ratio: tuple[float, float] = (0.25, 4.0)
    rows: int = 2**16
    flops: float = 1e12

    def __post_init__(self) -> None:
        for name in self.types:
            check_one_of(LAYER_TYPES, types=name)
        for name in self.precisions:
            check_one_of(PRECISIONS, precisions=name)
        check_at_least(1, num_types=len(self.types), num_precisions=len(self.precisions))
        for name in ("batch", "seq_len", "embed_dim", "mlp_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise InputError(f"`{name}` (={low}, {high}) must be an ascending range above 0")

    @classmethod
    def small(cls, precisions: tuple[str, ...] = ("float32",)) -> LayerGrid:
        """Create a grid for CPUs: layers that take a few milliseconds."""
        return cls(
            precisions=precisions, batch=(1, 8), seq_len=(16, 512), embed_dim=(64, 512), rows=2048, flops=1e9
        )

    def sample(self, num_layers: int, seed: int = 0) -> list[LayerConfig]:
        """Sample distinct configurations, cycling through types and precisions.

        Args:
            num_layers: Number of configurations.
            seed: Random seed; a larger `num_layers` extends the same sequence.

        Raises:
            InputError: There are fewer distinct configurations.
        """
        random = np.random.default_rng(seed)
        kinds = [(kind, precision) for precision in self.precisions for kind in self.types]
        configs: dict[LayerConfig, None] = {}
        attempts = 0
        while len(configs) < num_layers:
            kind, precision = kinds[len(configs) % len(kinds)]
            config = self._sample_layer(kind, precision, random)
            node = config.to_node()
            attempts += 1
            if attempts > _MAX_ATTEMPTS_PER_LAYER * num_layers:
                raise InputError(
                    f"only {len(configs)} of {num_layers} configurations exist; use wider ranges"
                )
            if config.batch * config.seq_len <= self.rows and float(node.flops) <= self.flops:
                configs.setdefault(config)
        return list(configs)

    def _sample_layer(self, kind: str, precision: str, random: np.random.Generator) -> LayerConfig:
        def sample_log_uniform(bounds: tuple[float, float]) -> float:
            return float(np.exp(random.uniform(np.log(bounds[0]), np.log(bounds[1]))))

        step = 64 if random.random() < 0.75 else 8
        dim = max(step, round(sample_log_uniform(self.embed_dim) / step) * step)
        batch = 2 ** round(np.log2(sample_log_uniform(self.batch)))
        seq = round(sample_log_uniform(self.seq_len))
        inner, head_dim = 0, 0
        if kind == "attention":
            head_dim = int(random.choice([size for size in _HEAD_DIMS if size <= dim]))
            max_heads = max(1, dim // head_dim)
            # Half of the layers have all heads, the others fewer, as after pruning.
            inner = max_heads if random.random() < 0.5 else 1 + int(random.integers(max_heads))
        elif kind == "mlp":
            inner = max(8, round(sample_log_uniform(self.mlp_ratio) * dim / step) * step)
        elif kind == "embed":
            inner = int(random.choice(_PATCHES))
        else:
            inner = int(random.choice(_CLASSES))
        return LayerConfig(
            layer_type=kind, precision=precision, batch=int(batch), seq_len=seq, embed_dim=dim, inner=inner,
            head_dim=head_dim,
        )  # fmt: skip


class TensorPool:
    """Random values that weights and inputs of all layers share as views.

    Args:
        device: Device of the tensors.
        seed: Random seed.
    """

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self._device, self._seed = torch.device(device), seed
        self._values: dict[torch.dtype, Tensor] = {}
        self._used = 0

    def make_layer(self, config: LayerConfig) -> tuple[nn.Module, Tensor]:
        """Create a layer and its input; the next layer reuses the same values."""
        dtype = getattr(torch, config.precision)
        self._reserve(config, dtype)
        with torch.device("meta"):
            module = _MODULES[config.layer_type](config)
        for name, weight in list(module.named_parameters()):
            owner, _, last = name.rpartition(".")
            value = nn.Parameter(self._take_view(weight.shape, dtype), requires_grad=False)
            setattr(module.get_submodule(owner), last, value)
        return module.eval(), self._take_view(_input_shape(config), dtype)

    def _reserve(self, config: LayerConfig, dtype: torch.dtype) -> None:
        self._used = 0
        node = config.to_node()
        needed = (node.weight_bytes + node.traffic_in_bytes) // _BYTES[config.precision] + 16 * _ALIGNMENT
        current = self._values.get(dtype)
        if current is None or current.numel() < needed:
            generator = torch.Generator().manual_seed(self._seed)
            block = 0.02 * torch.randn(_BLOCK, generator=generator)
            blocks = max(2 * (current.numel() if current is not None else 0), needed + _BLOCK) // _BLOCK
            self._values.pop(dtype, None)
            self._values[dtype] = block.to(self._device, dtype).repeat(blocks)

    def _take_view(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = int(np.prod(shape))
        start, self._used = self._used, self._used + -(-count // _ALIGNMENT) * _ALIGNMENT
        return self._values[dtype][start : start + count].view(shape)


def _input_shape(config: LayerConfig) -> tuple[int, ...]:
    if config.layer_type == "embed":
        return (config.batch, 3, config.inner, config.seq_len * config.inner)
    return (config.batch, config.seq_len, config.embed_dim)


class _Embed(nn.Module):
    """Patch embedding of a strip of pixels, [B, 3, p, S * p]."""

    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.side = config.inner
        self.linear = nn.Linear(3 * config.inner**2, config.embed_dim)
        self.position = nn.Parameter(torch.empty(1, config.seq_len, config.embed_dim))

    def forward(self, pixels: Tensor) -> Tensor:
        b, channels, p, wide = pixels.shape
        patches = pixels.view(b, channels, p, wide // p, p).permute(0, 3, 1, 2, 4)
        return self.linear(patches.reshape(b, wide // p, -1)) + self.position


class _Attention(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.inner, config.head_dim
        wide = config.inner * config.head_dim
        self.norm = nn.LayerNorm(config.embed_dim)
        self.qkv = nn.Linear(config.embed_dim, 3 * wide)
        self.proj = nn.Linear(wide, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        normalized = self.norm(x)
        q, k, v = self.qkv(normalized).view(b, s, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(attended.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.up = nn.Linear(config.embed_dim, config.inner)
        self.down = nn.Linear(config.inner, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        normalized = self.norm(x)
        hidden = functional.gelu(self.up(normalized))
        return x + self.down(hidden)


class _Head(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.linear = nn.Linear(config.embed_dim, config.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.mean(1)))


_MODULES = {"embed": _Embed, "attention": _Attention, "mlp": _MLP, "head": _Head}
