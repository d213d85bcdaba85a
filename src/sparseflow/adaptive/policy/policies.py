"""Policies: how a plan is chosen for a request and its budget. All of them answer the same call.

The rivals of controllers need nothing but a table of outcomes: since plans can be listed, so can the best one
for every budget, which is hard to beat. The oracle looks at what it should not know and tells how far there
is to go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.controllers.budget_encoding import checked
from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import Costs, OutcomeTable, QuantileLatencies, fitting
from sparseflow.errors import InputError

_BLOCK = 2048
"""Requests that are looked at together, for memory's sake."""
_TIE = 1e-6


class Policy(Protocol):
    """Chooses plans.

    Attributes:
        name: As a table of results calls it.
    """

    @property
    def name(self) -> str: ...

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        """Plans for requests.

        Args:
            outcomes: Where the requests are from; only the oracle looks at its scores and times.
            samples: [n] int64.
            budgets_ms: [n].

        Returns:
            Numbers of plans: [n] int64.

        Raises:
            InputError: A budget is NaN, 0 or less.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class LookupTablePolicy:
    """The plan that is right most often of those that fit the budget, whatever is asked.

    Attributes:
        accuracy: Mean score of each plan on what it was made from: [plans].
        costs: What plans take.
    """

    accuracy: Tensor
    costs: Costs
    name: str = "lookup table"

    @classmethod
    def of(cls, outcomes: OutcomeTable, *, quantile: float = 0.99) -> LookupTablePolicy:
        """From a table, with a plan fitting where this quantile of its measured latency does."""
        return cls(accuracy=outcomes.correct.mean(0), costs=QuantileLatencies.of(outcomes, quantile))

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        costs_ms = self.costs(outcomes, samples)
        fits = fitting(costs_ms, checked(budgets_ms))
        return best(self.accuracy.expand(len(samples), -1), fits, -costs_ms)


@dataclass(frozen=True, kw_only=True)
class StaticPolicy:
    """One plan for all requests, whatever their budgets.

    Attributes:
        plan: Its number.
    """

    plan: int
    name: str = "best static plan"

    @classmethod
    def of(cls, outcomes: OutcomeTable, budgets_ms: Tensor, *, attainment: float = 0.0) -> StaticPolicy:
        """The plan that is right and in time most often.

        Args:
            outcomes: What it is chosen by.
            budgets_ms: That will be asked for, each as often.
            attainment: Share of requests that must be in time; where no plan is, the timeliest is taken.
        """
        timely = torch.zeros_like(outcomes.correct)
        for budget in checked(budgets_ms):
            timely += in_time(outcomes.latency_ms, budget) / len(budgets_ms)
        attained, right = timely.mean(0), (timely * outcomes.correct).mean(0)
        enough = attained >= min(attainment, float(attained.max()))
        return cls(plan=int(best(right[None], enough[None], -outcomes.quantiles_ms(0.5)[None])))

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        checked(budgets_ms)
        return torch.full((len(samples),), self.plan)


@dataclass(frozen=True, kw_only=True)
class RandomPolicy:
    """Any plan that fits.

    Attributes:
        costs: What plans take.
        seed: What it draws from; the same requests get the same plans.
    """

    costs: Costs
    seed: int = 0
    name: str = "random"

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        fits = fitting(self.costs(outcomes, samples), checked(budgets_ms))
        drawn = np.random.default_rng(self.seed).random(tuple(fits.shape), np.float32)
        return torch.from_numpy(drawn).masked_fill(~fits, -1.0).argmax(1)


@dataclass(frozen=True, kw_only=True)
class OraclePolicy:
    """Knows each request's score and measured times under every plan: no policy is right and in time more
    often.

    Attributes:
        prefer: Worth of each plan, [plans], by which it chooses among equally good ones; by default the
            faster wins.
    """

    prefer: Tensor | None = None
    name: str = "oracle"

    def choose(
        self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor, *, allowed: Tensor | None = None
    ) -> Tensor:
        """As `Policy`.

        Args:
            outcomes: As there.
            samples: As there.
            budgets_ms: As there.
            allowed: Plans that it may take, [n, plans] bool; by default all.
        """
        checked(budgets_ms)
        may = torch.ones(len(samples), len(outcomes.space), dtype=torch.bool) if allowed is None else allowed
        found = []
        blocks = (samples.split(_BLOCK), budgets_ms.split(_BLOCK), may.split(_BLOCK))
        for some, budgets, mask in zip(*blocks, strict=True):
            latency_ms = outcomes.latency_ms[some]
            timely = in_time(latency_ms, budgets[:, None, None])
            prefer = () if self.prefer is None else (self.prefer.expand(len(some), -1),)
            good = outcomes.correct[some] * timely
            found.append(best(good, mask, timely, *prefer, -latency_ms.mean(2)))
        return torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class ControllerPolicy:
    """Controllers choose, the most probable plan each time.

    Attributes:
        controllers: Of the model that the outcomes are of.
        costs: What plans take: those beyond the budget are masked. None leaves it to the controllers alone.
    """

    controllers: Controllers
    costs: Costs | None = None
    name: str = "controllers"

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        if outcomes.space != self.controllers.space:
            raise InputError(
                "these controllers choose among other plans than the outcomes are of; train them anew"
            )
        found = []
        with torch.no_grad():
            for some, budgets in zip(samples.split(_BLOCK), budgets_ms.split(_BLOCK), strict=True):
                allowed = None if self.costs is None else fitting(self.costs(outcomes, some), budgets)
                choice = self.controllers.choose(
                    outcomes.language_of(some), budgets,
                    lambda rows, tiers, positions, some=some: outcomes.tokens_of(
                        some[rows.cpu()], tiers.cpu(), positions.cpu()
                    ),
                    allowed=allowed,
                )  # fmt: skip
                found.append(choice.plan.cpu())
        return torch.cat(found)


@dataclass(frozen=True, kw_only=True)
class ImitationPolicy(ControllerPolicy):
    """Controllers that learnt the oracle's plans by cross-entropy alone: `train` with 0 steps of GRPO."""

    name: str = "supervised on oracle"


