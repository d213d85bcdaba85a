"""AutoSparse Net: scores schedules from their tokens, task features and the pattern of the matrix.

Notation: n schedules of t tasks with p patterns, w the width.

1. Context of a task, [t, c, w]: one token from its features and, if the network uses patterns, one token from
   the embedding of its pattern. A pattern is embedded once for all its schedules.
2. Tokens of a schedule, [n, length, w]: the sum of symbol embeddings and a projection of the numbers.
3. A pre-norm transformer. The context is prepended to the tokens of each schedule (`"input"`) or to the
   output of the first layer (`"concat"`), or each layer attends to it by cross-attention (`"cross"`).
4. The score is the sum over all tokens of a projection. Higher is faster; only the order within a task is
   meaningful.

`"mlp"` has no transformer: an MLP scores the sum of the tokens and the context, as in WACO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.core.config import StrictModel
from sparseflow.errors import InputError
from sparseflow.tuning.model.net.coarsen import Cells
from sparseflow.tuning.model.net.pattern_net import PatternConfig, PatternNet
from sparseflow.tuning.model.net.statistics import NUM_FEATURES
from sparseflow.tuning.model.net.tokenizer import FIELD_SIZES, LOG2_SCALE, NUM_NUMBERS, TokenTable

_NUM_SIZES = 32
"""Powers of two with their own embeddings: the best choice for 16 is not between those for 8 and 32."""


class NetConfig(StrictModel):
    """Configuration of the network.

    Attributes:
        pattern: Pattern branch; None uses the task features only.
        context_mode: How the context is used: `"input"`, `"concat"`, `"cross"` or `"mlp"`.
        layers: Transformer layers, at least 2 for `"concat"`; no effect without a transformer.
        width: Width of a token.
        heads: Attention heads; a divisor of the width.
        feed_forward: Hidden width of the MLPs.
        dropout: Dropout rate of the residual branches.
    """

    pattern: PatternConfig | None = PatternConfig()
    context_mode: Literal["input", "concat", "cross", "mlp"] = "input"
    layers: int = Field(default=2, ge=1, le=8)
    width: int = Field(default=64, ge=1, le=1024)
    heads: int = Field(default=2, ge=1, le=64)
    feed_forward: int = Field(default=128, ge=1, le=8192)
    dropout: float = Field(default=0.1, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"`width` (={self.width}) must be divisible by `heads` (={self.heads})")
        # Without a layer behind it, the context would change the scores of all schedules equally.
        if self.context_mode == "concat" and self.layers < 2:
            raise ValueError(f"`context_mode` 'concat' needs `layers` of at least 2, got {self.layers}")
        return self


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Tokenized schedules on a device.

    Attributes:
        fields: Symbols of the distinct tokens, int64, shape [distinct, 6]; the first is padding.
        numbers: Numbers of the distinct tokens, float32, shape [distinct, 2].
        ids: Tokens of each schedule, int64, shape [n, length], padded with 0.
        task: Task of each schedule, int64, shape [n].
    """

    fields: Tensor
    numbers: Tensor
    ids: Tensor
    task: Tensor

    @classmethod
    def from_ids(
        cls,
        ids: np.ndarray,
        table: TokenTable,
        *,
        task: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> TokenBatch:
        """Create a batch from the result of a tokenizer, with only the tokens that are used.

        Args:
            ids: Token ids, int32, shape [n, length].
            table: Table of the tokenizer.
            task: Task of each schedule, shape [n]; by default 0.
            device: Device.
        """
        used = np.zeros(len(table.fields), bool)
        used[ids] = True
        used[0] = True
        new_ids = np.cumsum(used) - 1
        of_task = np.zeros(len(ids), np.int64) if task is None else task.astype(np.int64)
        return cls(
            fields=torch.from_numpy(table.fields[used].astype(np.int64)).to(device),
            numbers=torch.from_numpy(table.numbers[used]).to(device),
            ids=torch.from_numpy(new_ids[ids]).to(device),
            task=torch.from_numpy(of_task).to(device),
        )


class AutoSparseNet(nn.Module):
    """The network; the module docstring describes its parts."""

    field_offsets: Tensor  # first symbol of each field

    def __init__(self, config: NetConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or NetConfig()
        width = config.width
        self.symbols = nn.Embedding(sum(FIELD_SIZES), width)
        nn.init.normal_(self.symbols.weight, std=0.5)
        self.register_buffer(
            "field_offsets", torch.tensor([0, *np.cumsum(FIELD_SIZES)[:-1]]), persistent=False
        )
        self.numbers = nn.Linear(NUM_NUMBERS, width)
        self.sizes = nn.Embedding(NUM_NUMBERS * _NUM_SIZES, width)
        nn.init.normal_(self.sizes.weight, std=0.5)
        self.mixer = _ResidualMLP(width, config.feed_forward, config.dropout)
        self.statistics = nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.GELU(), nn.Linear(width, width))
        if config.pattern is not None:
            self.pattern = PatternNet(config.pattern)
            self.project = nn.Linear(config.pattern.width, width)
            self.unknown = nn.Parameter(torch.zeros(width))
        if config.context_mode == "mlp":
            parts = 2 if config.pattern is None else 3
            self.mlp = nn.Sequential(
                nn.Linear(parts * width, config.feed_forward),
                nn.GELU(),
                nn.Linear(config.feed_forward, width),
                nn.GELU(),
            )
        else:
            self.layers = nn.ModuleList(_TransformerLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Parameter(torch.randn(width) / width)

    def embed_patterns(self, cells: Sequence[Cells]) -> Tensor:
        """Embed patterns, shape [p, w].

        Raises:
            InputError: The network does not use patterns.
        """
        if self.config.pattern is None:
            raise InputError("the network has no pattern branch (`pattern` is None)")
        if not cells:
            return self.unknown.new_zeros(0, self.config.width)
        return self.project(self.pattern(list(cells)))

    def build_context(
        self, statistics: Tensor, patterns: Tensor | None = None, pattern_index: Tensor | None = None
    ) -> Tensor:
        """Build the context of tasks, shape [t, c, w].

        Args:
            statistics: Task features, float32, shape [t, NUM_FEATURES].
            patterns: Result of `embed_patterns`, shape [p, w]; None if no pattern is known.
            pattern_index: Pattern of each task, int64, shape [t]; -1 if unknown.
        """
        task_token = self.statistics(statistics)
        if self.config.pattern is None:
            return task_token[:, None]
        if patterns is None or pattern_index is None:
            return torch.stack([task_token, self.unknown.expand_as(task_token)], 1)
        # Index -1 selects the last row, the unknown pattern.
        pattern_tokens = torch.cat([patterns, self.unknown[None].to(patterns.dtype)])
        return torch.stack([task_token, pattern_tokens[pattern_index].to(task_token.dtype)], 1)

    def embed_task(self, cells: Cells | None, statistics: np.ndarray) -> Tensor:
        """Build the context of one task without gradients, shape [1, c, w].

        Args:
            cells: Coarsened pattern; None if unknown. Ignored by a network without patterns.
            statistics: Task features, float32, shape [NUM_FEATURES].
        """
        device = self.head.device
        with torch.inference_mode():
            batch = torch.from_numpy(statistics).to(device)[None]
            if cells is None or self.config.pattern is None:
                return self.build_context(batch)
            return self.build_context(
                batch, self.embed_patterns([cells]), torch.zeros(1, dtype=torch.int64, device=device)
            )

    def forward(self, tokens: TokenBatch, context: Tensor) -> Tensor:
        """Score schedules, float32, shape [n].

        Args:
            tokens: Schedules of one or several tasks.
            context: Result of `build_context` or `embed_task`, shape [t, c, w].
        """
        embeddings = self.symbols(tokens.fields + self.field_offsets).sum(1) + self.numbers(tokens.numbers)
        powers = (tokens.numbers * LOG2_SCALE).round().long().clamp(max=_NUM_SIZES - 1)
        embeddings = embeddings + self.sizes(
            powers + _NUM_SIZES * torch.arange(NUM_NUMBERS, device=powers.device)
        ).sum(1)
        embeddings = self.mixer(embeddings)
        mask = tokens.ids > 0
        x = functional.embedding(tokens.ids, embeddings)
        if self.config.context_mode == "mlp":
            context_vector = context[tokens.task].to(x.dtype).flatten(1)
            hidden = self.mlp(torch.cat([(x * mask[..., None]).sum(1), context_vector], 1))
            return (self.norm(hidden) * self.head).sum(1)
        memory = None
        if self.config.context_mode == "cross":
            memory = functional.layer_norm(context, context.shape[-1:]).to(x.dtype)
        join_index = {"input": 0, "concat": 1}.get(self.config.context_mode)
        for index, layer in enumerate(self.layers):
            if index == join_index:
                context_tokens = context[tokens.task].to(x.dtype)
                x = torch.cat([context_tokens, x], 1)
                mask = torch.cat([mask.new_ones(context_tokens.shape[:2]), mask], 1)
            x = layer(x, mask, memory, tokens.task)
        # The tokens are summed first; autocast keeps both sums of products in float32.
        summed = (self.norm(x) * mask[..., None]).sum(1)
        return (summed * self.head).sum(1)


class _ResidualMLP(nn.Module):
    """x + MLP(norm(x))."""

    def __init__(self, width: int, inside: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inside)
        self.down = nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(functional.gelu(self.up(self.norm(x))))
        return x + functional.dropout(hidden, self.dropout, self.training)


class _TransformerLayer(nn.Module):
    """Self-attention, optional cross-attention to the context, MLP."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        width, self.heads, self.dropout = config.width, config.heads, config.dropout
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        if config.context_mode == "cross":
            self.norm_across = nn.LayerNorm(width)
            self.cross_query = nn.Linear(width, width)
            self.cross_key_value = nn.Linear(width, 2 * width)
            self.out_across = nn.Linear(width, width)
        self.mlp = _ResidualMLP(width, config.feed_forward, config.dropout)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None, task: Tensor) -> Tensor:
        """x: [n, length, w]; mask: bool, [n, length]; memory: [t, c, w]; task: [n]."""
        query, key, value = (self._split_heads(part) for part in self.project(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None])
        x = x + functional.dropout(self.out(self._merge_heads(attended)), self.dropout, self.training)
        if memory is not None:
            key, value = (self._split_heads(part)[task] for part in self.cross_key_value(memory).chunk(2, -1))
            query = self._split_heads(self.cross_query(self.norm_across(x)))
            attended = functional.scaled_dot_product_attention(query, key, value)
            x = x + functional.dropout(
                self.out_across(self._merge_heads(attended)), self.dropout, self.training
            )
        return self.mlp(x)

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape [..., length, w] to [..., heads, length, w / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def _merge_heads(self, x: Tensor) -> Tensor:
        return x.transpose(-3, -2).flatten(-2)
