"""What plans are expected to take, and which of them fit a budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sparseflow.adaptive.environment import Environment, Outcomes

Costs = Callable[[Environment, Tensor], Tensor]
"""What each plan takes at most, in milliseconds, for samples of an environment: [n] int64 -> [n, plans]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantileCosts:
    """A plan's cost is a quantile of its measured latency, whatever the sample.

    Attributes:
        plans_ms: [plans].
    """

    plans_ms: Tensor

    @classmethod
    def of(cls, outcomes: Outcomes, quantile: float = 0.99) -> QuantileCosts:
        """Over all samples and repeats of a table."""
        return cls(plans_ms=outcomes.quantiles_ms(quantile))

    def __call__(self, environment: Environment, samples: Tensor) -> Tensor:
        return self.plans_ms.expand(len(samples), -1)


def fitting(costs_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """Which plans fit a budget.

    Args:
        costs_ms: [n, plans].
        budget_ms: [n].

    Returns:
        [n, plans] bool; where none fits, the cheapest is taken to, so that there is something to choose.
    """
    fits = costs_ms <= budget_ms[:, None]
    cheapest = costs_ms == costs_ms.min(1, keepdim=True).values
    return fits | (cheapest & ~fits.any(1, keepdim=True))
