"""Pruning of video transformers: tokens, attention heads, MLP channels and blocks.

::

    from sparseflow.pruning import VideoViT, compact
    model = VideoViT(224, 8, 101, 768, 12, 12, 4, 16, use_ast_prune=True, ast_cfg={"stages": {3: 0.5}})
    logits, info = model(clips, return_intermediate=True)   # [B, T, C, H, W]
    fast = compact(model)

`selectors` chooses tokens, `model` has the transformer and its gates, `compaction` removes what is pruned,
`patching` prunes tokens of models of transformers and timm,
`data` reads videos, `evaluation` measures accuracy and latency, and `training` trains and compares models.
`config` reads YAML configurations; `api` works on model files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseflow.core.lazy import attach

if TYPE_CHECKING:
    from sparseflow.pruning.compaction.compact import compact
    from sparseflow.pruning.compaction.layered_model import LayeredVideoViT
    from sparseflow.pruning.compaction.saved_model import load_model, save_model
    from sparseflow.pruning.config import PruningConfig, read_config
    from sparseflow.pruning.data.cache import build_cache
    from sparseflow.pruning.data.datasets import VideoDataset, load_video_dataset
    from sparseflow.pruning.evaluation.profile import VideoViTProfile, profile_video_vit
    from sparseflow.pruning.model.ast_pruner import ASTPruner
    from sparseflow.pruning.model.config import ASTConfig
    from sparseflow.pruning.model.pretrained import build_from_pretrained, load_pretrained
    from sparseflow.pruning.model.video_vit import VideoViT
    from sparseflow.pruning.patching.families import ModelFamily, PatchAdapter
    from sparseflow.pruning.patching.patch import PatchResult, get_kept_positions, patch, unpatch
    from sparseflow.pruning.selectors.ast import ScoreConfig
    from sparseflow.pruning.training.train import train

__all__ = [
    "ASTConfig",
    "ASTPruner",
    "LayeredVideoViT",
    "ModelFamily",
    "PatchAdapter",
    "PatchResult",
    "PruningConfig",
    "ScoreConfig",
    "VideoDataset",
    "VideoViT",
    "VideoViTProfile",
    "build_cache",
    "build_from_pretrained",
    "compact",
    "get_kept_positions",
    "load_model",
    "load_pretrained",
    "load_video_dataset",
    "patch",
    "profile_video_vit",
    "read_config",
    "save_model",
    "train",
    "unpatch",
]

__getattr__, __dir__ = attach(
    __name__,
    {
        "compaction.compact": ["compact"],
        "compaction.layered_model": ["LayeredVideoViT"],
        "compaction.saved_model": ["load_model", "save_model"],
        "config": ["PruningConfig", "read_config"],
        "data.cache": ["build_cache"],
        "data.datasets": ["VideoDataset", "load_video_dataset"],
        "evaluation.profile": ["VideoViTProfile", "profile_video_vit"],
        "model.ast_pruner": ["ASTPruner"],
        "model.config": ["ASTConfig"],
        "model.pretrained": ["build_from_pretrained", "load_pretrained"],
        "model.video_vit": ["VideoViT"],
        "patching.families": ["ModelFamily", "PatchAdapter"],
        "patching.patch": ["PatchResult", "get_kept_positions", "patch", "unpatch"],
        "selectors.ast": ["ScoreConfig"],
        "training.train": ["train"],
    },
)
