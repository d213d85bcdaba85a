"""A mixture of gated experts, in plain torch.

Notation: n tokens x [n, d]; each goes to k of E experts. Expert e is y = D_e (silu(G_e x) * U_e x), where
`gate_up[e]` holds G_e above U_e, [2 f, d], and `down[e]` holds D_e, [d, f]. A token's output is the sum of
its experts' y, each times its weight.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Send tokens through their experts.

    Args:
        x: Tokens, [n, d], floating.
        chosen: Experts of each token, [n, k] int64.
        weights: What each expert's output is multiplied by, [n, k] floating.
        gate_up: [E, 2 f, d], of x's dtype.
        down: [E, d, f], of x's dtype.

    Returns:
        [n, d], of x's dtype.
    """
    rows = []
    for token, indices, scales in zip(x, chosen.tolist(), weights.to(x.dtype), strict=True):
        total = torch.zeros_like(token)
        for index, scale in zip(indices, scales, strict=True):
            gate, up = (gate_up[index] @ token).chunk(2)
            total = total + scale * (down[index] @ (functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows) if rows else torch.zeros_like(x)
