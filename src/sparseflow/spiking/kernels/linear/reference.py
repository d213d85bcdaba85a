"""What the sparse linear layer computes, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def run_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """`x` [M, K] times `weight` [N, K] transposed, plus `bias` [N]: [M, N], all in `dtype`."""
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
