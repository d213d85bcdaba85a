"""Rotary positions as Llama's family writes them, in plain torch: x cos + rotated(x) sin, halves apart."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their places.

    Args:
        query: [batch, heads, tokens, d], floating, d even.
        key: [batch, key heads, tokens, d], of the same dtype.
        cosine: [batch or 1, tokens, d], of the same dtype.
        sine: As `cosine`.

    Returns:
        Both, shaped as they were.
    """
    found = []
    for x in (query, key):
        low, high = x.chunk(2, dim=-1)
        found.append(x * cosine[:, None] + torch.cat([-high, low], dim=-1) * sine[:, None])
    return found[0], found[1]
