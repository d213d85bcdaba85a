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
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, *, dropout: float = 0.0, out_dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = heads, head_dim, dropout
        self.qkv = nn.Linear(dim, 3 * heads * head_dim)
        self.proj = nn.Linear(heads * head_dim, dim)
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
    """

    def __init__(self, dim: int, channels: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, channels)
        self.down = nn.Linear(channels, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """x: [B, S, dim]; gate: what each hidden channel is multiplied by, [channels]."""
        hidden = functional.gelu(self.up(x))
        if gate is not None:
            hidden = hidden * gate.to(hidden.dtype)
        return self.dropout(self.down(self.dropout(hidden)))


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
        gates = gates or BlockGates()
        if self.attention is not None:
            assert self.norm1 is not None
            x = x + self._branch(self.attention(self.norm1(x), bias, gates.head), gates.block)
        if self.perceptron is not None:
            assert self.norm2 is not None
            x = x + self._branch(self.perceptron(self.norm2(x), gates.channel), gates.block)
        return x

    def _branch(self, found: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            found = found * gate.to(found.dtype)
        if self.drop_path > 0.0 and self.training:
            kept = 1.0 - self.drop_path
            found = found * (found.new_empty(len(found), 1, 1).bernoulli_(kept) / kept)
        return found
