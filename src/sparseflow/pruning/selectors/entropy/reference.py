"""Entropies of windows in time and of cells in space, in plain torch; differentiable.

Notation: x is [B, T, N, C]; p = softmax over C of x / temperature; a part is a set of tokens of one patch (a
window of frames) or of one frame (a cell of patches), and its distribution is the mean of its tokens' p.
Tokens that are not there are left out; a part without any has the distribution 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-12
"""Added to probabilities before the logarithm."""


def entropies(
    x: Tensor,
    windows: Tensor,
    cells: Tensor,
    there: Tensor | None = None,
    *,
    temperature: float = 1.0,
    divergence: bool = False,
) -> tuple[Tensor, Tensor]:
    """The entropy of each window and of each cell.

    Args:
        x: Features, [B, T, N, C], float32 or wider.
        windows: 1 where a frame is in a window, else 0, [W, T].
        cells: 1 where a patch is in a cell, else 0, [K, N].
        there: bool, [B, T, N]; by default all are.
        temperature: Of the softmax.
        divergence: Take the mean entropy of a part's tokens off that of their mean.

    Returns:
        [B, W, N] and [B, T, K], in x's dtype.
    """
    p = torch.softmax(x / temperature, dim=-1)
    weight = torch.ones_like(p[..., 0]) if there is None else there.to(p.dtype)
    own = _entropy(p) * weight if divergence else None
    p = p if there is None else p * weight[..., None]
    windows, cells = windows.to(p.dtype), cells.to(p.dtype)
    count = (windows @ weight).clamp_min(1.0)  # [B, W, N]
    mean = (windows @ p.flatten(2)).unflatten(2, p.shape[2:]) / count[..., None]
    in_time = _entropy(mean)
    area = (weight @ cells.T).clamp_min(1.0)  # [B, T, K]
    in_space = _entropy((cells @ p) / area[..., None])
    if own is not None:
        in_time = in_time - (windows @ own) / count
        in_space = in_space - (own @ cells.T) / area
    return in_time, in_space


def _entropy(p: Tensor) -> Tensor:
    return -(p * (p + TINY).log()).sum(-1)
