"""Scores of tokens of which an earlier stage dropped some."""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.pruning.selectors.ast import EntropyScore
from sparseflow.pruning.selectors.change import ChangeScore

GridScore = EntropyScore | ChangeScore


def score_partial_grid(score: GridScore, x: Tensor, positions: Tensor) -> Tensor:
    """Score the tokens that are present; the others are restored as absent tokens of the full grid.

    Args:
        score: Score of the full grid of T * N tokens.
        x: Features of the present tokens, [B, S, C].
        positions: Position of each token among the T * N tokens, int64, [B, S].

    Returns:
        [B, S], in the dtype of the score.
    """
    b, s, dim = x.shape
    grid = score.num_frames, score.num_patches
    num_tokens = grid[0] * grid[1]
    if s == num_tokens:
        return score(x.unflatten(1, grid)).flatten(1)
    full = x.new_zeros(b, num_tokens, dim).scatter(1, positions[..., None].expand(-1, -1, dim), x)
    retained = torch.zeros(b, num_tokens, dtype=torch.bool, device=x.device).scatter(1, positions, True)
    return score(full.unflatten(1, grid), retained.unflatten(1, grid)).flatten(1).gather(1, positions)
