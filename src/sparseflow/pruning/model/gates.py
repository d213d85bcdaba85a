"""Learned gates of heads, channels and blocks, soft token masks, and the sparsity loss.

A gate is the sigmoid of a logit, and a unit is multiplied by its gate. Hard gates below the threshold are 0
and the others keep their value, so that `compact` can remove the closed units, multiply the remaining gates
into the weights, and get the same outputs.

For each grain, `L_AST` is the mean squared distance of the gates from their targets: 1 for the widest gates,
as many as the target share, and 0 for the others. A loss that only rewards open gates would open all of them,
and a loss on their mean would leave all half open; this loss is 0 if the target share is open and the rest
closed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparseflow.pruning.model.config import GATED_GRAINS, ASTConfig

_INIT_STD = 0.05
"""Standard deviation of the initial logits; equal logits could only be separated by the task loss."""


class UnitGates(nn.Module):
    """Logits of the gated grains.

    Args:
        config: Configuration; `keep` lists the gated grains.
        depth: Blocks.
        heads: Heads of a block.
        channels: Hidden channels of a block's MLP.

    Attributes:
        logits: Grain -> logits: `"head"` [depth, heads], `"channel"` [depth, channels], `"block"` [depth].
    """

    def __init__(self, config: ASTConfig, *, depth: int, heads: int, channels: int) -> None:
        super().__init__()
        self.config = config
        shapes = {"head": (depth, heads), "channel": (depth, channels), "block": (depth,)}
        mean = math.log(config.gate_init / (1.0 - config.gate_init))
        self.logits = nn.ParameterDict(
            {
                grain: nn.Parameter(mean + _INIT_STD * torch.randn(shapes[grain]))
                for grain in GATED_GRAINS
                if grain in config.keep
            }
        )

    def compute_gates(self, *, hard: bool) -> dict[str, Tensor]:
        """Grain -> gates, shaped as the logits; hard gates below the threshold are 0.

        The widest head and channel of each block stay open; only the gate of the block closes a whole block.
        Gradients pass through closed gates as through open ones (straight-through), so that they can reopen.
        """
        gates = {}
        for grain, logits in self.logits.items():
            gate_values = torch.sigmoid(logits)
            if hard:
                is_open = gate_values >= self.config.threshold
                if grain != "block":
                    is_open = is_open | (gate_values == gate_values.amax(1, keepdim=True))
                gate_values = torch.where(is_open, gate_values, gate_values - gate_values.detach())
            gates[grain] = gate_values
        return gates

    def loss(self) -> Tensor:
        """Sum over grains of the mean squared distance of the gates from their targets, a scalar."""
        terms = []
        for grain, logits in self.logits.items():
            gate_values = torch.sigmoid(logits).flatten()
            num_open = max(1, round(self.config.keep[grain] * len(gate_values)))
            target = torch.zeros_like(gate_values).scatter(0, gate_values.topk(num_open).indices, 1.0)
            terms.append(((gate_values - target) ** 2).mean())
        return torch.stack(terms).sum()

    def compute_sparsity(self) -> dict[str, Tensor]:
        """Grain -> fraction of closed hard gates, scalars."""
        with torch.no_grad():
            return {
                grain: (gate_values == 0.0).float().mean()
                for grain, gate_values in self.compute_gates(hard=True).items()
            }


def make_soft_mask(score: Tensor, num_kept: int, softness: float) -> tuple[Tensor, Tensor]:
    """Compute a differentiable mask that keeps the highest scores, and its logarithm.

    Args:
        score: [B, S]; -inf for tokens that are dropped already.
        num_kept: Tokens of each sample with a mask above 0.5.
        softness: Width of the sigmoid.

    Returns:
        sigmoid((score - threshold) / softness) and its logarithm, [B, S]. The threshold is halfway between
        the `num_kept`-th highest score of the sample and the next one, so that the mask approaches the hard
        mask as the softness approaches 0.
    """
    highest = score.topk(min(num_kept + 1, score.shape[1]), dim=1).values
    lowest_kept = highest[:, num_kept - 1 : num_kept]
    next_score = (
        highest[:, num_kept:] if highest.shape[1] > num_kept else torch.full_like(lowest_kept, float("-inf"))
    )
    threshold = torch.where(
        next_score.isfinite(), (lowest_kept + next_score.nan_to_num(neginf=0.0)) / 2.0, lowest_kept - 1.0
    )
    logits = (score - threshold) / softness
    return torch.sigmoid(logits), nn.functional.logsigmoid(logits)


def compute_sparsity_loss(gates: UnitGates | None, masks: Mapping[int, Tensor], config: ASTConfig) -> Tensor:
    """Compute `L_AST`: the gate loss plus the squared error of the mean soft mask of each stage, a scalar.

    Args:
        gates: Gates of units, if any.
        masks: Block -> soft mask, [B, S].
        config: Target shares and strength.
    """
    terms = [] if gates is None else [gates.loss()]
    terms += [(mask.mean() - config.stages[block]) ** 2 for block, mask in masks.items()]
    return config.strength * torch.stack(terms).sum() if terms else torch.zeros(())
