"""Learned score of tokens, as in DynamicViT."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class LearnedScore(nn.Module):
    """MLP that scores a token from its features and the mean of all tokens (DynamicViT, arXiv 2106.02034).

    It learns from the loss of the model through soft masks.

    Args:
        dim: Channels of a token, at least 2.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.num_global = dim // 2
        self.norm = nn.LayerNorm(dim)
        self.embed = nn.Linear(dim, dim)
        self.hidden = nn.Linear(dim, self.num_global)
        # A bias would not change the order, nor the soft masks, which are relative to a threshold.
        self.output = nn.Linear(self.num_global, 1, bias=False)

    def forward(self, x: Tensor, retained: Tensor | None = None) -> Tensor:
        """Score every token; higher is more important.

        Args:
            x: Features, [B, S, C].
            retained: Tokens that are still present, bool, [B, S]; all by default.

        Returns:
            [B, S].
        """
        features = functional.gelu(self.embed(self.norm(x)))
        token, shared = features[..., self.num_global :], features[..., : self.num_global]
        if retained is None:
            mean = shared.mean(1, keepdim=True)
        else:
            weight = retained.to(shared.dtype)[..., None]
            mean = (weight * shared).sum(1, keepdim=True) / weight.sum(1, keepdim=True)
        hidden = self.hidden(torch.cat([mean.expand_as(shared), token], -1))
        return self.output(functional.gelu(hidden)).squeeze(-1)

    def count_flops(self, num_tokens: int) -> int:
        """FLOPs of the linear layers for a number of tokens."""
        dim = self.embed.in_features
        return 2 * num_tokens * (dim**2 + dim * self.num_global + self.num_global)
