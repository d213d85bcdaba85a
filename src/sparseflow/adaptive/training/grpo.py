"""Group-relative policy optimisation of one joint choice (Shao et al., DeepSeekMath, arXiv 2402.03300,
section 4).

Notation: p prompts (a request and its budget), g choices for each, r their rewards [p, g], q the joint
    probability of
a choice's four parts.

    advantage = (r − mean of the group) / scale
    loss      = −mean(min(ratio · advantage, clip(ratio) · advantage)) + kl · k3 − entropy · H
    ratio     = q_new / q_old,   k3 = q_ref / q_new − ln(q_ref / q_new) − 1

The scale is the deviation within groups, of all groups of a step together and never below a floor. That of a
single group would blow up what a group's choices differ by when it is nothing but the jitter of a timer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseflow.errors import InputError

FLOOR = 0.05
"""Least scale, in units of accuracy: a difference of a hundredth stays a small one."""

_APART = 10.0
"""Most nats that a choice is taken to be likelier by the reference."""


def centred(rewards: Tensor) -> Tensor:
    """How much better each choice was than its group: [p, g] -> [p, g].

    Raises:
        InputError: A group has one choice only, which is as good as itself.
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise InputError(f"rewards must be [prompts, choices of 2 or more], not {list(rewards.shape)}")
    return rewards - rewards.mean(1, keepdim=True)


def advantages(rewards: Tensor, *, variance: Tensor | None = None, floor: float = FLOOR) -> Tensor:
    """Group-relative advantages.

    Args:
        rewards: [p, g].
        variance: Mean of the squares of `centred` rewards, over all processes; by default, of these.
        floor: Least scale, above 0.

    Returns:
        [p, g], the mean of each group 0.
    """
    found = centred(rewards)
    spread = found.square().mean() if variance is None else variance
    return found / spread.sqrt().clamp_min(floor)


def k3(log_prob: Tensor, reference: Tensor) -> Tensor:
    """An estimate, never below 0, of the divergence from the reference; unbiased for draws of the policy
    itself.

    Args:
        log_prob: Of choices, by the policy.
        reference: Of the same choices, by the reference.

    Source:
        Schulman, Approximating KL Divergence, 2020 (joschu.net/blog/kl-approx.html).
    """
    # Of a choice that the policy has all but given up since it was drawn, the estimate would overflow.
    apart = (reference - log_prob).clamp_max(_APART)
    return apart.expm1() - apart


@dataclass(frozen=True, kw_only=True)
class GrpoLoss:
    """A loss and what it is made of, all scalars.

    Attributes:
        total: What is made small.
        policy: The clipped surrogate.
        kl: Estimated divergence from the reference, nats.
        entropy: Of the policy, nats.
        clipped: Share of choices whose ratio was cut off.
    """

    total: Tensor
    policy: Tensor
    kl: Tensor
    entropy: Tensor
    clipped: Tensor


def grpo_loss(
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
    """The loss of choices that were drawn by an older state of the policy.

    Args:
        log_prob: Joint log-probabilities now, with gradients: [n].
        old: The same when they were drawn: [n].
        reference: By the reference policy: [n].
        advantage: [n].
        entropy: Of the policy where it chose: [n].
        clip: How far from 1 a ratio may go, above 0.
        kl_weight: Of `k3`.
        entropy_weight: Of the entropy, which is made large.
    """
    ratio = (log_prob - old).exp()
    cut = ratio.clamp(1.0 - clip, 1.0 + clip)
    policy = -torch.minimum(ratio * advantage, cut * advantage).mean()
    divergence = k3(log_prob, reference).mean()
    spread = entropy.mean()
    return GrpoLoss(
        total=policy + kl_weight * divergence - entropy_weight * spread,
        policy=policy.detach(),
        kl=divergence.detach(),
        entropy=spread.detach(),
        clipped=(ratio != cut).float().mean().detach(),
    )


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
class ConstraintMultiplier:
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
