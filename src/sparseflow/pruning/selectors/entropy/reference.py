"""Entropies of temporal windows and spatial cells in plain torch; differentiable.

Notation: x is [B, T, N, C]; p = softmax over C of x * scale. A group is a set of tokens: a window (one
patch over several frames) or a cell (several patches of one frame). Its distribution is the mean of p over
its kept tokens, and 0 if it has none.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-12
"""Added to probabilities before the logarithm."""


def compute_entropies(
    x: Tensor,
    windows: Tensor,
    cells: Tensor,
    retained: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    divergence: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the entropy of each window and of each cell, in nats.

    Args:
        x: Features, [B, T, N, C], float32 or float64.
        windows: Membership of frames in windows (1 or 0), [W, T].
        cells: Membership of patches in cells (1 or 0), [K, N].
        retained: Tokens to include, bool, [B, T, N]; all by default.
        scale: Factor of the features of each sample before the softmax, [B]; 1 by default.
        divergence: Subtract the mean entropy of the tokens of a group (Jensen-Shannon divergence).

    Returns:
        [B, W, N] and [B, T, K], in the dtype of `x`.
    """
    p = torch.softmax(x if scale is None else x * scale.to(x.dtype)[:, None, None, None], dim=-1)
    weight = torch.ones_like(p[..., 0]) if retained is None else retained.to(p.dtype)
    token_entropy = _entropy(p) * weight if divergence else None
    p = p if retained is None else p * weight[..., None]
    windows, cells = windows.to(p.dtype), cells.to(p.dtype)
    window_size = (windows @ weight).clamp_min(1.0)  # [B, W, N]
    mean = (windows @ p.flatten(2)).unflatten(2, p.shape[2:]) / window_size[..., None]
    window_entropy = _entropy(mean)
    cell_size = (weight @ cells.T).clamp_min(1.0)  # [B, T, K]
    cell_entropy = _entropy((cells @ p) / cell_size[..., None])
    if token_entropy is not None:
        window_entropy = window_entropy - (windows @ token_entropy) / window_size
        cell_entropy = cell_entropy - (token_entropy @ cells.T) / cell_size
    return window_entropy, cell_entropy


def _entropy(p: Tensor) -> Tensor:
    return -(p * (p + TINY).log()).sum(-1)
