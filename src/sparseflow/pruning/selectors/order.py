"""Fixed token orders of the random and uniform selectors."""

from __future__ import annotations

import torch
from torch import Tensor


def make_uniform_order(num_tokens: int) -> Tensor:
    """Rank tokens so that the tokens of the highest ranks are spread evenly, int64, [num_tokens].

    Tokens are ranked by the fractional parts of multiples of the golden ratio (a low-discrepancy sequence).
    """
    golden = (5.0**0.5 - 1.0) / 2.0
    return rank_scores(1.0 - (golden * torch.arange(num_tokens, dtype=torch.float64)) % 1.0)


def rank_scores(score: Tensor) -> Tensor:
    """Rank of each score, 0 for the lowest, int64, [n].

    Integers keep their value when the module is cast to half precision.
    """
    return score.argsort().argsort()
