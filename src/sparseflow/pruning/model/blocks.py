"""A transformer's block: attention and a perceptron, each normalised first; units of both can be cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockGates:
    """The gates of one block; None where a grain has none.

    Attributes:
        head: [heads].
        channel: [channels].
        block: A scalar.
    """

    head: Tensor | None = None
    channel: Tensor | None = None
    block: Tensor | None = None


class Attention(nn.Module):
    """Self-attention of some heads.

    Args:
        dim: Width of a token.
        heads: Heads; fewer than `dim // head_dim` where some were cut.
        head_dim: Width of a head.
        dropout: Of attention, in training.
        out_dropout: Of what is put out, in training.
        bias: Whether the last layer has one.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        *,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = heads, head_dim, dropout
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim, bias=bias)
        self.out_dropout = nn.Dropout(out_dropout)

    def forward(self, x: Tensor, bias: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: [B, S, dim].
            bias: Added to attention towards each token, [B, S].
            gate: What each head is multiplied by, [heads].
        """
        q, k, v = self._split(x)
        added = None if bias is None else bias[:, None, None].to(q.dtype)
        found = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=added, dropout_p=self.dropout if self.training else 0.0
        )
        if gate is not None:
            found = found * gate[:, None, None].to(found.dtype)
        return self.out_dropout(self.proj(found.transpose(1, 2).flatten(2)))

    def received(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, first: bool) -> Tensor:
        """How much attention each token gets, mean over heads, [B, S].

        Args:
            x: [B, S, dim].
            weight: What each token's own attention counts, [B, S]; by default all alike.
            bias: As in `forward`.
            first: Only that of the first token, the class token, counts.
        """
        q, k, _ = self._split(x)
        if first:
            q = q[:, :, :1]
        at = (q @ k.transpose(-2, -1)).float() * self.head_dim**-0.5
        if bias is not None:
            at = at + bias[:, None, None].float()
        found = at.softmax(-1)  # [B, heads, queries, S]
        if first:
            return found.mean(1)[:, 0]
        if weight is None:
            return found.mean((1, 2))
        return torch.einsum("bhqs,bq->bs", found, weight.float()) / found.shape[1]

    def keys(self, x: Tensor) -> Tensor:
        """Keys, mean over heads, [B, S, head_dim]: what ToMe compares."""
        return self._split(x)[1].mean(1)

    @torch.no_grad()
    def slice_units(self, units: Tensor, *, bias: bool) -> Attention:
        """Some heads only, with weights of their own; see `core.layers.Splittable`.

        Args:
            units: Which heads, int64, [u].
            bias: Whether the last layer's bias is in it.
        """
        dim, size = self.proj.out_features, self.head_dim
        found = Attention(
            dim, len(units), size, dropout=self.dropout, out_dropout=self.out_dropout.p, bias=bias
        ).to(self.proj.weight)  # fmt: skip
        for name in ("weight", "bias"):
            value: Tensor = getattr(self.qkv, name)
            mine = value.view(3, self.heads, size, *value.shape[1:])[:, units]
            getattr(found.qkv, name).copy_(mine.flatten(0, 2))
        found.proj.weight.copy_(self.proj.weight.view(dim, self.heads, size)[:, units].flatten(1))
        if bias:
            found.proj.bias.copy_(self.proj.bias)
        return found.train(self.training)

    @torch.no_grad()
    def unit_importance(self) -> Tensor:
        """The norm of what each head makes of a token, its values' weights times its output's, [heads]."""
        dim, size = self.proj.out_features, self.head_dim
        values = self.qkv.weight.view(3, self.heads, size, -1)[2]
        out = self.proj.weight.view(dim, self.heads, size).movedim(1, 0)
        # |A B|^2 is the trace of (A^T A) (B B^T), both of a head's width.
        return ((out.mT @ out) * (values @ values.mT)).sum((1, 2)).sqrt()

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return q, k, v


class Perceptron(nn.Module):
    """Two layers with GELU between them.

    Args:
        dim: Width of a token.
        channels: Hidden channels.
        dropout: Of both layers' outputs, in training.
        bias: Whether the last layer has one.
    """

    def __init__(self, dim: int, channels: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(dim, channels)
        self.down = nn.Linear(channels, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x: [B, S, dim]; gate: what each hidden channel is multiplied by, [channels]."""
        hidden = functional.gelu(self.up(x))
        if gate is not None:
            hidden = hidden * gate.to(hidden.dtype)
        return self.dropout(self.down(self.dropout(hidden)))

    @torch.no_grad()
    def slice_units(self, units: Tensor, *, bias: bool) -> Perceptron:
        """Some hidden channels only, with weights of their own; see `core.layers.Splittable`.

        Args:
            units: Which channels, int64, [u].
            bias: Whether the last layer's bias is in it.
        """
        found = Perceptron(
            self.down.out_features, len(units), dropout=self.dropout.p, bias=bias
        ).to(self.down.weight)  # fmt: skip
        found.up.weight.copy_(self.up.weight[units])
        found.up.bias.copy_(self.up.bias[units])
        found.down.weight.copy_(self.down.weight[:, units])
        if bias:
            found.down.bias.copy_(self.down.bias)
        return found.train(self.training)

    @torch.no_grad()
    def unit_importance(self) -> Tensor:
        """The norm of each channel's weights in, times that of those out, [channels]."""
        return self.up.weight.norm(dim=1) * self.down.weight.norm(dim=0)


class Block(nn.Module):
    """x + attention(norm(x)), and then x + perceptron(norm(x)).

    Args:
        attention: None where the block was removed.
        perceptron: None where the block was removed.
        dim: Width of a token.
        drop_path: Share of samples that a branch is left out for, in training.
        eps: Of the norms.
    """

    def __init__(
        self,
        attention: Attention | None,
        perceptron: Perceptron | None,
        dim: int,
        *,
        drop_path: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1 = None if attention is None else nn.LayerNorm(dim, eps=eps)
        self.attention = attention
        self.norm2 = None if perceptron is None else nn.LayerNorm(dim, eps=eps)
        self.perceptron = perceptron

    def forward(self, x: Tensor, bias: Tensor | None = None, gates: BlockGates | None = None) -> Tensor:
        """x: [B, S, dim]; bias: see `Attention.forward`."""
        return self.perceive(self.attend(x, bias, gates), gates)

    def attend(self, x: Tensor, bias: Tensor | None = None, gates: BlockGates | None = None) -> Tensor:
        """The first half; x as it is where the block was removed."""
        if self.attention is None:
            return x
        assert self.norm1 is not None
        gates = gates or BlockGates()
        return x + self._branch(self.attention(self.norm1(x), bias, gates.head), gates.block)

    def perceive(self, x: Tensor, gates: BlockGates | None = None) -> Tensor:
        """The second half; x as it is where the block was removed."""
        if self.perceptron is None:
            return x
        assert self.norm2 is not None
        gates = gates or BlockGates()
        return x + self._branch(self.perceptron(self.norm2(x), gates.channel), gates.block)

    def _branch(self, found: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            found = found * gate.to(found.dtype)
        if self.drop_path > 0.0 and self.training:
            kept = 1.0 - self.drop_path
            found = found * (found.new_empty(len(found), 1, 1).bernoulli_(kept) / kept)
        return found
