"""Evaluation of policies: accuracy, attainment, goodput and regret, with bootstrap intervals over samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.controllers.budget_encoding import check_budgets
from sparseflow.adaptive.policy.outcomes import OutcomeTable
from sparseflow.adaptive.policy.policies import MarginPolicy, OraclePolicy, Policy, fraction_in_time
from sparseflow.core.checks import check_between
from sparseflow.core.metrics import bootstrap_mean
from sparseflow.errors import InputError

MARGINS = tuple(round(1.2 - 0.05 * step, 2) for step in range(17))
"""Budget fractions that `calibrate_margin` tries first; it then refines the best one in steps of 0.01."""

MEASURES = ("accuracy", "attainment", "goodput", "regret")


@dataclass(frozen=True, kw_only=True)
class BootstrapEstimate:
    """Mean over requests with a 95 % bootstrap interval over samples."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyEvaluation:
    """Results of a policy on a table of outcomes, each sample with each budget.

    Attributes:
        name: Name of the policy.
        accuracy: Score of the answers, whether or not in time.
        attainment: Fraction of answers in time.
        goodput: Score of the answers, 0 if late.
        regret: Goodput of the oracle minus goodput.
        latency_ms: Mean latency.
        curve: `budget_ms`, `accuracy`, `attainment` and `goodput` per budget, ascending.
        margin: Mean fraction of the budget that the policy was given.
        met: Whether the target attainment was met on the validation split; None without a target.
        per_request: Measure -> values of each sample and budget, [samples, budgets].
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

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data, without the values per request."""
        return {
            "name": self.name, **{name: asdict(getattr(self, name)) for name in MEASURES},
            "latency_ms": self.latency_ms, "margin": self.margin, "met": self.met,
            "curve": [dict(row) for row in self.curve],
        }  # fmt: skip


def evaluate_policy(
    policy: Policy | Sequence[Policy], outcomes: OutcomeTable, budgets_ms: Tensor
) -> PolicyEvaluation:
    """Evaluate a policy on every sample with every budget.

    Each choice is evaluated on all measured repeats of its latency, which equals the mean over random
    repeats.

    Args:
        policy: The policy, or several of the same kind (such as different seeds), whose results are averaged.
        outcomes: Outcomes of a split that the policy was not derived from.
        budgets_ms: Budgets, [budgets], for example from `budget_grid`.

    Raises:
        InputError: A budget is NaN or not above 0, or there is no policy, or policies of different kinds.
    """
    policies = list(policy) if isinstance(policy, Sequence) else [policy]
    names = [policy.name for policy in policies]
    if len(set(names)) != 1:
        raise InputError(f"policies evaluated together must be of the same kind, at least one; got {names}")
    budgets = check_budgets(budgets_ms).sort().values
    oracle_results = _evaluate_samples(OraclePolicy(), outcomes, budgets)
    results = [_evaluate_samples(policy, outcomes, budgets) for policy in policies]
    mean_results = {
        name: torch.stack([result[name] for result in results]).mean(0) for name in oracle_results
    }
    mean_results["regret"] = oracle_results["goodput"] - mean_results["goodput"]
    per_request = {name: mean_results[name] for name in MEASURES}
    curve = [
        {"budget_ms": float(budget)}
        | {name: float(mean_results[name][:, index].mean()) for name in MEASURES[:3]}
        for index, budget in enumerate(budgets)
    ]
    margin_policies = [policy for policy in policies if isinstance(policy, MarginPolicy)]
    estimates = {name: _bootstrap(values.mean(1)) for name, values in per_request.items()}
    return PolicyEvaluation(
        name=names[0],
        latency_ms=float(mean_results["latency_ms"].mean()),
        curve=curve,
        margin=statistics.fmean(policy.margin for policy in margin_policies) if margin_policies else 1.0,
        met=all(policy.met for policy in margin_policies) if margin_policies else None,
        per_request=per_request,
        **estimates,
    )


