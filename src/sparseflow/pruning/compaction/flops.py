"""FLOPs of a model for one clip.

Only matrix products are counted, with a multiply-add as two operations; all other operations are about one
percent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from sparseflow.pruning.model.blocks import TransformerBlock
from sparseflow.pruning.model.config import ATTENTION_SELECTORS
from sparseflow.pruning.model.video_vit import VideoViT
from sparseflow.pruning.selectors.ast import EntropyScore
from sparseflow.pruning.selectors.learned import LearnedScore
from sparseflow.pruning.selectors.tokens import count_kept_tokens

Amount = TypeVar("Amount", int, Tensor)
"""Number of units; a tensor if gates determine it."""


@dataclass(frozen=True, kw_only=True)
class BlockWork:
    """Sizes of one block in the forward pass of one clip.

    Attributes:
        block: Index of the block.
        num_heads: Heads; 0 in a removed block.
        attention_width: Width of all heads together.
        channels: Hidden channels; 0 in a removed block.
        has_stage: Whether a stage precedes the block.
        selection_flops: FLOPs of the token selector of that stage.
        selection_weights: Learned weights of that token selector.
        num_prefix: Prefix tokens at the input of the block, after its stage.
        num_kept: Grid tokens at the input of the block, after its stage.
    """

    block: int
    num_heads: int
    attention_width: int
    channels: int
    has_stage: bool
    selection_flops: int
    selection_weights: int
    num_prefix: int
    num_kept: int

    @property
    def num_tokens(self) -> int:
        return self.num_prefix + self.num_kept


def list_block_work(model: VideoViT, *, dropped: bool) -> Iterator[BlockWork]:
    """Yield the work of each block; `dropped` says whether stages remove tokens or only mask them."""
    total = model.config.num_tokens
    num_prefix, num_kept = int(model.config.pool == "cls"), total
    for index, block in enumerate(model.blocks):
        assert isinstance(block, TransformerBlock)
        has_stage = model.ast is not None and index in model.ast.stages
        selection_flops, selection_weights = 0, 0
        if model.ast is not None and has_stage:
            num_after = count_kept_tokens(model.ast.stages[index], total)
            selection_flops = _count_selection_flops(model, index, num_kept, num_after, num_prefix)
            if model.ast.selector == "dynamic_vit":
                selection_weights = sum(
                    weight.numel() for weight in _get_learned_score(model, index).parameters()
                )
            num_prefix += int(model.ast.merge and model.ast.selector != "tome")
            # ToMe merges tokens in every mode and has no mask.
            num_kept = num_after if dropped or model.ast.selector == "tome" else total
        attention, mlp = block.attention, block.mlp
        yield BlockWork(
            block=index,
            num_heads=0 if attention is None else attention.num_heads,
            attention_width=0 if attention is None else attention.num_heads * attention.head_dim,
            channels=0 if mlp is None else mlp.up.out_features,
            has_stage=has_stage,
            selection_flops=selection_flops,
            selection_weights=selection_weights,
            num_prefix=num_prefix,
            num_kept=num_kept,
        )


def projection_flops(num_tokens: int, dim: int, width: Amount) -> Amount:
    """FLOPs of the linear layers of an attention whose heads have `width` together."""
    return 2 * num_tokens * dim * 4 * width


def attention_flops(num_tokens: int, width: Amount) -> Amount:
    """FLOPs of the two matrix products of an attention."""
    return 2 * 2 * num_tokens * num_tokens * width


def mlp_flops(num_tokens: int, dim: int, channels: Amount) -> Amount:
    """FLOPs of the two linear layers of an MLP."""
    return 2 * 2 * num_tokens * dim * channels


def count_flops(model: VideoViT) -> dict[str, int]:
    """Count the FLOPs of a forward pass of one clip in evaluation mode.

    Masked tokens of a model that is not compact cost as much as others.

    Returns:
        `"patch"`, `"linear"` (projections of attention), `"attention"` (its two products), `"mlp"`,
        `"stage"` (token selectors), `"head"` and `"total"`.
    """
    config, dim = model.config, model.config.embed_dim
    flops = dict.fromkeys(("patch", "linear", "attention", "mlp", "stage", "head"), 0)
    flops["patch"] = 2 * config.num_tokens * model.patch.in_features * dim
    flops["head"] = 2 * dim * config.num_classes
    for work in list_block_work(model, dropped=model.compacted):
        flops["stage"] += work.selection_flops
        flops["linear"] += projection_flops(work.num_tokens, dim, work.attention_width)
        flops["attention"] += attention_flops(work.num_tokens, work.attention_width)
        flops["mlp"] += mlp_flops(work.num_tokens, dim, work.channels)
    return flops | {"total": sum(flops.values())}


def _get_learned_score(model: VideoViT, index: int) -> LearnedScore:
    assert model.pruner is not None and model.pruner.learned_scores is not None
    score = model.pruner.learned_scores[str(index)]
    assert isinstance(score, LearnedScore)
    return score


def _count_selection_flops(
    model: VideoViT, index: int, num_before: int, num_after: int, num_prefix: int
) -> int:
    """FLOPs of the token selector of a stage that reduces the grid tokens to `num_after`."""
    assert model.ast is not None
    config, selector, block = model.config, model.ast.selector, model.blocks[index]
    assert isinstance(block, TransformerBlock)
    if selector == "ast":
        assert isinstance(model.score, EntropyScore)
        windows, cells = (len(model.score.get_buffer(name)) for name in ("windows", "cells"))
        return 2 * config.embed_dim * model.score.num_frames * model.score.num_patches * (windows + cells)
    if selector == "dynamic_vit":
        return _get_learned_score(model, index).count_flops(num_before)
    if selector in ATTENTION_SELECTORS:
        assert block.attention is not None
        width = block.attention.num_heads * block.attention.head_dim
        num_tokens = num_prefix + num_before
        flops = 2 * num_tokens * config.embed_dim * 3 * width
        if selector != "tome":
            num_queries = 1 if selector == "attention" and config.pool == "cls" else num_tokens
            return flops + 2 * num_queries * num_tokens * width
        while num_before > num_after:
            flops += 2 * (-(-num_before // 2)) * (num_before // 2) * block.attention.head_dim
            num_before -= min(num_before - num_after, num_before // 2)
        return flops
    return 0
