"""The networks of the two controllers.

Notation: b rows, d the width of the model, 256 that of the controllers.

1. Stage 1 sees the question's language feature [b, d] and the encoded budget [b, 256]. Each becomes 256 wide;
   both together give logits of the tier [b, 3] and of the insertion position [b, 5].
2. The model runs its vision encoder at this tier and the blocks before the insertion.
3. Stage 2 sees the latency token, which is the hidden state of the last prompt token after these blocks [b,
   d] and has looked at image and question by then; the budget; and the position. It gives logits of knob 2,
   top-k [b, 5], and of knob 3, the count of blocks [b, 5], of which a position has as many as are left to
   choose among.

A model with fewer tiers, positions, values of top-k or counts uses the first logits; the others are masked.
Features are put on one scale first, by means and deviations of the data that the controllers are fitted to,
and by a normalisation of each row: neither the scale of a model's weights nor what all questions have in
common matters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparseflow.adaptive.controllers.budget_encoding import DIM
from sparseflow.adaptive.plan.space import OPTIONS, POSITIONS, TIERS, TOP_KS
from sparseflow.errors import InputError

WIDTH = 256
_FIRST_LOGITS = 0.01
"""Scale of a head's first weights: a policy begins by trying everything."""


class FeatureProjection(nn.Module):
    """A vector of the model, put on one scale and made as wide as the controllers.

    Args:
        width: Of the model, d.
        kinds: Kinds of vectors, each with a mean and deviations of its own.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, width: int, kinds: int = 1) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(kinds, width))
        self.register_buffer("spread", torch.ones(kinds, width))
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, WIDTH)

    def forward(self, vector: Tensor, kind: Tensor | None = None) -> Tensor:
        """[b, d], and [b] int64 where there are several kinds -> [b, 256]."""
        at = 0 if kind is None else kind
        even = (vector.to(self.centre) - self.centre[at]) / self.spread[at]
        return functional.gelu(self.project(self.norm(even)))

    def fit(self, vectors: Tensor) -> None:
        """Take means and deviations from vectors, [kinds, n, d]."""
        given = vectors.to(self.centre)
        centre, deviation = given.mean(1), given.std(1, correction=0)
        # What never changes says nothing, and must not be blown up.
        self.centre.copy_(centre)
        self.spread.copy_(torch.where(deviation > 1e-6 * centre.abs(), deviation, 1.0))


class Stage1(nn.Module):
    """Tier and insertion position from question and budget.

    Args:
        width: Of the model, d.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.language = FeatureProjection(width)
        self.budget = nn.Linear(DIM, WIDTH)
        self.fuse = nn.Linear(2 * WIDTH, WIDTH)
        self.tier, self.insertion = nn.Linear(WIDTH, len(TIERS)), nn.Linear(WIDTH, len(POSITIONS))
        _quiet(self.tier, self.insertion)

    def forward(self, language: Tensor, budget: Tensor) -> dict[str, Tensor]:
        """Logits.

        Args:
            language: [b, d].
            budget: [b, 256], encoded.

        Returns:
            `"tier_logits"` [b, 3] and `"insertion_logits"` [b, 5]; what the model does not have is not
            masked.
        """
        parts = torch.cat([self.language(language), functional.gelu(self.budget(budget))], 1)
        fused = functional.gelu(self.fuse(parts))
        return {"tier_logits": self.tier(fused), "insertion_logits": self.insertion(fused)}


class Stage2(nn.Module):
    """Top-k and count of blocks from latency token, budget and insertion position.

    Args:
        width: Of the model, d.
        options: For each insertion position, which of the five counts there are: `PlanSpace.options()`.
    """

    options: Tensor

    def __init__(self, width: int, options: tuple[tuple[bool, ...], ...]) -> None:
        super().__init__()
        self.latency_token = FeatureProjection(width, len(POSITIONS))
        self.budget = nn.Linear(DIM, WIDTH)
        self.position = nn.Embedding(len(POSITIONS), WIDTH)
        self.fuse = nn.Linear(3 * WIDTH, WIDTH)
        self.top_k, self.option = nn.Linear(WIDTH, TOP_KS), nn.Linear(WIDTH, OPTIONS)
        _quiet(self.top_k, self.option)
        self.register_buffer("options", torch.tensor(options), persistent=False)

    def forward(self, latency_token: Tensor, budget: Tensor, insertion_position: Tensor) -> dict[str, Tensor]:
        """Logits.

        Args:
            latency_token: [b, d].
            budget: [b, 256], encoded.
            insertion_position: [b] int64, from 1.

        Returns:
            `"top_k_logits"` [b, 5] and `"option_logits"` [b, 5]; counts that the position does not have are
            minus infinity.

        Raises:
            InputError: The model has no such position.
        """
        at = insertion_position - 1
        if bool(((at < 0) | (at >= len(self.options))).any()):
            raise InputError(
                f"`insertion_position` (={insertion_position.tolist()}) must be from 1 to {len(self.options)}"
            )
        token = self.latency_token(latency_token, at)
        parts = torch.cat([token, functional.gelu(self.budget(budget)), self.position(at)], 1)
        fused = functional.gelu(self.fuse(parts))
        option = self.option(fused).masked_fill(~self.options[at], float("-inf"))
        return {"top_k_logits": self.top_k(fused), "option_logits": option}


def _quiet(*heads: nn.Linear) -> None:
    for head in heads:
        with torch.no_grad():
            head.weight.mul_(_FIRST_LOGITS)
            assert head.bias is not None
            head.bias.zero_()
