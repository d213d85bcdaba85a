"""Layers made up to be measured: a transformer's, one at a time, in plain torch, with random weights.

::

    embed      linear(patches(pixels)) + positions
    attention  x + proj(attention(qkv(norm(x))))
    mlp        x + down(gelu(up(norm(x))))
    head       linear(norm(mean over tokens))

Operations are those of matrix products, a multiply-add counted as two. Bytes are those of weights, input and
output, and twice (written and read) those of a norm's output, queries, keys and values, what heads gather,
and hidden channels; whatever can be done along with a product is taken to be. Memory is that of weights, and
of the activations that are alive together when there are most of them. A model whose layers count otherwise
wants a proxy that was fitted to its own layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.core.layers import LAYER_TYPES, PRECISIONS, LayerNode
from sparseflow.errors import InputError

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_ALIGNED = 256
"""Values; each tensor of a pool begins at a multiple, as if it had been allocated for itself."""

_BLOCK = 2**20
_PATCHES = (8, 14, 16, 32)
_CLASSES = (10, 101, 400, 1000)
_HEAD_DIMS = (32, 48, 64, 80, 96, 128)
_TRIES = 1000


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A made-up layer.

    Attributes:
        layer_type: One of `LAYER_TYPES`.
        precision: Of weights and activations.
        batch: Samples.
        seq_len: Tokens of a sample.
        embed_dim: Width of a token.
        inner: Pixels of a patch's side (embed), heads (attention), hidden channels (mlp), classes (head).
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
        told = (
            f"{self.layer_type}-{self.precision}-b{self.batch}-s{self.seq_len}-c{self.embed_dim}-{self.inner}"
        )
        return f"{told}x{self.head_dim}" if self.head_dim else told

    def node(self, id: int = 0) -> LayerNode:
        """What it costs."""
        b, s, c = self.batch, self.seq_len, self.embed_dim
        rows, size, norm = b * s, _BYTES[self.precision], 2 * c
        x = rows * c
        if self.layer_type == "attention":
            wide = self.inner * self.head_dim
            weights = norm + 3 * wide * (c + 1) + c * (wide + 1)
            flops = 2 * rows * (4 * c * wide + 2 * s * wide)
            took, gave, moved = x, x, 2 * x + 2 * rows * (c + 4 * wide)
            held = 3 * x + 4 * rows * wide
        elif self.layer_type == "mlp":
            weights = norm + self.inner * (c + 1) + c * (self.inner + 1)
            flops = 4 * rows * c * self.inner
            took, gave, moved = x, x, 2 * x + 2 * rows * (c + self.inner)
            held = 2 * x + rows * self.inner + rows * max(c, self.inner)
        elif self.layer_type == "embed":
            patch = 3 * self.inner**2
            weights, flops = c * (patch + 1) + s * c, 2 * rows * patch * c
            took, gave = rows * patch, x
            moved, held = took + gave, took + max(took + gave, 3 * gave)
        else:
            weights, flops = norm + self.inner * (c + 1), 2 * b * c * self.inner
            took, gave = x, b * self.inner
            moved, held = took + gave + 4 * b * c, took + 2 * b * c + gave
        return LayerNode(
            id=id, name=self.name, layer_type=self.layer_type, flops=float(flops),
            bytes=float(size * (weights + moved)), weight_bytes=size * weights,
            memory_bytes=size * (weights + held), seq_len=s, embed_dim=c,
            num_heads=self.inner if self.layer_type == "attention" else 0,
            mlp_ratio=self.inner / c if self.layer_type == "mlp" else 0.0, precision=self.precision, batch=b,
            traffic_in_bytes=size * took, traffic_out_bytes=size * gave,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What configurations are drawn from, each figure evenly by its logarithm.

    Attributes:
        types: Of layers.
        precisions: Of weights and activations.
        batch: Least and most samples; a power of two.
        seq_len: Least and most tokens of a sample.
        embed_dim: Least and most width; three in four are multiples of 64, the others of 8.
        mlp_ratio: Least and most hidden channels over width.
        rows: Most tokens of a batch.
        flops: Most operations.

    Raises:
        InputError: An unknown name, or a range that is empty.
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
        for name, allowed in (("types", LAYER_TYPES), ("precisions", PRECISIONS)):
            given = getattr(self, name)
            if not given or not set(given) <= set(allowed):
                raise InputError(f"`{name}` (={given}) must be some of: {', '.join(allowed)}")
        for name in ("batch", "seq_len", "embed_dim", "mlp_ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise InputError(f"`{name}` (={low}, {high}) must be a range above 0")

    @classmethod
    def small(cls, precisions: tuple[str, ...] = ("float32",)) -> Grid:
        """For a CPU: layers of some milliseconds."""
        return cls(
            precisions=precisions, batch=(1, 8), seq_len=(16, 512), embed_dim=(64, 512), rows=2048, flops=1e9
        )

    def draw(self, count: int, seed: int = 0) -> list[LayerConfig]:
        """Configurations that differ, of each type and precision in turns.

        Args:
            count: How many.
            seed: What they are drawn from. A larger `count` begins with the same ones.

        Raises:
            InputError: There are not so many.
        """
        random = np.random.default_rng(seed)
        kinds = [(kind, precision) for precision in self.precisions for kind in self.types]
        found: dict[LayerConfig, None] = {}
        tries = 0
        while len(found) < count:
            kind, precision = kinds[len(found) % len(kinds)]
            drawn = self._one(kind, precision, random)
            node = drawn.node()
            tries += 1
            if tries > _TRIES * count:
                raise InputError(f"{len(found)} of {count} configurations were found; draw from wider ranges")
            if drawn.batch * drawn.seq_len <= self.rows and float(node.flops) <= self.flops:
                found.setdefault(drawn)
        return list(found)

    def _one(self, kind: str, precision: str, random: np.random.Generator) -> LayerConfig:
        def between(ends: tuple[float, float]) -> float:
            return float(np.exp(random.uniform(np.log(ends[0]), np.log(ends[1]))))

        step = 64 if random.random() < 0.75 else 8
        dim = max(step, round(between(self.embed_dim) / step) * step)
        batch = 2 ** round(np.log2(between(self.batch)))
        seq = round(between(self.seq_len))
        inner, head_dim = 0, 0
        if kind == "attention":
            head_dim = int(random.choice([each for each in _HEAD_DIMS if each <= dim]))
            most = max(1, dim // head_dim)
            # Half are whole, the others have lost heads.
            inner = most if random.random() < 0.5 else 1 + int(random.integers(most))
        elif kind == "mlp":
            inner = max(8, round(between(self.mlp_ratio) * dim / step) * step)
        elif kind == "embed":
            inner = int(random.choice(_PATCHES))
        else:
            inner = int(random.choice(_CLASSES))
        return LayerConfig(
            layer_type=kind, precision=precision, batch=int(batch), seq_len=seq, embed_dim=dim, inner=inner,
            head_dim=head_dim,
        )  # fmt: skip


class Pool:
    """Random values that weights and inputs of all layers are views of, so that none is made for each.

    Args:
        device: Where.
        seed: What values are drawn from.
    """

    def __init__(self, device: torch.device | str, seed: int = 0) -> None:
        self._device, self._seed = torch.device(device), seed
        self._values: dict[torch.dtype, Tensor] = {}
        self._used = 0

    def layer(self, config: LayerConfig) -> tuple[nn.Module, Tensor]:
        """A layer and its input; the next one's are views of the same values."""
        dtype = getattr(torch, config.precision)
        self._reserve(config, dtype)
        with torch.device("meta"):
            module = _MODULES[config.layer_type](config)
        for name, weight in list(module.named_parameters()):
            owner, _, last = name.rpartition(".")
            value = nn.Parameter(self._take(weight.shape, dtype), requires_grad=False)
            setattr(module.get_submodule(owner), last, value)
        return module.eval(), self._take(_input_shape(config), dtype)

    def _reserve(self, config: LayerConfig, dtype: torch.dtype) -> None:
        self._used = 0
        node = config.node()
        needed = (node.weight_bytes + node.traffic_in_bytes) // _BYTES[config.precision] + 16 * _ALIGNED
        held = self._values.get(dtype)
        if held is None or held.numel() < needed:
            generator = torch.Generator().manual_seed(self._seed)
            block = 0.02 * torch.randn(_BLOCK, generator=generator)
            blocks = max(2 * (held.numel() if held is not None else 0), needed + _BLOCK) // _BLOCK
            self._values.pop(dtype, None)
            self._values[dtype] = block.to(self._device, dtype).repeat(blocks)

    def _take(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        count = int(np.prod(shape))
        begin, self._used = self._used, self._used + -(-count // _ALIGNED) * _ALIGNED
        return self._values[dtype][begin : begin + count].view(shape)


def _input_shape(config: LayerConfig) -> tuple[int, ...]:
    if config.layer_type == "embed":
        return (config.batch, 3, config.inner, config.seq_len * config.inner)
    return (config.batch, config.seq_len, config.embed_dim)


class _Embed(nn.Module):
    """Patches of a strip of pixels [B, 3, p, S * p]."""

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
        normed = self.norm(x)
        q, k, v = self.qkv(normed).view(b, s, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(found.transpose(1, 2).flatten(2))


class _Perceptron(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.up = nn.Linear(config.embed_dim, config.inner)
        self.down = nn.Linear(config.inner, config.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        hidden = functional.gelu(self.up(normed))
        return x + self.down(hidden)


class _Head(nn.Module):
    def __init__(self, config: LayerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.embed_dim)
        self.linear = nn.Linear(config.embed_dim, config.inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.mean(1)))


_MODULES = {"embed": _Embed, "attention": _Attention, "mlp": _Perceptron, "head": _Head}
