"""Small models with large weights, so that every part affects the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparseflow.pruning import VideoViT

SIZES: dict[str, Any] = {
    "img_size": 16, "num_frames": 4, "num_classes": 5, "embed_dim": 16, "depth": 4, "num_heads": 4,
    "mlp_ratio": 2.0, "patch_size": 4,
}  # fmt: skip
"""4 frames of 4 x 4 patches: 64 tokens."""


def tiny(ast: dict[str, Any] | None = None, *, seed: int = 0, **arguments: Any) -> VideoViT:
    """A newly initialized model in evaluation mode; `ast` is its `ast_cfg`, None for no pruning."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VideoViT(**SIZES | {"use_ast_prune": ast is not None, "ast_cfg": ast} | arguments).eval()


def awake(ast: dict[str, Any] | None = None, *, seed: int = 0, **arguments: Any) -> VideoViT:
    """A tiny model with large weights, non-zero biases, and about half of the gates closed."""
    model = tiny(ast, seed=seed, **arguments)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=g)
            if name.startswith("pruner.gates"):
                parameter.copy_(2.0 * noise)
                parameter.view(-1)[seed % 2] = -2.0
                parameter.view(-1)[1 - seed % 2] = 2.0
            elif parameter.ndim == 2:
                parameter.copy_(noise * parameter.shape[1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.copy_(1.0 + 0.2 * noise)
            else:
                parameter.copy_(0.5 * noise)
    return model


def clips(model: VideoViT, batch: int = 2, *, seed: int = 0) -> Tensor:
    """Random clips for a model in its dtype, [B, T, C, H, W]."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn((batch, *model.config.clip_shape), generator=g).to(model.head.weight)


def far(actual: Tensor, other: Tensor) -> float:
    """Largest difference divided by the largest value."""
    return float((actual - other).abs().max().detach() / other.abs().max().detach())


def check_static_shapes(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Backend of torch.compile that runs a graph as it is, and refuses symbolic sizes."""
    for node in graph.graph.nodes:
        value = node.meta.get("example_value")
        sizes = list(value.shape) if isinstance(value, Tensor) else [value]
        assert not any(isinstance(size, torch.SymInt | torch.SymFloat) for size in sizes), node
    return graph.forward
