"""Selection of experts in plain torch: the k most probable of a float32 softmax."""

from __future__ import annotations

import torch
from torch import Tensor


def top_experts(logits: Tensor, k: int, *, normalized: bool) -> tuple[Tensor, Tensor]:
    """Select experts.

    Args:
        logits: [n, experts], floating.
        k: Experts per token.
        normalized: Whether to normalize the weights to sum 1.

    Returns:
        Weights, [n, k], dtype of the logits, descending; and experts, [n, k] int64. Ties select the lower
        index.
    """
    probs = logits.softmax(-1, dtype=torch.float32)
    values, order = probs.sort(dim=-1, descending=True, stable=True)
    values, expert_ids = values[:, :k], order[:, :k]
    if normalized:
        values = values / values.sum(-1, keepdim=True)
    return values.to(logits.dtype), expert_ids
