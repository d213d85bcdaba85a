"""What the sparse BatchNorm computes, in plain torch."""

from __future__ import annotations

import torch


def run_batchnorm2d_reference(
    x: torch.Tensor,
    mean: torch.Tensor,
    var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` in `dtype`; x [N, C, H, W], the others [C]."""
    mean, var, weight, bias = (t.to(dtype).view(-1, 1, 1) for t in (mean, var, weight, bias))
    return (x.to(dtype) - mean) / (var + eps).sqrt() * weight + bias
