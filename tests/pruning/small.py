"""Configuration of a training that takes a second."""

from __future__ import annotations

from typing import Any

from sparseflow.pruning.config import PruningConfig, parse_config

QUICK: dict[str, Any] = {
    "mode": "ast",
    "model": {
        "img_size": 16, "num_frames": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2,
        "patch_size": 8, "tubelet_size": 2, "drop_rate": 0.1,
    },
    "ast": {"stages": {"1": 0.5}, "keep": {"head": 0.5, "channel": 0.5, "block": 0.9}},
    "data": {"kind": "moving_digits", "train_clips": 48, "test_clips": 20, "clutter": 2},
    "train": {"epochs": 2, "batch_size": 8, "checkpoint_every": 4, "softness_end": 0.05},
}  # fmt: skip
"""12 steps, six per epoch."""


def quick(**changes: Any) -> PruningConfig:
    """The configuration `QUICK` with changes; dictionaries are merged."""
    content = {
        name: value | changes.get(name, {}) if isinstance(value, dict) else changes.get(name, value)
        for name, value in QUICK.items()
    }
    return parse_config(content | {name: changes[name] for name in changes if name not in QUICK})
