"""Mixture of gated experts in plain torch.

Notation: n tokens x [n, d]; each is sent to k of E experts. Expert e computes y = D_e (silu(G_e x) * U_e x),
where `gate_up[e]` is G_e above U_e, [2 f, d], and `down[e]` is D_e, [d, f]. A token's output is the weighted
sum of its experts' y.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def experts(x: Tensor, expert_ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Apply experts to tokens.

    Args:
        x: Tokens, [n, d], floating.
        expert_ids: Experts of each token, [n, k] int64.
        weights: Weight of each expert's output, [n, k], floating.
        gate_up: [E, 2 f, d], dtype of x.
        down: [E, d, f], dtype of x.

    Returns:
        [n, d], dtype of x.
    """
    rows = []
    for token, indices, scales in zip(x, expert_ids.tolist(), weights.to(x.dtype), strict=True):
        total = torch.zeros_like(token)
        for index, scale in zip(indices, scales, strict=True):
            gate_values, up = (gate_up[index] @ token).chunk(2)
            total = total + scale * (down[index] @ (functional.silu(gate_values) * up))
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)
