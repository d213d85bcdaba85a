"""How many operations a model takes for one clip.

Those of its matrix products, a multiplication and an addition counted as two. Everything else is of the order
of a percent, and is left out, as is usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from sparseflow.pruning.model.blocks import Block
from sparseflow.pruning.model.config import BY_HEADS
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.selectors import tokens as steps

Amount = TypeVar("Amount", int, Tensor)
"""How many units there are; a tensor where gates say so."""


@dataclass(frozen=True, kw_only=True)
class BlockPass:
    """What one block does in a forward pass over one clip.

    Attributes:
        at: Its number.
        heads: Heads; 0 where the block was removed.
        wide: Width of all heads together.
        channels: Hidden channels; 0 where the block was removed.
        staged: Whether a stage stands before it.
        stage: Operations of what says which tokens stay.
        front: Tokens in front of the grid's as the block begins, after its stage.
        left: Tokens of the grid, likewise.
    """

    at: int
    heads: int
    wide: int
    channels: int
    staged: bool
    stage: int
    front: int
    left: int

    @property
    def tokens(self) -> int:
        """What its halves see."""
        return self.front + self.left


def passes(model: VideoViT, *, gone: bool) -> Iterator[BlockPass]:
    """Blocks in order; `gone` says whether tokens that stages drop are."""
    total = model.config.tokens
    front, left = int(model.config.pool == "cls"), total
    for at, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        staged, stage = model.ast is not None and at in model.ast.stages, 0
        if model.ast is not None and staged:
            kept = steps.count(model.ast.stages[at], total)
            stage = _stage(model, block, left, kept, front)
            front += int(model.ast.merge and model.ast.selector != "tome")
            # ToMe has no mask: what it merges is merged.
            left = kept if gone or model.ast.selector == "tome" else total
        heads = 0 if block.attention is None else block.attention.heads
        yield BlockPass(
            at=at, heads=heads, wide=0 if block.attention is None else heads * block.attention.head_dim,
            channels=0 if block.perceptron is None else block.perceptron.up.out_features,
            staged=staged, stage=stage, front=front, left=left,
        )  # fmt: skip


def projections(tokens: int, dim: int, wide: Amount) -> Amount:
    """Operations of an attention's two layers, with heads `wide` together."""
    return 2 * tokens * dim * 4 * wide


def products(tokens: int, wide: Amount) -> Amount:
    """Operations of an attention's two products."""
    return 2 * 2 * tokens * tokens * wide


def perceptrons(tokens: int, dim: int, channels: Amount) -> Amount:
    """Operations of a perceptron's two layers."""
    return 2 * 2 * tokens * dim * channels


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
    config, dim = model.config, model.config.embed_dim
    found = dict.fromkeys(("patch", "linear", "attention", "perceptron", "stage", "head"), 0)
    found["patch"] = 2 * config.tokens * model.patch.in_features * dim
    found["head"] = 2 * dim * config.num_classes
    for each in passes(model, gone=model.compacted if dropped is None else dropped):
        found["stage"] += each.stage
        found["linear"] += projections(each.tokens, dim, each.wide)
        found["attention"] += products(each.tokens, each.wide)
        found["perceptron"] += perceptrons(each.tokens, dim, each.channels)
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
