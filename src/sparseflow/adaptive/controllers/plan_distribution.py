"""The four choices that make a plan, one after the other: tier, insertion position, top-k, count of blocks.

All plans stand in a grid [tier, position, top-k, option] of the widest model; a smaller one leaves cells
empty. What is allowed at a step is what some allowed plan still goes through, given the steps before: so a
path never ends nowhere, and its probability is the product of the four masked ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.adaptive.plan.space import OPTIONS, POSITIONS, TIERS, TOP_KS, PlanAction, PlanSpace
from sparseflow.errors import InputError, PlanError, RunError


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits of which only those that are allowed can be chosen.

    Args:
        logits: [..., choices]; those of masked ones may be minus infinity already, or anything.
        allowed: [..., choices] bool.

    Returns:
        [..., choices]; minus infinity where masked.

    Raises:
        InputError: A row allows nothing.
        RunError: A logit that is allowed is not finite.
    """
    if not bool(allowed.any(-1).all()):
        raise InputError("a mask allows no choice at all; allow at least one, such as the cheapest")
    if not bool(logits.masked_fill(~allowed, 0.0).isfinite().all()):
        raise RunError(
            "logits are not finite: the controllers' weights, or the features that they see, are not"
        )
    return logits.masked_fill(~allowed, float("-inf"))


def log_probs(logits: Tensor, allowed: Tensor) -> Tensor:
    """Log-probabilities of choices; shapes and errors are those of `masked`."""
    return masked(logits, allowed).log_softmax(-1)


def entropy(log_prob: Tensor) -> Tensor:
    """Entropy in nats over the last dimension; what is masked adds nothing, and its gradient is 0."""
    # 0 · (−inf) is NaN; 0 · 0 is what is meant.
    return -(log_prob.exp() * log_prob.masked_fill(log_prob == float("-inf"), 0.0)).sum(-1)


def draw(log_prob: Tensor, uniform: Tensor) -> Tensor:
    """One choice a row.

    Args:
        log_prob: [rows, choices].
        uniform: [rows], from 0 to below 1, what is drawn from; the same numbers give the same choices.

    Returns:
        [rows] int64; never a masked one.
    """
    below = log_prob.detach().double().exp().cumsum(-1)
    total = below[:, -1]
    # Rounded up to the total itself, it would lie beyond the last choice.
    at = torch.minimum(uniform.to(below) * total, torch.nextafter(total, torch.zeros_like(total)))
    return (below <= at[:, None]).sum(-1)


def taken(values: Tensor, choice: Tensor) -> Tensor:
    """The values of what was chosen: [rows, choices] and [rows] -> [rows]."""
    return values.gather(-1, choice[:, None])[:, 0]


SHAPE = (len(TIERS), len(POSITIONS), TOP_KS, OPTIONS)


class PlanDistribution:
    """The plans of a space as paths through the grid.

    Args:
        space: The plans; their numbers are the places in `space.plans`.

    Attributes:
        grid: The number of the plan in each cell, -1 where there is none: int64, of `SHAPE`.
        actions: The cell of each plan: [plans, 4] int64.
    """

    def __init__(self, space: PlanSpace) -> None:
        found = [space.action(plan) for plan in space.plans]
        self.actions = torch.tensor([[one.tier, one.position, one.top_k, one.option] for one in found])
        self.grid = torch.full(SHAPE, -1)
        self.grid[tuple(self.actions.T)] = torch.arange(len(found))

    def to(self, device: torch.device) -> PlanDistribution:
        """The same, on a device."""
        if self.grid.device != device:
            self.grid, self.actions = self.grid.to(device), self.actions.to(device)
        return self

    def plans(self, action: Tensor) -> Tensor:
        """Numbers of plans: [rows, 4] -> [rows].

        Raises:
            PlanError: An action is no plan's.
        """
        found = self.grid[tuple(action.T)]
        if bool((found < 0).any()):
            wrong = action[found < 0][0].tolist()
            raise PlanError(f"{PlanAction(*wrong)} is the action of no plan: this model has fewer choices")
        return found

    def masks(self, allowed: Tensor | None = None) -> tuple[Tensor, ...]:
        """What can be chosen at each step, given the steps before.

        Args:
            allowed: [rows, plans] bool; by default all plans, in one row.

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
    """Rows on their way through the grid: what they chose, and how likely that was.

    Args:
        masks: Of `PlanDistribution.masks`.
        rows: [n] int64, which row of the masks each row here goes by.

    Attributes:
        chosen: The choices so far, each [n] int64.
        log_prob: Joint log-probability of these: [n].
        entropy: Sum of the entropies of the steps, in nats: [n].
    """

    def __init__(self, masks: tuple[Tensor, ...], rows: Tensor) -> None:
        self._masks, self._rows = masks, rows
        self.chosen: list[Tensor] = []
        self.log_prob: Tensor | float = 0.0
        self.entropy: Tensor | float = 0.0

    def follow(self, choice: Tensor) -> None:
        """Take a choice that was made before, whose probability does not matter here."""
        self.chosen.append(choice)

    def lead(self, logits: Tensor) -> None:
        """Make the most probable choice, whose probability does not matter here.

        Args:
            logits: [n, choices]; of equal ones the first is taken.
        """
        self.chosen.append(masked(logits, self._allowed()).argmax(-1))

    def step(self, logits: Tensor, *, choice: Tensor | None = None, uniform: Tensor | None = None) -> None:
        """Make the next choice, and weigh it.

        Args:
            logits: [n, choices].
            choice: [n], what was chosen before, to see how likely it is now.
            uniform: [n] in [0, 1), to draw from; without either the most probable is taken.
        """
        scores = masked(logits, self._allowed())
        found = scores.log_softmax(-1)
        if choice is None:
            choice = scores.argmax(-1) if uniform is None else draw(found, uniform)
        self.log_prob = self.log_prob + taken(found, choice)
        self.entropy = self.entropy + entropy(found)
        self.chosen.append(choice)

    def _allowed(self) -> Tensor:
        """What can be chosen next: [n, choices] bool."""
        return self._masks[len(self.chosen)][(self._rows, *self.chosen)]
