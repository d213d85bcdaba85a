"""How good a policy is: right, in time, both, and how far from the oracle; with intervals over images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.controllers.budget_encoding import checked
from sparseflow.adaptive.policy.outcomes import OutcomeTable
from sparseflow.adaptive.policy.policies import MarginPolicy, OraclePolicy, Policy, in_time
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.errors import InputError

MARGINS = tuple(round(1.2 - 0.05 * step, 2) for step in range(17))
"""Shares of the budget that a policy may be shown: first these, then hundredths around the best of them."""

MEASURES = ("accuracy", "attainment", "goodput", "regret")


@dataclass(frozen=True, kw_only=True)
class BootstrapEstimate:
    """A mean over requests, with a 95 % bootstrap interval over images."""

    mean: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float]:
        """As JSON keeps it."""
        return {"mean": self.mean, "low": self.low, "high": self.high}


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyEvaluation:
    """A policy's results on a table of outcomes, each request with each budget.

    Attributes:
        name: The policy's.
        accuracy: Score of its answers, late or not.
        attainment: Share of answers in time.
        goodput: Score of answers in time; those that are late count 0.
        regret: How much more goodput the oracle has.
        latency_ms: Mean latency.
        curve: For each budget, ascending, its `budget_ms`, `accuracy`, `attainment` and `goodput`.
        margin: Mean share of the budget that it was shown.
        met: Whether it attained what was asked for on the validation split; None where nothing was asked.
        per_request: The four measures of each sample with each budget, ascending: name -> [samples, budgets].
        images: Of each sample.
    """

    name: str
    accuracy: BootstrapEstimate
    attainment: BootstrapEstimate
    goodput: BootstrapEstimate
    regret: BootstrapEstimate
    latency_ms: float
    curve: Sequence[Mapping[str, float]]
    margin: float
    met: bool | None
    per_request: Mapping[str, Tensor]
    images: Sequence[int]

    def to_dict(self) -> dict[str, Any]:
        """As JSON keeps it, without what each request had."""
        estimates = {name: getattr(self, name).to_dict() for name in MEASURES}
        rest = {"latency_ms": self.latency_ms, "margin": self.margin, "met": self.met}
        return {"name": self.name, **estimates, **rest, "curve": [dict(row) for row in self.curve]}


def judge(policy: Policy | Sequence[Policy], outcomes: OutcomeTable, budgets_ms: Tensor) -> PolicyEvaluation:
    """Try a policy on every sample with every budget.

    A choice is judged by all measured repeats of its latency, which is the mean over draws of them.

    Args:
        policy: The policy; or several of one kind, as trained or drawing by different seeds, whose mean is
            judged.
        outcomes: Of a split that the policy was not made from.
        budgets_ms: [budgets]; `budget_grid` gives some.

    Raises:
        InputError: A budget is NaN, 0 or less, or there is no policy, or several of different kinds.
    """
    policies = list(policy) if isinstance(policy, Sequence) else [policy]
    if len({each.name for each in policies}) != 1:
        raise InputError(
            "policies judged together must be of one kind, one at least; these are "
            f"{[each.name for each in policies]}"
        )
    budgets = checked(budgets_ms).sort().values
    ideal = _tried(OraclePolicy(), outcomes, budgets)
    tried = [_tried(each, outcomes, budgets) for each in policies]
    found = {name: torch.stack([each[name] for each in tried]).mean(0) for name in ideal}
    found["regret"] = ideal["goodput"] - found["goodput"]
    per_request = {name: found[name] for name in MEASURES}
    curve = [
        {"budget_ms": float(budget)} | {name: float(found[name][:, at].mean()) for name in MEASURES[:3]}
        for at, budget in enumerate(budgets)
    ]
    margins = [each for each in policies if isinstance(each, MarginPolicy)]
    estimates = {name: _estimate(each.mean(1), outcomes.groups) for name, each in per_request.items()}
    return PolicyEvaluation(
        name=policies[0].name, latency_ms=float(found["latency_ms"].mean()), curve=curve,
        margin=sum(each.margin for each in margins) / len(margins) if margins else 1.0,
        met=all(each.met for each in margins) if margins else None,
        per_request=per_request, images=outcomes.groups, **estimates,
    )  # fmt: skip


def versus(
    one: PolicyEvaluation,
    other: PolicyEvaluation,
    *,
    samples: Tensor | None = None,
    budgets: slice = slice(None),
) -> dict[str, BootstrapEstimate]:
    """How much better `one` is than `other` in accuracy, attainment and goodput, request by request.

    Args:
        one: A policy's results.
        other: Another's.
        samples: Which to look at, [samples] bool; by default all.
        budgets: Which to look at, in ascending order.

    Raises:
        InputError: They were judged on different samples or budgets, or there is nothing to look at.
    """
    asked = [[row["budget_ms"] for row in each.curve] for each in (one, other)]
    if list(one.images) != list(other.images) or asked[0] != asked[1]:
        raise InputError(
            f"{one.name} and {other.name} were judged on different samples or budgets; judge both on one "
            "table"
        )
    some = torch.ones(len(one.images), dtype=torch.bool) if samples is None else samples
    if not bool(some.any()) or not asked[0][budgets]:
        raise InputError("there is no sample or no budget to compare policies by")
    images = [image for image, is_in in zip(one.images, some.tolist(), strict=True) if is_in]
    found = {}
    for name in MEASURES[:3]:
        gain = one.per_request[name] - other.per_request[name]
        found[name] = _estimate(gain[some][:, budgets].mean(1), images)
    return found


def matched(policy: Policy, validation: OutcomeTable, budgets_ms: Tensor, attainment: float) -> MarginPolicy:
    """A policy with the safety margin that keeps an attainment on the validation split.

    Of the margins that keep it, the one of the highest accuracy is taken; so a policy that is more careful
    than asked becomes bolder. Where none keeps it, the one that comes nearest is taken, and `met` is false.

    Args:
        policy: The policy.
        validation: A split that it was not made from, and that it is not judged on.
        budgets_ms: [budgets].
        attainment: Share of answers that must be in time.

    Raises:
        InputError: `attainment` is not from 0 to 1.
    """
    if not 0.0 <= attainment <= 1.0:
        raise InputError(f"`attainment` (={attainment}) must be a share from 0 to 1")
    budgets = checked(budgets_ms)
    tried: dict[float, tuple[float, float]] = {}

    def best(margins: Sequence[float]) -> float:
        for margin in margins:
            found = _tried(MarginPolicy(policy=policy, margin=margin), validation, budgets)
            tried[margin] = float(found["attainment"].mean()), float(found["accuracy"].mean())
        asked = min(attainment, max(attained for attained, _ in tried.values()))
        return max((one for one in tried if tried[one][0] >= asked), key=lambda one: tried[one][1])

    coarse = best(MARGINS)
    margin = best([round(coarse + 0.01 * step, 2) for step in range(-4, 5) if step])
    return MarginPolicy(policy=policy, margin=margin, met=tried[margin][0] >= attainment)


def _tried(policy: Policy, outcomes: OutcomeTable, budgets_ms: Tensor) -> dict[str, Tensor]:
    """Accuracy, attainment, goodput and latency of each sample at each budget: [samples, budgets]."""
    count, each = len(outcomes), len(budgets_ms)
    samples = torch.arange(count).repeat_interleave(each)
    budgets = budgets_ms.repeat(count)
    plans = policy.choose(outcomes, samples, budgets)
    latency_ms = outcomes.latency_ms[samples, plans]
    right, timely = outcomes.correct[samples, plans], in_time(latency_ms, budgets[:, None])
    found = {
        "accuracy": right,
        "attainment": timely,
        "goodput": right * timely,
        "latency_ms": latency_ms.mean(1),
    }
    return {name: values.view(count, each) for name, values in found.items()}


def _estimate(values: Tensor, images: Sequence[int]) -> BootstrapEstimate:
    low, high = bootstrap_mean(values.double().numpy(), images)
    return BootstrapEstimate(mean=float(values.double().mean()), low=low, high=high)
