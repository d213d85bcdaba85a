"""Networks of the two controller stages.

Notation: b rows, d hidden size of the model, 256 that of the controllers.

1. Stage 1 maps the language feature [b, d] and the encoded budget [b, 256] to logits of the tier [b, 3] and
   of the insertion position [b, 5].
2. The model runs its vision encoder at that tier and the blocks before the insertion.
3. Stage 2 maps the latency token (hidden state of the last prompt token after these blocks, [b, d], which has
   attended to image and question), the budget and the position to logits of top-k [b, 5] and of the block
   count [b, 5]; a position uses as many of these as it has block counts.

Models with fewer tiers, positions, top-k values or counts use the first logits; the others are masked.
Features are standardized by mean and deviation over the training data and normalized per row, so neither the
scale of the model's weights nor the component common to all questions matters.
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
"""Scale of the initial head weights, small so that the initial policy is nearly uniform."""


class FeatureProjection(nn.Module):
    """Standardizes a feature of the model and projects it to the controller width.

    Args:
        width: Hidden size d of the model.
        kinds: Number of feature kinds, each with its own mean and deviation.
    """

    center: Tensor
    scale: Tensor

    def __init__(self, width: int, kinds: int = 1) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(kinds, width))
        self.register_buffer("scale", torch.ones(kinds, width))
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, WIDTH)

    def forward(self, vector: Tensor, kind: Tensor | None = None) -> Tensor:
        """[b, d], and kinds [b] int64 if there are several -> [b, 256]."""
        index = 0 if kind is None else kind
        standardized = (vector.to(self.center) - self.center[index]) / self.scale[index]
        return functional.gelu(self.project(self.norm(standardized)))

    def fit(self, vectors: Tensor) -> None:
        """Set mean and deviation from vectors [kinds, n, d]."""
        values = vectors.to(self.center)
        center, deviation = values.mean(1), values.std(1, correction=0)
        # A constant component carries no information and must not be amplified.
        self.center.copy_(center)
        self.scale.copy_(torch.where(deviation > 1e-6 * center.abs(), deviation, 1.0))


class Stage1(nn.Module):
    """Tier and insertion position from language feature and budget.

    Args:
        width: Hidden size d of the model.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.language = FeatureProjection(width)
        self.budget = nn.Linear(DIM, WIDTH)
        self.fuse = nn.Linear(2 * WIDTH, WIDTH)
        self.tier, self.insertion = nn.Linear(WIDTH, len(TIERS)), nn.Linear(WIDTH, len(POSITIONS))
        _shrink_heads(self.tier, self.insertion)

    def forward(self, language: Tensor, budget: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits.

        Args:
            language: Language features, [b, d].
            budget: Encoded budgets, [b, 256].

        Returns:
            Logits of the tier [b, 3] and of the insertion position [b, 5], not masked.
        """
        parts = torch.cat([self.language(language), functional.gelu(self.budget(budget))], 1)
        fused = functional.gelu(self.fuse(parts))
        return self.tier(fused), self.insertion(fused)


class Stage2(nn.Module):
    """Top-k and block count from latency token, budget and insertion position.

    Args:
        width: Hidden size d of the model.
        options: Existing block counts per insertion position: `PlanSpace.option_mask()`.
    """

    options: Tensor

    def __init__(self, width: int, options: tuple[tuple[bool, ...], ...]) -> None:
        super().__init__()
        self.latency_token = FeatureProjection(width, len(POSITIONS))
        self.budget = nn.Linear(DIM, WIDTH)
        self.position = nn.Embedding(len(POSITIONS), WIDTH)
        self.fuse = nn.Linear(3 * WIDTH, WIDTH)
        self.top_k, self.option = nn.Linear(WIDTH, TOP_KS), nn.Linear(WIDTH, OPTIONS)
        _shrink_heads(self.top_k, self.option)
        self.register_buffer("options", torch.tensor(options), persistent=False)

    def forward(
        self, latency_token: Tensor, budget: Tensor, insertion_position: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute logits.

        Args:
            latency_token: Latency tokens, [b, d].
            budget: Encoded budgets, [b, 256].
            insertion_position: Positions from 1, [b] int64.

        Returns:
            Logits of top-k [b, 5] and of the block count [b, 5]; missing block counts are minus infinity.

        Raises:
            InputError: A position is out of range.
        """
        index = insertion_position - 1
        if bool(((index < 0) | (index >= len(self.options))).any()):
            raise InputError(
                f"`insertion_position` (={insertion_position.tolist()}) must be from 1 to {len(self.options)}"
            )
        token = self.latency_token(latency_token, index)
        parts = torch.cat([token, functional.gelu(self.budget(budget)), self.position(index)], 1)
        fused = functional.gelu(self.fuse(parts))
        option = self.option(fused).masked_fill(~self.options[index], float("-inf"))
        return self.top_k(fused), option


def _shrink_heads(*heads: nn.Linear) -> None:
    for head in heads:
        with torch.no_grad():
            head.weight.mul_(_FIRST_LOGITS)
            assert head.bias is not None
            head.bias.zero_()
