"""Rotary position embedding as in Llama, in plain torch: x cos + rotated(x) sin, with split halves."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    Args:
        query: [batch, heads, tokens, d], floating, d even.
        key: [batch, key heads, tokens, d], same dtype.
        cosine: [batch or 1, tokens, d], same dtype.
        sine: Like `cosine`.

    Returns:
        Rotated query and key, with unchanged shapes.
    """
    rotated = []
    for x in (query, key):
        low, high = x.chunk(2, dim=-1)
        rotated.append(x * cosine[:, None] + torch.cat([-high, low], dim=-1) * sine[:, None])
    return rotated[0], rotated[1]
