"""RMS normalization as in Llama, in plain torch.

y = w * round(x / sqrt(mean(x²) + eps)): mean and quotient in float32; the quotient is rounded to x's dtype
before the multiplication with the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension.

    Args:
        x: [..., d], floating.
        weight: [d], dtype of x.
        eps: Added to the mean square.

    Returns:
        Shape and dtype of x.
    """
    row_width = x.float()
    scale = torch.rsqrt(row_width.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (row_width * scale).to(x.dtype)
