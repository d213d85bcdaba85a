"""GRPO: gradients against enumerated expectations of small bandits, in float64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.adaptive.training.grpo import (
    MIN_SCALE,
    center_rewards,
    compute_advantages,
    compute_grpo_loss,
    estimate_kl,
)
from sparseflow.errors import InputError

REWARDS = torch.tensor([0.2, -0.5, 1.0], dtype=torch.float64)


def bandit() -> torch.Tensor:
    return torch.tensor([0.3, -0.2, 0.8], dtype=torch.float64, requires_grad=True)


def compute_policy_loss(
    log_prob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: float = 0.2
) -> torch.Tensor:
    zero = torch.zeros_like(log_prob)
    return compute_grpo_loss(
        log_prob, old, old, advantage, zero, clip=clip, kl_weight=0.0, entropy_weight=0.0
    ).total


@pytest.mark.parametrize("group", [2, 3, 4])
def test_expected_gradient_is_gradient_of_expected_reward(group: int) -> None:
    """The factor is −(g − 1) / g, because the mean of a group contains the choice itself."""
    logits = bandit()
    total = torch.zeros(3, dtype=torch.float64)
    for arms in itertools.product(range(3), repeat=group):
        log_prob = logits.log_softmax(0)[list(arms)]
        advantage = center_rewards(REWARDS[list(arms)][None])[0]
        loss = compute_policy_loss(log_prob, log_prob.detach(), advantage)
        (gradient,) = torch.autograd.grad(loss, logits)
        total += log_prob.sum().exp().detach() * gradient
    (target,) = torch.autograd.grad((logits.softmax(0) * REWARDS).sum(), logits)
    torch.testing.assert_close(total, -(group - 1) / group * target, rtol=1e-12, atol=1e-14)


def test_estimate_kl_is_unbiased() -> None:
    """The mean of k3 over the policy's own draws is the divergence; at the reference its gradient is 0."""
    logits = bandit()
    new, reference = logits.log_softmax(0), torch.tensor([0.5, 0.1, 0.4], dtype=torch.float64).log()
    expected = (new.exp() * estimate_kl(new, reference)).sum()
    torch.testing.assert_close(expected, (new.exp() * (new - reference)).sum())
    (gradient,) = torch.autograd.grad(estimate_kl(new, new.detach()).sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros(3, dtype=torch.float64))


@given(st.floats(-8, 0), st.floats(-8, 0))
def test_estimate_kl_is_non_negative(first: float, other: float) -> None:
    kl = float(
        estimate_kl(torch.tensor(first, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))
    )
    assert kl >= 0.0
    assert kl > 0.0 or abs(other - first) < 1e-6


def test_estimate_kl_of_negligible_probability_has_finite_gradient() -> None:
    log_prob = torch.tensor([-500.0], requires_grad=True)
    estimate_kl(log_prob, torch.tensor([-1.0])).sum().backward()
    assert log_prob.grad is not None and math.isfinite(float(log_prob.grad))


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "moves"),
    [
        (1.0, 2.0, -2.0, True),
        (1.5, 2.0, -2.4, False),
        (0.5, 2.0, -1.0, True),
        (0.5, -2.0, 1.6, False),
        (1.5, -2.0, 3.0, True),
    ],
)
def test_policy_loss_clips_ratio(ratio: float, advantage: float, value: float, moves: bool) -> None:
    log_prob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64)
    loss = compute_policy_loss(log_prob, old, torch.tensor([advantage], dtype=torch.float64))
    assert float(loss.detach()) == pytest.approx(value)
    loss.backward()
    assert log_prob.grad is not None
    assert float(log_prob.grad) == pytest.approx(-ratio * advantage if moves else 0.0)


def test_grpo_loss_sums_terms() -> None:
    log_prob = torch.tensor([-1.0, -2.0], dtype=torch.float64)
    old, reference = log_prob - math.log(2.0), log_prob + 0.5
    advantage, entropy = torch.tensor([1.0, -1.0]), torch.tensor([0.5, 1.5])
    loss = compute_grpo_loss(
        log_prob, old, reference, advantage, entropy, clip=0.2, kl_weight=0.1, entropy_weight=0.01
    )
    policy, divergence = -(1.2 - 2.0) / 2, math.exp(0.5) - 0.5 - 1
    assert float(loss.policy) == pytest.approx(policy)
    assert float(loss.kl) == pytest.approx(divergence)
    assert float(loss.entropy) == pytest.approx(1.0) and float(loss.clipped) == 1.0
    assert float(loss.total) == pytest.approx(policy + 0.1 * divergence - 0.01)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=5))
def test_advantages_have_zero_mean_and_keep_order(rows: list[list[float]]) -> None:
    rewards = torch.tensor(rows, dtype=torch.float64)
    advantages = compute_advantages(rewards)
    torch.testing.assert_close(
        advantages.mean(1), torch.zeros(len(rows), dtype=torch.float64), atol=1e-9, rtol=0
    )
    ordered = advantages.gather(1, rewards.argsort(1))
    assert bool((ordered.diff(dim=1) >= -1e-12).all())


def test_advantages_of_jitter_stay_small() -> None:
    jitter = torch.tensor([[1.0, 1.0001, 0.9999, 1.0]])
    assert float(compute_advantages(jitter).abs().max()) < 0.003
    # Beside a group that really differs, a constant first stays at nothing.
    advantages = compute_advantages(torch.tensor([[0.0, 1.0], [0.5, 0.5]]))
    assert advantages[1].tolist() == [0.0, 0.0] and float(advantages[0, 1]) == pytest.approx(math.sqrt(2))


def test_advantages_with_variance_use_it() -> None:
    rewards = torch.tensor([[0.0, 1.0]])
    torch.testing.assert_close(
        compute_advantages(rewards, variance=torch.tensor(4.0)), center_rewards(rewards) / 2
    )
    torch.testing.assert_close(
        compute_advantages(rewards, variance=torch.tensor(0.0)), center_rewards(rewards) / MIN_SCALE
    )


@pytest.mark.parametrize("shape", [(3,), (3, 1), (2, 2, 2)])
def test_center_rewards_without_groups_raises(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError):
        center_rewards(torch.zeros(shape))
