"""Distribution over plans, factorized into tier, insertion position, top-k and block count.

Plans form a grid [tier, position, top-k, option] of the largest model; smaller models leave cells empty. A
choice is allowed if some allowed plan is consistent with it and the earlier choices. Every path therefore
ends at an allowed plan, and its probability is the product of the four masked probabilities.
"""

from __future__ import annotations

from dataclasses import astuple

import torch
from torch import Tensor

from sparseflow.adaptive.plan.space import OPTIONS, POSITIONS, TIERS, TOP_KS, PlanAction, PlanSpace
from sparseflow.errors import InputError, PlanError, RunError


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """Set the logits of choices that are not allowed to minus infinity.

    Args:
        logits: [..., choices]; masked ones may have any value.
        allowed: [..., choices] bool.

    Returns:
        [..., choices].

    Raises:
        InputError: A row allows nothing.
        RunError: The logit of an allowed choice is not finite.
    """
    if not bool(allowed.any(-1).all()):
        raise InputError("a mask allows no choice; allow at least the cheapest")
    if not bool(logits.masked_fill(~allowed, 0.0).isfinite().all()):
        raise RunError("logits are not finite; check the controllers' weights and the features")
    return logits.masked_fill(~allowed, float("-inf"))


def compute_entropy(log_prob: Tensor) -> Tensor:
    """Entropy in nats over the last dimension; masked choices add 0 and have gradient 0."""
    # Avoids 0 · (−inf) = NaN.
    return -(log_prob.exp() * log_prob.masked_fill(log_prob == float("-inf"), 0.0)).sum(-1)


def sample_categorical(log_prob: Tensor, uniform: Tensor) -> Tensor:
    """Sample one choice per row by inverse transform.

    Args:
        log_prob: [rows, choices].
        uniform: Uniform numbers in [0, 1), [rows].

    Returns:
        [rows] int64; never a masked choice.
    """
    below = log_prob.detach().double().exp().cumsum(-1)
    total = below[:, -1]
    # A threshold rounded up to the total would select a choice after the last.
    threshold = torch.minimum(uniform.to(below) * total, torch.nextafter(total, torch.zeros_like(total)))
    return (below <= threshold[:, None]).sum(-1)


SHAPE = (len(TIERS), len(POSITIONS), TOP_KS, OPTIONS)


class PlanDistribution:
    """The plans of a space as paths through the grid.

    Args:
        space: The plans; plan numbers are indices into `space.plans`.

    Attributes:
        grid: Plan number of each cell, -1 for empty cells, int64 of shape `SHAPE`.
        actions: Cell of each plan, [plans, 4] int64.
    """

    def __init__(self, space: PlanSpace) -> None:
        self.actions = torch.tensor([astuple(space.action(plan)) for plan in space.plans])
        self.grid = torch.full(SHAPE, -1)
        self.grid[tuple(self.actions.T)] = torch.arange(len(self.actions))

    def to(self, device: torch.device) -> PlanDistribution:
        """Move to a device."""
        if self.grid.device != device:
            self.grid, self.actions = self.grid.to(device), self.actions.to(device)
        return self

    def plans(self, action: Tensor) -> Tensor:
        """Plan numbers: [rows, 4] -> [rows].

        Raises:
            PlanError: An action has no plan.
        """
        plans = self.grid[tuple(action.T)]
        if bool((plans < 0).any()):
            wrong = action[plans < 0][0].tolist()
            raise PlanError(f"{PlanAction(*wrong)} has no plan in this model")
        return plans

    def masks(self, allowed: Tensor | None = None) -> tuple[Tensor, ...]:
        """Compute the allowed choices of each step, given the earlier ones.

        Args:
            allowed: Allowed plans, [rows, plans] bool; default: all plans, as one row.

        Returns:
            For step i a bool tensor [rows, *SHAPE[: i + 1]].

        Raises:
            InputError: The shape is wrong, or a row allows no plan.
        """
        if allowed is None:
            cells = (self.grid >= 0)[None]
        else:
            if allowed.ndim != 2 or allowed.shape[1] != len(self.actions):
                raise InputError(
                    f"`allowed` must be [rows, {len(self.actions)} plans], not {list(allowed.shape)}"
                )
            if not bool(allowed.any(1).all()):
                raise InputError("a row of `allowed` allows no plan; allow at least the cheapest")
            cells = torch.zeros(len(allowed), *SHAPE, dtype=torch.bool, device=allowed.device)
            cells[(slice(None), *self.actions.T)] = allowed
        return cells.any((2, 3, 4)), cells.any((3, 4)), cells.any(4), cells


class PlanPath:
    """Partial paths of n rows through the grid, with their log-probability.

    Args:
        masks: Result of `PlanDistribution.masks`.
        rows: Row of the masks for each path, [n] int64.

    Attributes:
        choices: Choices made, each [n] int64; given choices are appended directly.
        log_prob: Their joint log-probability, [n].
        entropy: Sum of the entropies of the steps in nats, [n].
    """

    def __init__(self, masks: tuple[Tensor, ...], rows: Tensor) -> None:
        self._masks, self._rows = masks, rows
        self.choices: list[Tensor] = []
        self.log_prob: Tensor | float = 0.0
        self.entropy: Tensor | float = 0.0

    def step(self, logits: Tensor, *, choice: Tensor | None = None, uniform: Tensor | None = None) -> None:
        """Append a choice and its log-probability.

        Args:
            logits: [n, choices].
            choice: Choice to evaluate, [n].
            uniform: Uniform numbers in [0, 1) to sample with, [n]; without either, the most probable choice
                is made.
        """
        scores = mask_logits(logits, self._masks[len(self.choices)][(self._rows, *self.choices)])
        log_probs = scores.log_softmax(-1)
        if choice is None:
            choice = scores.argmax(-1) if uniform is None else sample_categorical(log_probs, uniform)
        self.log_prob = self.log_prob + log_probs.gather(-1, choice[:, None])[:, 0]
        self.entropy = self.entropy + compute_entropy(log_probs)
        self.choices.append(choice)
