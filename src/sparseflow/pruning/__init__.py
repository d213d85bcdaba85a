"""Pruning: a video transformer that drops what says little, and is really smaller for it.

::

    from sparseflow.pruning import VideoViT
    from sparseflow.pruning import compact
    model = VideoViT(224, 8, 101, 768, 12, 12, 4, 16, use_ast_prune=True, ast_cfg={"stages": {3: 0.5}})
    logits, info = model(clips, return_intermediate=True)   # [B, T, C, H, W]
    fast = compact(model)
"""

from __future__ import annotations

from sparseflow.pruning.compaction.compact import compact
from sparseflow.pruning.compaction.saved_model import load, save
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.model.pretrained import load_pretrained, video_vit_for
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.selectors.ast import ScoreConfig

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
