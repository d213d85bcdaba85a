"""Token state between blocks, dropping or masking of tokens, and fixed token orders.

A stage keeps a fixed number of tokens, whatever the video shows, so that shapes are static and a model can be
compiled and captured in a CUDA graph. There are two equivalent implementations:

- `drop_tokens` gathers the kept tokens; later blocks compute nothing else.
- `mask_tokens` keeps all tokens and gives the dropped ones a weight of 0 (in training: a soft weight). No
  token attends to them, and pooling ignores them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenState:
    """Tokens between two blocks: P prefix tokens, then S grid tokens.

    Attributes:
        x: Features, [B, P + S, C].
        num_prefix: P, the class token and the tokens that stages merged.
        positions: Position of each grid token among the T * N tokens of the clip, int64, [B, S].
        weight: Soft or hard weight of each grid token, [B, S]; None means 1.
        retained: Whether each grid token is kept under hard masks, bool, [B, S]; None keeps all.
        attn_bias: Bias on attention towards each token, [B, P + S]; None means 0.
        size: Tokens merged into each grid token, [B, S]; None means 1.
    """

    x: Tensor
    num_prefix: int
    positions: Tensor
    weight: Tensor | None = None
    retained: Tensor | None = None
    attn_bias: Tensor | None = None
    size: Tensor | None = None

    @property
    def grid(self) -> Tensor:
        """Features of the grid tokens, [B, S, C]."""
        return self.x[:, self.num_prefix :]


def count_kept_tokens(share: float, num_tokens: int) -> int:
    """Number of tokens that a share keeps, at least 1."""
    return max(1, round(share * num_tokens))


def select_top_tokens(score: Tensor, num_kept: int) -> Tensor:
    """Indices of the highest scores in ascending order, int64, [B, num_kept]."""
    return score.topk(num_kept, dim=1).indices.sort(dim=1).values


def mask_top_tokens(score: Tensor, num_kept: int) -> Tensor:
    """Whether each token is among the highest scores, bool, [B, S]."""
    return torch.zeros_like(score, dtype=torch.bool).scatter(1, select_top_tokens(score, num_kept), True)


def score_by_order(order: Tensor, positions: Tensor, *, is_random: bool) -> Tensor:
    """Score tokens by the rank of their positions, or by new random numbers, [B, S].

    Args:
        order: Rank of each position, int64, [T * N].
        positions: Position of each token, int64, [B, S].
        is_random: Whether to draw random numbers.
    """
    if is_random:
        return torch.rand(positions.shape, device=positions.device)
    return order.float().expand(len(positions), -1).gather(1, positions)


def drop_tokens(tokens: TokenState, score: Tensor, num_kept: int, *, merge: bool) -> TokenState:
    """Gather the tokens with the highest scores.

    Args:
        tokens: Tokens before the stage, all with weight 1.
        score: [B, S].
        num_kept: Tokens to keep, at most S.
        merge: Whether the mean of the dropped tokens becomes one more prefix token.
    """
    selected = select_top_tokens(score, num_kept)
    merged = None
    if merge:
        dropped = torch.ones_like(score).scatter(1, selected, 0.0)
        merged = compute_weighted_mean(tokens.grid, dropped)
    return gather_tokens(tokens, selected, merged)


def gather_tokens(tokens: TokenState, selected: Tensor, merged: Tensor | None = None) -> TokenState:
    """Gather the prefix tokens and some of the grid tokens.

    Args:
        tokens: Tokens before the stage, all with weight 1.
        selected: Indices of grid tokens, int64, [B, K].
        merged: Features of one more prefix token, [B, C]; none by default.
    """
    parts = [tokens.grid.gather(1, selected[..., None].expand(-1, -1, tokens.x.shape[-1]))]
    if merged is not None:
        parts.insert(0, merged[:, None])
    if tokens.num_prefix:  # an empty tensor in an exported graph is refused by some runtimes
        parts.insert(0, tokens.x[:, : tokens.num_prefix])
    num_prefix = tokens.num_prefix + int(merged is not None)
    attn_bias = tokens.attn_bias
    if attn_bias is not None:
        prefix_bias = attn_bias.new_zeros(len(attn_bias), num_prefix)
        attn_bias = torch.cat([prefix_bias, attn_bias[:, tokens.num_prefix :].gather(1, selected)], 1)
    return replace(
        tokens,
        x=torch.cat(parts, 1),
        num_prefix=num_prefix,
        positions=tokens.positions.gather(1, selected),
        attn_bias=attn_bias,
        size=None if tokens.size is None else tokens.size.gather(1, selected),
    )


def compute_weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """Mean of features by weights that need not sum to 1, [B, C]; 0 if all weights are 0.

    Args:
        x: [B, S, C].
        weight: Non-negative weights, [B, S].
    """
    wide = weight if weight.dtype == torch.float64 else weight.float()
    # Normalize before summing: half precision would overflow in the sum.
    share = wide / wide.sum(1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)
    return torch.einsum("bs,bsc->bc", share.to(x.dtype), x)


def mask_tokens(
    tokens: TokenState, weight: Tensor, attn_bias: Tensor, retained: Tensor, *, merge: bool
) -> TokenState:
    """Weight the tokens instead of dropping them.

    Args:
        tokens: Tokens before the stage.
        weight: New weight of each grid token, [B, S], between 0 and the previous weight.
        attn_bias: Logarithm of the weight, [B, S]; -inf for weight 0.
        retained: Tokens that hard masks keep, bool, [B, S].
        merge: Whether the mean of the removed weight becomes one more prefix token.
    """
    x = tokens.x
    old_weight = torch.ones_like(weight) if tokens.weight is None else tokens.weight
    prefix_bias = attn_bias.new_zeros(len(attn_bias), tokens.num_prefix + int(merge))
    if merge:
        mean = compute_weighted_mean(tokens.grid, old_weight - weight)
        x = torch.cat([x[:, : tokens.num_prefix], mean[:, None], tokens.grid], 1)
    return replace(
        tokens,
        x=x,
        num_prefix=tokens.num_prefix + int(merge),
        weight=weight,
        retained=retained,
        attn_bias=torch.cat([prefix_bias, attn_bias], 1),
    )


def make_uniform_order(num_tokens: int) -> Tensor:
    """Rank tokens so that the tokens of the highest ranks are spread evenly, int64, [num_tokens].

    Tokens are ranked by the fractional parts of multiples of the golden ratio (a low-discrepancy sequence).
    """
    golden = (5.0**0.5 - 1.0) / 2.0
    return rank_scores(1.0 - (golden * torch.arange(num_tokens, dtype=torch.float64)) % 1.0)


def rank_scores(score: Tensor) -> Tensor:
    """Rank of each score, 0 for the lowest, int64, [n].

    Integers keep their value when the module is cast to half precision.
    """
    return score.argsort().argsort()
