"""Small models whose weights are large enough that everything in them matters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflow.pruning import VideoViT

SIZES: dict[str, Any] = {
    "img_size": 16, "num_frames": 4, "num_classes": 5, "embed_dim": 16, "depth": 4, "num_heads": 4,
    "mlp_ratio": 2.0, "patch_size": 4,
}  # fmt: skip
"""4 frames of 4 x 4 patches: 64 tokens."""


def tiny(ast: dict[str, Any] | None = None, *, seed: int = 0, **others: Any) -> VideoViT:
    """A model as it is made, in evaluation mode; `ast` is its `ast_cfg`, and without it nothing is pruned."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VideoViT(**SIZES | {"use_ast_prune": ast is not None, "ast_cfg": ast} | others).eval()


def awake(ast: dict[str, Any] | None = None, *, seed: int = 0, **others: Any) -> VideoViT:
    """The same with large weights, biases that are not 0, and gates of which about half are closed."""
    model = tiny(ast, seed=seed, **others)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, each in model.named_parameters():
            drawn = torch.randn(each.shape, generator=g)
            if name.startswith("gates"):
                each.copy_(2.0 * drawn)
                each.view(-1)[seed % 2] = -2.0
                each.view(-1)[1 - seed % 2] = 2.0
            elif each.ndim == 2:
                each.copy_(drawn * each.shape[1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                each.copy_(1.0 + 0.2 * drawn)
            else:
                each.copy_(0.5 * drawn)
    return model


def clips(model: VideoViT, batch: int = 2, *, seed: int = 0) -> Tensor:
    """Random clips that a model takes, in its dtype, [B, T, C, H, W]."""
    config, g = model.config, torch.Generator().manual_seed(seed)
    shape = (batch, config.num_frames, config.in_chans, config.img_size, config.img_size)
    return torch.randn(shape, generator=g).to(model.head.weight)


def far(one: Tensor, other: Tensor) -> float:
    """Largest difference, over the largest value."""
    return float((one - other).abs().max().detach() / other.abs().max().detach())
