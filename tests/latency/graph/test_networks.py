"""Networks of the model zoo."""

from __future__ import annotations

import torch
from torch import nn

from sparseflow.latency.graph.networks import normalize_activations


def test_normalize_activations_keeps_activations_normal() -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(40):
        conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        nn.init.normal_(conv.weight, std=0.002)
        layers += [conv, nn.BatchNorm2d(8), nn.ReLU()]
    model, images = nn.Sequential(*layers).eval().requires_grad_(False), torch.randn(2, 8, 8, 8)
    assert model(images).abs().max() < torch.finfo(torch.float32).tiny
    normalize_activations(model, images)
    assert 0.1 < model(images).std() < 10.0
    assert not any(module.training for module in model.modules())
    assert all(module.momentum == 0.1 for module in model if isinstance(module, nn.BatchNorm2d))


def test_normalize_activations_without_any_does_not_run_model() -> None:
    normalize_activations(nn.Linear(3, 3).eval(), torch.empty(0))
