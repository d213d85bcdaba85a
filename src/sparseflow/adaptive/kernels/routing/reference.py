"""Choosing experts, in plain torch: the likeliest k of a softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def top_experts(logits: Tensor, k: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Choose experts.

    Args:
        logits: [n, experts], floating.
        k: How many for each token.
        normalized: Whether their weights are made to sum to 1.

    Returns:
        Weights, [n, k] of the logits' dtype, the highest first; and experts, [n, k] int64. Of equally likely
        ones, those of the lower number.
    """
    chances = logits.softmax(-1, dtype=torch.float32)
    values, order = chances.sort(dim=-1, descending=True, stable=True)
    values, chosen = values[:, :k], order[:, :k]
    if normalized:
        values = values / values.sum(-1, keepdim=True)
    return values.to(logits.dtype), chosen
