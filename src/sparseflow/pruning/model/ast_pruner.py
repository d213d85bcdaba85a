"""AST2.0-lite v2: token scores, soft masks, and gates of heads, channels and blocks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparseflow.core.checks import check_at_least
from sparseflow.errors import InputError
from sparseflow.pruning.model.config import ASTConfig
from sparseflow.pruning.model.gates import UnitGates, compute_sparsity_loss, make_soft_mask
from sparseflow.pruning.selectors.ast import EntropyScore
from sparseflow.pruning.selectors.change import CHANGE_MEASURES, ChangeScore
from sparseflow.pruning.selectors.learned import LearnedScore
from sparseflow.pruning.selectors.partial_grid import GridScore, score_partial_grid
from sparseflow.pruning.selectors.tokens import (
    TokenState,
    count_kept_tokens,
    make_uniform_order,
    mask_top_tokens,
    rank_scores,
    score_by_order,
)


class ASTPruner(nn.Module):
    """Decides which tokens, heads, channels and blocks of a video transformer are used.

    Calling it gives the mask of one stage::

        pruner = ASTPruner(ASTConfig(stages={3: 0.5}, keep={"head": 0.75}), grid=(8, 14, 14), depth=12,
                           num_heads=12, mlp_channels=3072)
        mask = pruner(features, share=0.5)            # [B, T, N], soft in training
        gates = pruner.compute_gates(hard=False)      # {"head": [depth, num_heads]}
        loss = pruner.compute_loss({3: mask.flatten(1)})

    Args:
        config: Stages, selector, score and gates.
        grid: Tokens in time, rows and columns.
        depth: Blocks.
        num_heads: Heads of a block.
        mlp_channels: Hidden channels of a block's MLP.
        dim: Channels of a token; needed for the selector `"dynamic_vit"` only.

    Attributes:
        score: Multi-level score over time, space and Voronoi regions, or the change since the previous frame;
            None for other selectors.
        learned_scores: Learned score of each stage, by the number of its block, for the selector
            `"dynamic_vit"`; None for other selectors.
        gates: Gates of the grains in `config.keep`; None without them.
    """

    def __init__(
        self,
        config: ASTConfig,
        *,
        grid: tuple[int, int, int],
        depth: int,
        num_heads: int,
        mlp_channels: int,
        dim: int = 0,
    ) -> None:
        super().__init__()
        self.config = config
        self.gates: UnitGates | None = None
        self.score: GridScore | None = None
        self.learned_scores: nn.ModuleDict | None = None
        frames, rows, columns = grid
        num_tokens = frames * rows * columns
        if config.keep:
            self.gates = UnitGates(config, depth=depth, heads=num_heads, channels=mlp_channels)
        if config.selector == "ast" and config.stages:
            self.score = EntropyScore(frames, (rows, columns), config.score)
        if config.selector in CHANGE_MEASURES:
            self.score = ChangeScore(frames, (rows, columns), config.selector)
        if config.selector == "dynamic_vit" and config.stages:
            check_at_least(2, dim=dim)
            self.learned_scores = nn.ModuleDict({str(block): LearnedScore(dim) for block in config.stages})
        if config.selector == "random":
            # Evaluation drops the same tokens of every sample, so that it is reproducible.
            self.register_buffer("order", rank_scores(torch.rand(num_tokens)))
        if config.selector == "uniform":
            self.register_buffer("order", make_uniform_order(num_tokens))

    def forward(
        self, x: Tensor, share: float, retained: Tensor | None = None, *, softness: float | None = None
    ) -> Tensor:
        """Compute the mask of a stage from features.

        Args:
            x: Features, [B, T, N, C].
            share: Share of all tokens to keep.
            retained: Tokens that are still present, bool, [B, T, N]; all by default.
            softness: Width of a soft mask; that of the configuration by default.

        Returns:
            [B, T, N]: in training a soft mask, above 0.5 for the kept tokens; in evaluation 1 or 0.

        Raises:
            InputError: The selector has no score that all stages share.
        """
        if self.score is None:
            raise InputError(
                f"the selector {self.config.selector} has no score that all stages share; use `ast`"
            )
        score = self.score(x, retained)
        if retained is not None:
            score = score.masked_fill(~retained, float("-inf"))
        flat = score.flatten(1)
        num_kept = count_kept_tokens(share, flat.shape[1])
        softness = self.config.softness if softness is None else softness
        if self.training and softness > 0.0:
            return make_soft_mask(flat, num_kept, softness)[0].view_as(score)
        return mask_top_tokens(flat, num_kept).to(score.dtype).view_as(score)

    def score_tokens(self, tokens: TokenState, block: int) -> Tensor:
        """Score of each grid token by a selector without attention, [B, S], for the stage before a block."""
        selector = self.config.selector
        if selector in ("random", "uniform"):
            is_random = selector == "random" and self.training
            return score_by_order(self.get_buffer("order"), tokens.positions, is_random=is_random)
        if self.learned_scores is not None:
            return self.learned_scores[str(block)](tokens.grid, tokens.retained)
        score = self.score
        assert score is not None
        if tokens.retained is None:
            return score_partial_grid(score, tokens.grid, tokens.positions)
        grid = score.num_frames, score.num_patches
        return score(tokens.grid.unflatten(1, grid), tokens.retained.unflatten(1, grid)).flatten(1)

    def compute_gates(self, *, hard: bool) -> dict[str, Tensor]:
        """Grain -> gates, see `UnitGates.compute_gates`; empty without gates."""
        return {} if self.gates is None else self.gates.compute_gates(hard=hard)

    def compute_loss(self, masks: Mapping[int, Tensor]) -> Tensor:
        """Compute `L_AST` from the soft mask, [B, S], of each stage."""
        return compute_sparsity_loss(self.gates, masks, self.config)
