"""Small configuration, images and models for tests of Grid-VQA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.adaptive.grid_vqa.config import VqaConfig
from sparseflow.adaptive.grid_vqa.images import SPLITS, ImageBank
from sparseflow.core.config import apply_overrides

QUICK: dict[str, Any] = {
    "scene": {"grid": 2, "cell_px": 12},
    "model": {
        "crop_px": 8, "patch_px": 4, "vision_width": 16, "vision_depth": 1, "vision_heads": 2,
        "vision_mlp": 2, "width": 16, "depth": 4, "heads": 2, "experts": 4, "expert_width": 8, "top_k": 3,
    },
    "train": {
        "vision_steps": 3, "steps": 5, "batch_size": 4, "eval_every": 2, "eval_samples": 8,
        "checkpoint_every": 2,
    },
    "test_samples": 12,
}  # fmt: skip
"""Configuration of 8 steps, of which three train the vision tower."""


def quick(**changes: Any) -> VqaConfig:
    """`QUICK` with overrides: `quick(**{"train.steps": 2})`."""
    return VqaConfig.model_validate(apply_overrides(QUICK, changes))


def bank(names: int = 4, images_per_name: int = 6, side: int = 32, seed: int = 0) -> ImageBank:
    """Random images, equally many of each name in every split."""
    random = np.random.default_rng(seed)
    positions = np.arange(names * images_per_name).reshape(names, len(SPLITS), -1)
    return ImageBank(
        images=random.integers(0, 256, (names * images_per_name, 3, side, side), np.uint8),
        labels=np.repeat(np.arange(names), images_per_name),
        names=("cat", "one", "two", "dog", "three", "four")[:names],
        splits={split: tuple(positions[:, index]) for index, split in enumerate(SPLITS)},
        flips=(True, False, False, True, False, False)[:names],
    )


def untrained(folder: Path, settings: VqaConfig) -> Path:
    """Write a model with random weights into a directory and return it."""
    import torch

    from sparseflow.adaptive.grid_vqa.dataset import VqaDataset
    from sparseflow.adaptive.grid_vqa.model import build_vqa_model, save_vqa_model

    data = VqaDataset(settings)
    torch.manual_seed(0)
    save_vqa_model(build_vqa_model(settings, data.vocabulary), settings, data.vocabulary, folder)
    return folder


def loud(model: Any, seed: int = 0) -> Any:
    """Convert to float64 with large weights, so that every block, expert and pixel affects the output."""
    import torch

    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.copy_(torch.randn(value.shape, generator=random) * (1.0 if "embed" in name else 0.4))
    model.model.language_model.set_experts_implementation("eager")
    return model.double().eval()
