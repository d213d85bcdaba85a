"""Pre-norm transformer block of attention and MLP; heads and hidden channels can be gated and sliced."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockGates:
    """Gates of one block; None for grains without gates.

    Attributes:
        head: [num_heads].
        channel: [channels].
        block: Scalar.
    """

    head: Tensor | None = None
    channel: Tensor | None = None
    block: Tensor | None = None


_NO_GATES = BlockGates()


class Attention(nn.Module):
    """Multi-head self-attention.

    Args:
        dim: Width of a token.
        num_heads: Heads; fewer than `dim // head_dim` after pruning.
        head_dim: Width of a head.
        dropout: Dropout of the attention weights.
        out_dropout: Dropout of the output.
        bias: Whether the output projection has a bias.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        head_dim: int,
        *,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, head_dim, dropout
        self.qkv = nn.Linear(dim, 3 * num_heads * head_dim)
        self.proj = nn.Linear(num_heads * head_dim, dim, bias=bias)
        self.out_dropout = nn.Dropout(out_dropout)

    def forward(self, x: Tensor, bias: Tensor | None = None, gate_values: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: [B, S, dim].
            bias: Bias on attention towards each token, [B, S].
            gate_values: Factor of each head, [num_heads].
        """
        q, k, v = self._project_qkv(x)
        mask = None if bias is None else bias[:, None, None].to(q.dtype)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
        )
        if gate_values is not None:
            out = out * gate_values[:, None, None].to(out.dtype)
        return self.out_dropout(self.proj(out.transpose(1, 2).flatten(2)))

    def compute_received_attention(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None, *, first: bool
    ) -> Tensor:
        """Attention that each token receives, mean over heads and queries, [B, S].

        Args:
            x: [B, S, dim].
            weight: Weight of each query, [B, S]; equal by default.
            bias: As in `forward`.
            first: Use the first token (the class token) as the only query.
        """
        attention = self._compute_attention(x, bias, first=first)
        if first:
            return attention.mean(1)[:, 0]
        if weight is None:
            return attention.mean((1, 2))
        return torch.einsum("bhqs,bq->bs", attention, weight.float()) / attention.shape[1]

    def compute_attention_entropy(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Entropy of what each token attends to, mean over heads, [B, S]; arguments as in `forward`."""
        return torch.special.entr(self._compute_attention(x, bias, first=False)).sum(-1).mean(1)

    def _compute_attention(self, x: Tensor, bias: Tensor | None, *, first: bool) -> Tensor:
        """Attention weights, float32, [B, num_heads, queries, S]; only of the first query with `first`."""
        q, k, _ = self._project_qkv(x)
        if first:
            q = q[:, :, :1]
        logits = (q @ k.transpose(-2, -1)).float() * self.head_dim**-0.5
        if bias is not None:
            logits = logits + bias[:, None, None].float()
        return logits.softmax(-1)

    def compute_mean_keys(self, x: Tensor) -> Tensor:
        """Keys, mean over heads, [B, S, head_dim]; the features that ToMe compares."""
        return self._project_qkv(x)[1].mean(1)

    @torch.no_grad()
    def slice_units(self, units: Tensor, *, bias: bool) -> Attention:
        """Copy some of the heads; see `core.layers.Splittable`.

        Args:
            units: Heads, int64, [u].
            bias: Whether to keep the bias of the output projection.
        """
        dim, head_dim = self.proj.out_features, self.head_dim
        sliced = Attention(
            dim, len(units), head_dim, dropout=self.dropout, out_dropout=self.out_dropout.p, bias=bias
        ).to(self.proj.weight)  # fmt: skip
        for name in ("weight", "bias"):
            value: Tensor = getattr(self.qkv, name)
            heads = value.view(3, self.num_heads, head_dim, *value.shape[1:])[:, units]
            getattr(sliced.qkv, name).copy_(heads.flatten(0, 2))
        sliced.proj.weight.copy_(self.proj.weight.view(dim, self.num_heads, head_dim)[:, units].flatten(1))
        if bias:
            sliced.proj.bias.copy_(self.proj.bias)
        return sliced.train(self.training)

    @torch.no_grad()
    def unit_importance(self) -> Tensor:
        """Frobenius norm of the product of each head's value and output weights, [num_heads]."""
        dim, head_dim = self.proj.out_features, self.head_dim
        values = self.qkv.weight.view(3, self.num_heads, head_dim, -1)[2]
        out = self.proj.weight.view(dim, self.num_heads, head_dim).movedim(1, 0)
        # |A B|^2 is the trace of (A^T A) (B B^T); both factors have the width of a head.
        return ((out.mT @ out) * (values @ values.mT)).sum((1, 2)).sqrt()

    def _project_qkv(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, num_heads, S, head_dim]."""
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return q, k, v


class MLP(nn.Module):
    """Two linear layers with GELU between them.

    Args:
        dim: Width of a token.
        channels: Hidden channels.
        dropout: Dropout after both layers.
        bias: Whether the second layer has a bias.
    """

    def __init__(self, dim: int, channels: int, *, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(dim, channels)
        self.down = nn.Linear(channels, dim, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, gate_values: Tensor | None = None) -> Tensor:
        """Apply the MLP to `x` [B, S, dim]; `gate_values` [channels] is the factor of each hidden channel."""
        hidden = functional.gelu(self.up(x))
        if gate_values is not None:
            hidden = hidden * gate_values.to(hidden.dtype)
        return self.dropout(self.down(self.dropout(hidden)))

    @torch.no_grad()
    def slice_units(self, units: Tensor, *, bias: bool) -> MLP:
        """Copy some of the hidden channels; see `core.layers.Splittable`.

        Args:
            units: Channels, int64, [u].
            bias: Whether to keep the bias of the second layer.
        """
        sliced = MLP(
            self.down.out_features, len(units), dropout=self.dropout.p, bias=bias
        ).to(self.down.weight)  # fmt: skip
        sliced.up.weight.copy_(self.up.weight[units])
        sliced.up.bias.copy_(self.up.bias[units])
        sliced.down.weight.copy_(self.down.weight[:, units])
        if bias:
            sliced.down.bias.copy_(self.down.bias)
        return sliced.train(self.training)

    @torch.no_grad()
    def unit_importance(self) -> Tensor:
        """Norm of the input weights times norm of the output weights of each channel, [channels]."""
        return self.up.weight.norm(dim=1) * self.down.weight.norm(dim=0)


class TransformerBlock(nn.Module):
    """x + attention(norm1(x)), then x + mlp(norm2(x)).

    Args:
        attention: None in a removed block.
        mlp: None in a removed block.
        dim: Width of a token.
        drop_path: Probability that a branch is dropped for a sample in training.
        eps: Epsilon of the layer norms.
    """

    def __init__(
        self,
        attention: Attention | None,
        mlp: MLP | None,
        dim: int,
        *,
        drop_path: float = 0.0,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1 = None if attention is None else nn.LayerNorm(dim, eps=eps)
        self.attention = attention
        self.norm2 = None if mlp is None else nn.LayerNorm(dim, eps=eps)
        self.mlp = mlp

    def forward(self, x: Tensor, bias: Tensor | None = None, gates: BlockGates = _NO_GATES) -> Tensor:
        """Run both branches on `x` [B, S, dim]; for `bias` see `Attention.forward`."""
        return self.forward_mlp(self.forward_attention(x, bias, gates), gates)

    def forward_attention(
        self, x: Tensor, bias: Tensor | None = None, gates: BlockGates = _NO_GATES
    ) -> Tensor:
        """Add the attention branch; identity in a removed block."""
        if self.attention is None:
            return x
        assert self.norm1 is not None
        return x + self._scale_branch(self.attention(self.norm1(x), bias, gates.head), gates.block)

    def forward_mlp(self, x: Tensor, gates: BlockGates = _NO_GATES) -> Tensor:
        """Add the MLP branch; identity in a removed block."""
        if self.mlp is None:
            return x
        assert self.norm2 is not None
        return x + self._scale_branch(self.mlp(self.norm2(x), gates.channel), gates.block)

    def _scale_branch(self, branch: Tensor, gate_values: Tensor | None) -> Tensor:
        """Apply the block gate and stochastic depth."""
        if gate_values is not None:
            branch = branch * gate_values.to(branch.dtype)
        if self.drop_path > 0.0 and self.training:
            survival = 1.0 - self.drop_path
            branch = branch * (branch.new_empty(len(branch), 1, 1).bernoulli_(survival) / survival)
        return branch