def compare_policies(
    first: PolicyEvaluation,
    other: PolicyEvaluation,
    *,
    samples: Tensor | None = None,
    budgets: slice = slice(None),
) -> dict[str, BootstrapEstimate]:
    """Paired gain of `first` over `other` in accuracy, attainment and goodput.

    Args:
        first: Results of a policy.
        other: Results of another policy.
        samples: Samples to include, [samples] bool; default: all.
        budgets: Budgets to include, in ascending order.

    Raises:
        InputError: The results belong to different samples or budgets, or nothing is included.
    """
    budget_lists = [[row["budget_ms"] for row in evaluation.curve] for evaluation in (first, other)]
    num_samples = len(first.per_request["goodput"])
    if num_samples != len(other.per_request["goodput"]) or budget_lists[0] != budget_lists[1]:
        raise InputError(
            f"{first.name} and {other.name} were evaluated on different samples or budgets; "
            "evaluate both on one table"
        )
    mask = torch.ones(num_samples, dtype=torch.bool) if samples is None else samples
    if not bool(mask.any()) or not budget_lists[0][budgets]:
        raise InputError("no sample or budget to compare policies on")
    gains = {}
    for name in MEASURES[:3]:
        gain = first.per_request[name] - other.per_request[name]
        gains[name] = _bootstrap(gain[mask][:, budgets].mean(1))
    return gains


def calibrate_margin(
    policy: Policy, validation: OutcomeTable, budgets_ms: Tensor, attainment: float
) -> MarginPolicy:
    """Choose the safety margin that reaches an attainment on the validation split.

    Of the margins that reach it, the one with the highest accuracy is chosen. If none does, the one with the
    highest attainment is chosen, and `met` is false.

    Args:
        policy: The policy.
        validation: Outcomes of a split used neither for deriving nor for evaluating the policy.
        budgets_ms: Budgets, [budgets].
        attainment: Required fraction of answers in time.

    Raises:
        InputError: `attainment` is not in [0, 1].
    """
    check_between(0.0, 1.0, attainment=attainment)
    budgets = check_budgets(budgets_ms)
    results: dict[float, tuple[float, float]] = {}

    def select_best(margins: Sequence[float]) -> float:
        for margin in margins:
            metrics = _evaluate_samples(MarginPolicy(policy=policy, margin=margin), validation, budgets)
            results[margin] = float(metrics["attainment"].mean()), float(metrics["accuracy"].mean())
        target = min(attainment, max(attained for attained, _ in results.values()))
        return max(
            (margin for margin in results if results[margin][0] >= target),
            key=lambda margin: results[margin][1],
        )

    coarse = select_best(MARGINS)
    margin = select_best([round(coarse + 0.01 * step, 2) for step in range(-4, 5) if step])
    return MarginPolicy(policy=policy, margin=margin, met=results[margin][0] >= attainment)


def _evaluate_samples(policy: Policy, outcomes: OutcomeTable, budgets_ms: Tensor) -> dict[str, Tensor]:
    """Accuracy, attainment, goodput and latency, each [samples, budgets]."""
    count, num_budgets = len(outcomes), len(budgets_ms)
    samples = torch.arange(count).repeat_interleave(num_budgets)
    budgets = budgets_ms.repeat(count)
    plans = policy.choose(outcomes, samples, budgets)
    latency_ms = outcomes.latency_ms[samples, plans]
    right, timely = outcomes.correct[samples, plans], fraction_in_time(latency_ms, budgets[:, None])
    metrics = {
        "accuracy": right,
        "attainment": timely,
        "goodput": right * timely,
        "latency_ms": latency_ms.mean(1),
    }
    return {name: values.view(count, num_budgets) for name, values in metrics.items()}


def _bootstrap(values: Tensor) -> BootstrapEstimate:
    low, high = bootstrap_mean(values.double().numpy())
    return BootstrapEstimate(mean=float(values.double().mean()), low=low, high=high)
