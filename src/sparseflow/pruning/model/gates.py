"""Gates of heads, channels and blocks: what is learnt to be left out, and the loss that drives it.

A gate is the sigmoid of a logit. A unit is multiplied by its gate; where gates are hard, those below the
threshold are 0 and the others keep their value, so that a network with hard gates can be cut to the units
that are left, their gates multiplied into weights, and computes the same.

`L_AST` is, for every grain, the mean squared distance of gates from where they are to be: at 1 those that are
widest now, as many as are to be kept, and at 0 the others. A loss that only rewards open gates would open all
of them, and one on their mean would leave all half open; this one is 0 where that share is open and the rest
is closed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparseflow.pruning.model.config import ASTConfig

_SPREAD = 0.05
"""Standard deviation of first logits: were all alike, nothing but the task would tell them apart."""


class UnitGates(nn.Module):
    """Logits of the grains that are gated.

    Args:
        config: `keep` names the grains.
        depth: Blocks.
        heads: Heads of a block.
        channels: Hidden channels of a block's perceptron.

    Attributes:
        logits: Grain -> logits: `"head"` [depth, heads], `"channel"` [depth, channels], `"block"` [depth].
    """

    def __init__(self, config: ASTConfig, *, depth: int, heads: int, channels: int) -> None:
        super().__init__()
        self.config = config
        shapes = {"head": (depth, heads), "channel": (depth, channels), "block": (depth,)}
        middle = math.log(config.gate_init / (1.0 - config.gate_init))
        self.logits = nn.ParameterDict(
            {
                grain: nn.Parameter(middle + _SPREAD * torch.randn(shapes[grain]))
                for grain in shapes
                if grain in config.keep
            }
        )

    def values(self, *, hard: bool) -> dict[str, Tensor]:
        """Grain -> gates, shaped as its logits; hard ones below the threshold are 0.

        The widest head and channel of a block stay open: it is for the block's own gate to close it.
        Gradients pass through a closed gate as through an open one, so that it can open again.
        """
        found = {}
        for grain, logits in self.logits.items():
            gate = torch.sigmoid(logits)
            if hard:
                stays = gate >= self.config.threshold
                if grain != "block":
                    stays = stays | (gate == gate.amax(1, keepdim=True))
                gate = torch.where(stays, gate, gate - gate.detach())
            found[grain] = gate
        return found

    def loss(self) -> Tensor:
        """Sum over grains of the mean of (gate - 1)^2 over those to keep and of gate^2 over the others."""
        parts = []
        for grain, logits in self.logits.items():
            gate = torch.sigmoid(logits).flatten()
            kept = max(1, round(self.config.keep[grain] * len(gate)))
            target = torch.zeros_like(gate).scatter(0, gate.topk(kept).indices, 1.0)
            parts.append(((gate - target) ** 2).mean())
        return torch.stack(parts).sum()

    def sparsity(self) -> dict[str, Tensor]:
        """Grain -> share of gates that are closed where they are hard, scalars."""
        with torch.no_grad():
            return {grain: (gate == 0.0).float().mean() for grain, gate in self.values(hard=True).items()}


def soft_mask(score: Tensor, kept: int, softness: float) -> tuple[Tensor, Tensor]:
    """The mask that stands for keeping the best, and its logarithm.

    Args:
        score: [B, S]; -inf where nothing is left.
        kept: How many have a mask above 0.5 in each sample.
        softness: Width of the step.

    Returns:
        sigmoid((score - threshold) / softness) and its logarithm, [B, S]; the threshold lies halfway between
        the sample's `kept`-th highest score and the next, so that a narrow step leaves what a hard one does.
    """
    highest = score.topk(min(kept + 1, score.shape[1]), dim=1).values
    last = highest[:, kept - 1 : kept]
    after = highest[:, kept:] if highest.shape[1] > kept else torch.full_like(last, float("-inf"))
    threshold = torch.where(after.isfinite(), (last + after.nan_to_num(neginf=0.0)) / 2.0, last - 1.0)
    at = (score - threshold) / softness
    return torch.sigmoid(at), nn.functional.logsigmoid(at)


def drive(gates: UnitGates | None, masks: Mapping[int, Tensor], config: ASTConfig) -> Tensor:
    """`L_AST`: that of gates, and the squared distance of each stage's mean soft mask from its share.

    Args:
        gates: Gates of units, if there are any.
        masks: Block -> soft mask, [B, S], of S tokens in all.
        config: Shares and strength.
    """
    parts = [] if gates is None else [gates.loss()]
    parts += [(mask.mean() - config.stages[block]) ** 2 for block, mask in masks.items()]
    return config.strength * torch.stack(parts).sum() if parts else torch.zeros(())
