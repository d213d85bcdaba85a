"""AutoSparse Net: scores schedules by their tokens, the task's statistics and the matrix's pattern.

Notation: n schedules of t tasks with p patterns, w the width.

1. Context of a task, (t, c, w): a token from its statistics and, unless the network does without, one from
   the embedding of its pattern. A pattern is embedded once, whatever is scored for it.
2. Tokens of a schedule, (n, length, w): symbols are looked up and added to a projection of the numbers.
3. A transformer that normalises first. The context joins as tokens in front of each schedule's (`"input"`),
   or each layer looks at it by cross-attention (`"cross"`).
4. The score is the sum over all tokens that are there of a projection of each. Higher is faster; only the
   order within a task means something.

With `"perceptron"` there is no transformer: tokens are summed first, and a perceptron scores the sum together
with the context, as in WACO.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.errors import InputError
from sparseflow.tuning.model.net.coarsen import Cells
from sparseflow.tuning.model.net.pattern_net import PatternConfig, PatternNet
from sparseflow.tuning.model.net.statistics import WIDTH
from sparseflow.tuning.model.net.tokenizer import FIELDS, LOG2_SCALE, NUMBERS, TokenTable

JOINED = ("input", "cross", "perceptron")
_LIMITS = {"layers": 8, "width": 1024, "heads": 64, "feed_forward": 8192}

_SIZES = 32
"""Powers of two that have a symbol of their own: what is right for 16 need not be half right for 8 and 32."""


@dataclass(frozen=True, kw_only=True)
class NetConfig:
    """What the network is made of.

    Attributes:
        pattern: How a pattern is read; None for a network that sees the statistics only.
        joined: Where the context comes in, `"input"`, `"cross"` or `"perceptron"`.
        layers: Layers of the transformer; of no effect where there is none.
        width: Width of a token.
        heads: Heads of attention; they divide the width.
        feed_forward: Width inside of the layers' perceptrons.
        dropout: Share of what is added in each layer that is dropped in training.

    Raises:
        InputError: A value cannot be used.
    """

    pattern: PatternConfig | None = dataclasses.field(default_factory=PatternConfig)
    joined: str = "input"
    layers: int = 2
    width: int = 64
    heads: int = 2
    feed_forward: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.joined not in JOINED:
            raise InputError(f"`joined` (={self.joined!r}) must be one of: {', '.join(JOINED)}")
        for name, most in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise InputError(f"`{name}` (={value!r}) must be a whole number from 1 to {most}")
        if self.width % self.heads:
            raise InputError(f"`width` (={self.width}) must be divisible by `heads` (={self.heads})")
        if type(self.dropout) not in (int, float) or not 0.0 <= self.dropout < 1.0:
            raise InputError(f"`dropout` (={self.dropout!r}) must be a share of 0 or more, and below 1")

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types; `from_dict` reads it back."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return fields | {"pattern": None if self.pattern is None else self.pattern.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NetConfig:
        """The configuration that `to_dict` wrote.

        Raises:
            InputError: A field is missing or unknown, or its value cannot be used.
        """
        names = {each.name for each in dataclasses.fields(cls)}
        if not isinstance(data, Mapping) or set(data) != names:
            found = ", ".join(sorted(map(str, data))) if isinstance(data, Mapping) else repr(data)
            raise InputError(f"a network has the fields {', '.join(sorted(names))}; found: {found}")
        pattern = data["pattern"]
        return cls(**{**data, "pattern": None if pattern is None else PatternConfig.from_dict(pattern)})


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Schedules as the network reads them.

    Attributes:
        fields: Symbols of the distinct tokens, int64, (distinct, 6); the first is padding.
        numbers: Their numbers, float32, (distinct, 2).
        ids: Which of them each schedule has, int64, (n, length); 0 after its end.
        task: Which task each schedule is of, int64, (n,).
    """

    fields: Tensor
    numbers: Tensor
    ids: Tensor
    task: Tensor

    @classmethod
    def of(
        cls,
        ids: np.ndarray,
        table: TokenTable,
        *,
        task: np.ndarray | None = None,
        device: torch.device | str = "cpu",
    ) -> Tokens:
        """From what an `Encoder` gave; of its table, only what these schedules use.

        Args:
            ids: int32, (n, length).
            table: The encoder's.
            task: (n,); by default all are of the first.
            device: Where to put them.
        """
        used = np.zeros(len(table.fields), bool)
        used[ids] = True
        used[0] = True
        place = np.cumsum(used) - 1
        of_task = np.zeros(len(ids), np.int64) if task is None else task.astype(np.int64)
        return cls(
            fields=torch.from_numpy(table.fields[used].astype(np.int64)).to(device),
            numbers=torch.from_numpy(table.numbers[used]).to(device),
            ids=torch.from_numpy(place[ids]).to(device),
            task=torch.from_numpy(of_task).to(device),
        )


