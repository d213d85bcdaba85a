"""Pruning: a video transformer that drops what says little, and is really smaller for it.

::

    from sparseflow.pruning import VideoViT, compact
    model = VideoViT(224, 8, 101, 768, 12, 12, 4, 16, use_ast_prune=True, ast_cfg={"stages": {3: 0.5}})
    logits, info = model(clips, return_intermediate=True)   # [B, T, C, H, W]
    fast = compact(model)
"""

from __future__ import annotations

from sparseflow.pruning.compact import compact
from sparseflow.pruning.config import ASTConfig
from sparseflow.pruning.entropy import ScoreConfig
from sparseflow.pruning.saved import load, save
from sparseflow.pruning.video_vit import VideoViT
from sparseflow.pruning.weights import load_pretrained, video_vit_for

__all__ = [
    "ASTConfig",
    "ScoreConfig",
    "VideoViT",
    "compact",
    "load",
    "load_pretrained",
    "save",
    "video_vit_for",
]
