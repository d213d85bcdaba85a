"""The four choices that make a plan, one after the other: tier, insertion position, top-k, count of blocks.

All plans stand in a grid [tier, position, top-k, option] of the widest model; a smaller one leaves cells
empty. What is allowed at a step is what some allowed plan still goes through, given the steps before: so a
path never ends nowhere, and its probability is the product of the four masked ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparseflow.adaptive.categorical import draw, entropy, masked, taken
from sparseflow.adaptive.plan import OPTIONS, POSITIONS, TIERS, TOP_KS, Action, PlanSpace
from sparseflow.errors import InputError, PlanError

SHAPE = (len(TIERS), len(POSITIONS), TOP_KS, OPTIONS)


class Choices:
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

    def to(self, device: torch.device) -> Choices:
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
            raise PlanError(f"{Action(*wrong)} is the action of no plan: this model has fewer choices")
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


class Path:
    """Rows on their way through the grid: what they chose, and how likely that was.

    Args:
        masks: Of `Choices.masks`.
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