class AutoSparseNet(nn.Module):
    """The network; the module's docstring tells its parts."""

    first: Tensor  # of each field's symbols, where they begin

    def __init__(self, config: NetConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or NetConfig()
        width = config.width
        self.symbols = nn.Embedding(sum(FIELDS), width)
        nn.init.normal_(self.symbols.weight, std=0.5)
        self.register_buffer("first", torch.tensor([0, *np.cumsum(FIELDS)[:-1]]), persistent=False)
        self.numbers = nn.Linear(NUMBERS, width)
        self.sizes = nn.Embedding(NUMBERS * _SIZES, width)
        nn.init.normal_(self.sizes.weight, std=0.5)
        self.mixer = _Residual(width, config.feed_forward, config.dropout)
        self.statistics = nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, width))
        if config.pattern is not None:
            self.pattern = PatternNet(config.pattern)
            self.project = nn.Linear(config.pattern.width, width)
            self.unknown = nn.Parameter(torch.zeros(width))
        if config.joined == "perceptron":
            parts = 2 if config.pattern is None else 3
            self.perceptron = nn.Sequential(
                nn.Linear(parts * width, config.feed_forward),
                nn.GELU(),
                nn.Linear(config.feed_forward, width),
                nn.GELU(),
            )
        else:
            self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Parameter(torch.randn(width) / width)

    def embed_patterns(self, cells: Sequence[Cells]) -> Tensor:
        """Embeddings of patterns, (p, w).

        Raises:
            InputError: The network does without patterns.
        """
        if self.config.pattern is None:
            raise InputError(
                "this network reads no patterns (its `pattern` is None); give it statistics only"
            )
        if not cells:
            return self.unknown.new_zeros(0, self.config.width)
        return self.project(self.pattern(list(cells)))

    def context(
        self, statistics: Tensor, patterns: Tensor | None = None, which: Tensor | None = None
    ) -> Tensor:
        """What is known of tasks, (t, c, w).

        Args:
            statistics: From `statistics.statistics`, float32, (t, WIDTH).
            patterns: From `embed_patterns`, (p, w); without it no pattern is known.
            which: Each task's pattern among them, int64, (t,), -1 where it is not known.
        """
        told = self.statistics(statistics)
        if self.config.pattern is None:
            return told[:, None]
        if patterns is None or which is None:
            return torch.stack([told, self.unknown.expand_as(told)], 1)
        # -1 is the last: unknown.
        seen = torch.cat([patterns, self.unknown[None].to(patterns.dtype)])
        return torch.stack([told, seen[which].to(told.dtype)], 1)

    def embed(self, cells: Cells | None, statistics: np.ndarray) -> Tensor:
        """The context of one task, (1, c, w), for scoring; without gradients.

        Args:
            cells: The coarsened pattern; None where it is not known. A network without patterns ignores it.
            statistics: float32, (WIDTH,).
        """
        device = self.head.device
        with torch.inference_mode():
            told = torch.from_numpy(statistics).to(device)[None]
            if cells is None or self.config.pattern is None:
                return self.context(told)
            return self.context(
                told, self.embed_patterns([cells]), torch.zeros(1, dtype=torch.int64, device=device)
            )

    def forward(self, tokens: Tokens, context: Tensor) -> Tensor:
        """Scores, float32, (n,).

        Args:
            tokens: Schedules of one task or several.
            context: From `context` or `embed`, (t, c, w).
        """
        distinct = self.symbols(tokens.fields + self.first).sum(1) + self.numbers(tokens.numbers)
        powers = (tokens.numbers * LOG2_SCALE).round().long().clamp(max=_SIZES - 1)
        distinct = distinct + self.sizes(powers + _SIZES * torch.arange(NUMBERS, device=powers.device)).sum(1)
        distinct = self.mixer(distinct)
        there = tokens.ids > 0
        x = functional.embedding(tokens.ids, distinct)
        if self.config.joined == "perceptron":
            known = context[tokens.task].to(x.dtype).flatten(1)
            found = self.perceptron(torch.cat([(x * there[..., None]).sum(1), known], 1))
            return (self.norm(found) * self.head).sum(1)
        memory = None
        if self.config.joined == "input":
            front = context[tokens.task].to(x.dtype)
            x = torch.cat([front, x], 1)
            there = torch.cat([there.new_ones(front.shape[:2]), there], 1)
        else:
            memory = functional.layer_norm(context, context.shape[-1:]).to(x.dtype)
        for layer in self.layers:
            x = layer(x, there, memory, tokens.task)
        # The sum over tokens first; both are sums of products, which autocast leaves in float32.
        summed = (self.norm(x) * there[..., None]).sum(1)
        return (summed * self.head).sum(1)


class _Residual(nn.Module):
    """x + perceptron(norm(x))."""

    def __init__(self, width: int, inside: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inside)
        self.down = nn.Linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        found = self.down(functional.gelu(self.up(self.norm(x))))
        return x + functional.dropout(found, self.dropout, self.training)


class _Layer(nn.Module):
    """Attention among the tokens, then to the context if that is joined so, then a perceptron."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        width, self.heads, self.dropout = config.width, config.heads, config.dropout
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        if config.joined == "cross":
            self.norm_across = nn.LayerNorm(width)
            self.ask = nn.Linear(width, width)
            self.tell = nn.Linear(width, 2 * width)
            self.out_across = nn.Linear(width, width)
        self.perceptron = _Residual(width, config.feed_forward, config.dropout)

    def forward(self, x: Tensor, there: Tensor, memory: Tensor | None, task: Tensor) -> Tensor:
        """x: (n, length, w); there: bool, (n, length); memory: (t, c, w); task: (n,)."""
        query, key, value = (self._split(part) for part in self.project(self.norm(x)).chunk(3, -1))
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None, None])
        x = x + functional.dropout(self.out(self._joined(found)), self.dropout, self.training)
        if memory is not None:
            key, value = (self._split(part)[task] for part in self.tell(memory).chunk(2, -1))
            query = self._split(self.ask(self.norm_across(x)))
            found = functional.scaled_dot_product_attention(query, key, value)
            x = x + functional.dropout(self.out_across(self._joined(found)), self.dropout, self.training)
        return self.perceptron(x)

    def _split(self, x: Tensor) -> Tensor:
        """(…, length, w) to (…, heads, length, w / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def _joined(self, x: Tensor) -> Tensor:
        return x.transpose(-3, -2).flatten(-2)
