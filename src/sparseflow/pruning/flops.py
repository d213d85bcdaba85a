"""How many operations a model takes for one clip.

Those of its matrix products, a multiplication and an addition counted as two. Everything else is of the order
of a percent, and is left out, as is usual.
"""

from __future__ import annotations

from sparseflow.pruning import tokens as steps
from sparseflow.pruning.blocks import Block
from sparseflow.pruning.config import BY_HEADS
from sparseflow.pruning.video_vit import VideoViT


def flops(model: VideoViT, *, dropped: bool | None = None) -> dict[str, int]:
    """Operations of a forward pass over one clip, in evaluation mode.

    Args:
        model: The model.
        dropped: Whether tokens that stages drop are gone; by default, whether the model is compact. Where
            they are only masked they cost as much as ever.

    Returns:
        `"patch"`, `"linear"` (projections of attention), `"attention"` (its two products), `"perceptron"`,
        `"stage"` (what says which tokens stay), `"head"`, and `"total"`.
    """
    config = model.config
    dim, total = config.embed_dim, config.tokens
    gone = model.compacted if dropped is None else dropped
    found = dict.fromkeys(("patch", "linear", "attention", "perceptron", "stage", "head"), 0)
    found["patch"] = 2 * total * model.patch.in_features * dim
    found["head"] = 2 * dim * config.num_classes
    front, left = int(config.pool == "cls"), total
    for at, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if model.ast is not None and at in model.ast.stages:
            kept = steps.count(model.ast.stages[at], total)
            found["stage"] += _stage(model, block, left, kept, front)
            front += int(model.ast.merge and model.ast.selector != "tome")
            # ToMe has no mask: what it merges is merged.
            left = kept if gone or model.ast.selector == "tome" else total
        tokens = front + left
        if block.attention is not None:
            wide = block.attention.heads * block.attention.head_dim
            found["linear"] += 2 * tokens * dim * 4 * wide
            found["attention"] += 2 * 2 * tokens * tokens * wide
        if block.perceptron is not None:
            found["perceptron"] += 2 * 2 * tokens * dim * block.perceptron.up.out_features
    return found | {"total": sum(found.values())}


def _stage(model: VideoViT, block: Block, left: int, kept: int, front: int) -> int:
    """Of what says which tokens stay."""
    assert model.ast is not None
    config, selector = model.config, model.ast.selector
    if selector == "ast":
        assert model.score is not None
        windows, cells = (len(model.score.get_buffer(name)) for name in ("windows", "cells"))
        t, n = model.score.frames, model.score.patches
        return 2 * config.embed_dim * t * n * (windows + cells)
    if selector in BY_HEADS:
        assert block.attention is not None
        wide = block.attention.heads * block.attention.head_dim
        found = 2 * (front + left) * config.embed_dim * 3 * wide
        if selector == "attention":
            queries = 1 if config.pool == "cls" else front + left
            return found + 2 * queries * (front + left) * wide
        while left > kept:
            found += 2 * (-(-left // 2)) * (left // 2) * block.attention.head_dim
            left -= min(left - kept, left // 2)
        return found
    return 0