@dataclass(frozen=True, kw_only=True)
class MarginPolicy:
    """A policy that is shown a share of each budget only, so that it keeps what is left for jitter.

    Attributes:
        policy: The policy.
        margin: The share; above 1 where the policy alone is more careful than asked.
        met: Whether the validation split had the attainment that was asked for with it.
    """

    policy: Policy
    margin: float
    met: bool = True
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.margin < float("inf"):
            raise InputError(f"`margin` (={self.margin}) must be a share of the budget, above 0")
        object.__setattr__(self, "name", self.name or self.policy.name)

    def choose(self, outcomes: OutcomeTable, samples: Tensor, budgets_ms: Tensor) -> Tensor:
        return self.policy.choose(outcomes, samples, checked(budgets_ms) * self.margin)


def best(values: Tensor, allowed: Tensor, *ties: Tensor) -> Tensor:
    """The allowed plan of the highest value; of equal ones, that of the highest value in the first of `ties`,
    and so on.

    Args:
        values: [n, plans].
        allowed: [n, plans] bool, at least one a row.
        ties: [n, plans] each.

    Returns:
        [n] int64; of plans that are equal in everything, the first.
    """
    left = allowed
    for each in (values, *ties):
        masked = each.masked_fill(~left, float("-inf"))
        top = masked.max(1, keepdim=True).values
        # Sums in another order may differ in the last place, and are meant to be equal.
        left = left & (masked >= top - _TIE * top.abs())
    return left.float().argmax(1)


def in_time(latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
    """Share of the measured times that are within a budget: [..., repeats] -> [...] float32."""
    return (latency_ms <= budget_ms).float().mean(-1)
