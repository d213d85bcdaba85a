"""Policies that choose a plan for a request: controllers, baselines and the oracle.

The baselines need only a table of outcomes: plans can be enumerated, so the best plan for every budget can be
tabulated, which is a strong baseline. The oracle uses information that is unknown at decision time and gives
an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.controllers.budget_encoding import check_budgets
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import OutcomeTable, find_feasible
from sparseflow.core.checks import check_positive
from sparseflow.errors import InputError

_BLOCK = 2048
"""Requests processed at a time, to bound memory."""
_TIE = 1e-6


class Policy(Protocol):
    """Chooses plans.

    Attributes:
        name: Name in tables of results.
    """

    @property
    def name(self) -> str: ...

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        """Choose plans for requests.

        Args:
            outcomes: Table of the requests; only the oracle reads its scores and latencies.
            samples: [n] int64.
            budgets_ms: [n].

        Returns:
            Plan numbers, [n] int64.

        Raises:
            InputError: A budget is NaN or not above 0.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LookupTablePolicy:
    """The plan with the highest mean accuracy that fits the budget.

    Attributes:
        accuracy: Mean score of each plan, [plans].
        costs_ms: Latency bound of each plan, [plans].
    """

    accuracy: Tensor
    costs_ms: Tensor
    name: str = "lookup table"

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        fits = find_feasible(self.costs_ms, check_budgets(budgets_ms))
        return argmax_with_ties(self.accuracy.expand_as(fits), fits, -self.costs_ms.expand_as(fits))


@dataclass(frozen=True, kw_only=True)
class StaticPolicy:
    """One plan for all requests and budgets.

    Attributes:
        plan: Plan number.
    """

    plan: int
    name: str = "best static plan"

    @classmethod
    def from_outcomes(
        cls, outcomes: OutcomeTable, budgets_ms: Tensor, *, attainment: float = 0.0
    ) -> StaticPolicy:
        """Select the plan with the highest goodput.

        Args:
            outcomes: Table to select by.
            budgets_ms: Budgets, equally frequent.
            attainment: Required fraction of requests in time; if no plan reaches it, the one with the highest
                fraction is selected.
        """
        timely = torch.zeros_like(outcomes.correct)
        for budget in check_budgets(budgets_ms):
            timely += fraction_in_time(outcomes.latency_ms, budget) / len(budgets_ms)
        attained, right = timely.mean(0), (timely * outcomes.correct).mean(0)
        enough = attained >= min(attainment, float(attained.max()))
        return cls(
            plan=int(argmax_with_ties(right[None], enough[None], -outcomes.latency_quantiles_ms(0.5)[None]))
        )

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        check_budgets(budgets_ms)
        return torch.full((len(samples),), self.plan)


@dataclass(frozen=True, kw_only=True)
class RandomPolicy:
    """A random plan that fits.

    Attributes:
        costs_ms: Latency bound of each plan, [plans].
        seed: Random seed; the same requests get the same plans.
    """

    costs_ms: Tensor
    seed: int = 0
    name: str = "random"

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        fits = find_feasible(self.costs_ms, check_budgets(budgets_ms))
        random_scores = np.random.default_rng(self.seed).random(tuple(fits.shape), np.float32)
        return torch.from_numpy(random_scores).masked_fill(~fits, -1.0).argmax(1)


@dataclass(frozen=True, kw_only=True)
class OraclePolicy:
    """The best plan given each request's scores and latencies; an upper bound of goodput.

    Attributes:
        prefer: Preference among equally good plans, [plans]; default: the faster one.
    """

    prefer: Tensor | None = None
    name: str = "oracle"

    def choose(
        self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor, *, allowed: Tensor | None = None
    ) -> Tensor:
        """Choose plans for requests; see `Policy.choose`.

        Args:
            outcomes: Table of the requests.
            samples: [n] int64.
            budgets_ms: [n].
            allowed: Plans that may be chosen, [n, plans] bool; default: all.
        """
        check_budgets(budgets_ms)
        mask_all = (
            torch.ones(len(samples), len(outcomes.space), dtype=torch.bool) if allowed is None else allowed
        )
        plans = []
        blocks = (samples.split(_BLOCK), budgets_ms.split(_BLOCK), mask_all.split(_BLOCK))
        for block, budgets, mask in zip(*blocks, strict=True):
            latency_ms = outcomes.latency_ms[block]
            timely = fraction_in_time(latency_ms, budgets[:, None, None])
            prefer = () if self.prefer is None else (self.prefer.expand(len(block), -1),)
            good = outcomes.correct[block] * timely
            plans.append(argmax_with_ties(good, mask, timely, *prefer, -latency_ms.mean(2)))
        return torch.cat(plans)


@dataclass(frozen=True, kw_only=True)
class ControllerPolicy:
    """The controllers' most probable plan.

    Attributes:
        controllers: Controllers of the model that the outcomes belong to.
        costs_ms: Latency bound of each plan, [plans]; plans above the budget are masked. None masks nothing.
    """

    controllers: Controllers
    costs_ms: Tensor | None = None
    name: str = "controllers"

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        if outcomes.space != self.controllers.space:
            raise InputError(
                "the controllers choose among other plans than the outcomes have; train them again"
            )
        plans = []
        with torch.no_grad():
            for block, budgets in zip(samples.split(_BLOCK), budgets_ms.split(_BLOCK), strict=True):
                allowed = None if self.costs_ms is None else find_feasible(self.costs_ms, budgets)
                choice = self.controllers.choose(
                    outcomes.get_language(block), budgets,
                    lambda rows, tiers, positions, block=block: outcomes.get_latency_tokens(
                        block[rows.cpu()], tiers.cpu(), positions.cpu()
                    ),
                    allowed=allowed,
                )  # fmt: skip
                plans.append(choice.plan.cpu())
        return torch.cat(plans)


@dataclass(frozen=True, kw_only=True)
class MarginPolicy:
    """A policy that is given a fraction of each budget, to leave room for jitter.

    Attributes:
        policy: The policy.
        margin: The fraction; above 1 if the policy alone is more conservative than required.
        met: Whether it reached the target attainment on the validation split.
    """

    policy: Policy
    margin: float
    met: bool = True

    def __post_init__(self) -> None:
        check_positive(margin=self.margin)

    @property
    def name(self) -> str:
        return self.policy.name

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        return self.policy.choose(outcomes, samples, check_budgets(budgets_ms) * self.margin)


def argmax_with_ties(values: Tensor, allowed: Tensor, *ties: Tensor) -> Tensor:
    """Allowed plan with the highest value; ties are broken by the values in `ties`, in order.

    Args:
        values: [n, plans].
        allowed: [n, plans] bool, at least one per row.
        ties: Tie breakers, [n, plans] each.

    Returns:
        [n] int64; the first of plans that are equal in everything.
    """
    candidates = allowed
    for scores in (values, *ties):
        masked = scores.masked_fill(~candidates, float("-inf"))
        top = masked.max(1, keepdim=True).values
        # Sums in another order may differ by rounding and count as equal.
        candidates = candidates & (masked >= top - _TIE * top.abs())
    return candidates.float().argmax(1)


def fraction_in_time(latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """Fraction of measured latencies within a budget: [..., repeats] -> [...] float32."""
    return (latency_ms <= budget_ms).float().mean(-1)
