"""Weights and inputs whose sums are exact, for networks of any library."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def set_exact_weights(net: nn.Module, *, gain: float = 3.0, seed: int = 0) -> Any:
    """Set random weights in 1/32 at which the network fires; returns the network in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, (nn.Conv2d, nn.Conv1d, nn.Linear)):
                fan = module.weight[0].numel()
                weight = torch.randn(module.weight.shape, generator=generator) * gain * fan**-0.5
                module.weight.copy_((weight * 32).round() / 32)
                if module.bias is not None:
                    bias = torch.rand(module.bias.shape, generator=generator)
                    module.bias.copy_((bias * 8).round() / 16)
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_var is not None and module.running_mean is not None
                module.eps = 1e-30  # some releases of torch refuse 0
                module.running_var.fill_(4.0)
                module.running_mean.fill_(0.25)
                module.weight.fill_(2.0)
    return net.eval()


def make_exact_input(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random numbers in [-1, 1] in sixteenths."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-16, 17, shape, generator=generator) / 16
