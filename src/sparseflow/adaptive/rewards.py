"""What a choice is worth: accuracy, less a price for overrunning the budget; and who sets the price.

    reward = accuracy − multiplier · violation(latency / budget)

    violation(u) = 0                                   for u <= 1: the budget is there to be used
                 = 1 + excess · min(u − 1, 1)          for u > 1

A step at the budget, because late is late, and a bounded slope behind it, so that where every choice
overruns, the one that overruns least is still the best. Faster within the budget earns nothing.

The multiplier is that of the Lagrangian of "as accurate as can be, with violations in at most a given share":
dual ascent raises it while more are late, and lowers it while fewer are (Altman, Constrained Markov Decision
Processes, 1999, chapter 6, for the principle). It counts violations, not how long they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Reward:
    """The shape of a reward.

    Attributes:
        excess: What being twice as late as allowed adds to the price of being late at all; 0 or more.
    """

    excess: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.excess < math.inf:
            raise InputError(f"`excess` (={self.excess}) must be 0 or more: a longer overrun is not cheaper")

    def violation(self, latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
        """How much a budget was overrun: 0, or from 1 to 1 + excess. Of the shapes' common one."""
        share = latency_ms / budget_ms
        return (share > 1.0) * (1.0 + self.excess * (share - 1.0).clamp(0.0, 1.0))

    def __call__(self, accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, multiplier: float) -> Tensor:
        """Rewards.

        Args:
            accuracy: Scores of answers, from 0 to 1.
            latency_ms: What they took.
            budget_ms: What they might take, above 0.
            multiplier: Price of a violation, 0 or more.
        """
        return accuracy - multiplier * self.violation(latency_ms, budget_ms)


@dataclass(kw_only=True)
class Multiplier:
    """The price of a violation, which follows the share of them.

    Attributes:
        value: The price now.
        asked: Share of violations that is allowed.
        rate: By how much the price changes for each violation too many in every request.
        most: Highest price. An answer is worth at most 1, so at 10 none pays for being late every tenth time.
    """

    value: float = 1.0
    asked: float = 0.01
    rate: float = 0.5
    most: float = 10.0

    def __post_init__(self) -> None:
        if not (0.0 <= self.asked < 1.0 and self.rate >= 0.0 and 0.0 <= self.value <= self.most < math.inf):
            raise InputError(
                f"a multiplier needs `asked` (={self.asked}) of 0 to below 1, `rate` (={self.rate}) of 0 or "
                f"more, and `value` (={self.value}) from 0 to `most` (={self.most})"
            )

    def update(self, violations: float) -> None:
        """One step of dual ascent.

        Args:
            violations: Share of requests that overran their budget.
        """
        self.value = min(max(self.value + self.rate * (violations - self.asked), 0.0), self.most)
