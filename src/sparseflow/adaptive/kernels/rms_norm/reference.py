"""Root-mean-square normalisation as Llama's family writes it, in plain torch.

y = w * round(x / sqrt(mean(x²) + eps)): the mean and the quotient in float32, the quotient rounded to x's
dtype before it is multiplied by the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: [..., d], floating.
        weight: [d], of x's dtype.
        eps: Added to the mean square.

    Returns:
        As x.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
