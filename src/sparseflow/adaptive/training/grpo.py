"""Group-relative policy optimization (GRPO) with a latency constraint.

Source: Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.

Notation: p prompts (a request and its budget), g choices per prompt, r rewards [p, g], q joint probability of
the four parts of a choice.

    advantage = (r − mean of the group) / scale
    loss      = −mean(min(ratio · advantage, clip(ratio) · advantage)) + kl · k3 − entropy · H
    ratio     = q_new / q_old,   k3 = q_ref / q_new − ln(q_ref / q_new) − 1

The scale is the within-group deviation over all groups of a step, bounded below. The deviation of a single
group would amplify differences that are only timing jitter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field
from torch import Tensor

from sparseflow.core.config import StrictModel
from sparseflow.errors import InputError

MIN_SCALE = 0.05
"""Lower bound of the advantage scale, in units of accuracy."""

_MAX_LOG_RATIO = 10.0
"""Maximum log-ratio of reference to policy, in nats."""


def center_rewards(rewards: Tensor) -> Tensor:
    """Subtract the group mean: [p, g] -> [p, g].

    Raises:
        InputError: A group has fewer than two choices.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise InputError(f"rewards must be [prompts, 2 or more choices], not {list(rewards.shape)}")
    return rewards - rewards.mean(1, keepdim=True)


def compute_advantages(rewards: Tensor, *, variance: Tensor | None = None) -> Tensor:
    """Compute group-relative advantages.

    Args:
        rewards: [p, g].
        variance: Mean square of the centered rewards over all processes; default: of these rewards.

    Returns:
        [p, g]; each group has mean 0.
    """
    centered = center_rewards(rewards)
    variance = centered.square().mean() if variance is None else variance
    return centered / variance.sqrt().clamp_min(MIN_SCALE)


def estimate_kl(log_prob: Tensor, reference: Tensor) -> Tensor:
    """Non-negative KL estimate from the reference; unbiased for samples of the policy.

    Args:
        log_prob: Log-probabilities by the policy.
        reference: Log-probabilities of the same choices by the reference.

    Source:
        Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html).
    """
    # The estimate would overflow for choices whose probability has become negligible.
    log_ratio = (reference - log_prob).clamp_max(_MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


@dataclass(frozen=True, kw_only=True)
class GrpoLoss:
    """Loss and its terms, all scalars.

    Attributes:
        total: Loss to minimize.
        policy: Clipped surrogate.
        kl: Estimated divergence from the reference, nats.
        entropy: Entropy of the policy, nats.
        clipped: Fraction of choices with a clipped ratio.
    """

    total: Tensor
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    clipped: Tensor


def compute_grpo_loss(
    log_prob: Tensor,
    old: Tensor,
    reference: Tensor,
    advantage: Tensor,
    entropy: Tensor,
    *,
    clip: float,
    kl_weight: float,
    entropy_weight: float,
) -> GrpoLoss:
    """Compute the loss of choices sampled by an older policy.

    Args:
        log_prob: Current joint log-probabilities with gradients, [n].
        old: Log-probabilities at sampling time, [n].
        reference: Log-probabilities by the reference policy, [n].
        advantage: [n].
        entropy: Entropies of the policy, [n].
        clip: Clipping range of the ratio around 1, above 0.
        kl_weight: Weight of the KL estimate.
        entropy_weight: Weight of the entropy, which is maximized.
    """
    ratio = (log_prob - old).exp()
    clipped_ratio = ratio.clamp(1.0 - clip, 1.0 + clip)
    policy = -torch.minimum(ratio * advantage, clipped_ratio * advantage).mean()
    kl, mean_entropy = estimate_kl(log_prob, reference).mean(), entropy.mean()
    return GrpoLoss(
        total=policy + kl_weight * kl - entropy_weight * mean_entropy,
        policy=policy.detach(),
        kl=kl.detach(),
        entropy=mean_entropy.detach(),
        clipped=(ratio != clipped_ratio).float().mean().detach(),
    )


class Reward(StrictModel):
    """Reward: accuracy minus a price for exceeding the budget.

    Attributes:
        excess: Additional violation at twice the budget, relative to exceeding it at all.
    """

    excess: float = Field(default=0.25, ge=0.0)

    def violation(self, latency_ms: Tensor, budget_ms: Tensor) -> Tensor:
        """Violation of a budget: 0, or 1 to 1 + excess; broadcasts."""
        ratio = latency_ms / budget_ms
        return (ratio > 1.0) * (1.0 + self.excess * (ratio - 1.0).clamp(0.0, 1.0))

    def __call__(self, accuracy: Tensor, latency_ms: Tensor, budget_ms: Tensor, multiplier: float) -> Tensor:
        """Compute rewards.

        Args:
            accuracy: Scores of answers, 0 to 1.
            latency_ms: Latencies.
            budget_ms: Budgets, above 0.
            multiplier: Price of a violation, at least 0.
        """
        return accuracy - multiplier * self.violation(latency_ms, budget_ms)


@dataclass(kw_only=True)
class ConstraintMultiplier:
    """Price of a violation, adapted by dual ascent.

    Attributes:
        value: Current price.
        target: Allowed fraction of violations.
        rate: Step size.
        max_value: Maximum price.
    """

    value: float
    target: float
    rate: float
    max_value: float

    def update(self, violations: float) -> None:
        """Take one step of dual ascent.

        Args:
            violations: Fraction of requests that exceeded their budget.
        """
        self.value = min(max(self.value + self.rate * (violations - self.target), 0.0), self.max_value)
