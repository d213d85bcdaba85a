"""Rewards, and the Lagrange multiplier of late answers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.adaptive.training.grpo import ConstraintMultiplier, Reward

RATIO = st.floats(0.01, 5.0)
EXCESS = st.floats(0.0, 3.0)
MULTIPLIER = st.floats(0.0, 10.0)


def reward(accuracy: float, ratio: float, multiplier: float, excess: float = 0.25) -> float:
    score, latency_ms, budget_ms = torch.tensor([accuracy, 100.0 * ratio, 100.0], dtype=torch.float64)
    return float(Reward(excess=excess)(score, latency_ms, budget_ms, multiplier))


@given(RATIO, MULTIPLIER, EXCESS)
def test_reward_within_budget_is_accuracy(ratio: float, multiplier: float, excess: float) -> None:
    assert reward(0.7, min(ratio, 1.0), multiplier, excess) == pytest.approx(0.7)


@given(RATIO, RATIO, MULTIPLIER, EXCESS)
def test_reward_decreases_with_latency(first: float, other: float, multiplier: float, excess: float) -> None:
    sooner, later = sorted((first, other))
    assert reward(0.5, sooner, multiplier, excess) >= reward(0.5, later, multiplier, excess)


@given(RATIO, RATIO, st.floats(0.01, 10.0), EXCESS)
def test_reward_of_late_answer_is_lower(first: float, other: float, multiplier: float, excess: float) -> None:
    timely, late = min(first, 1.0), max(other, 1.0 + 1e-6)
    assert reward(0.5, timely, multiplier, excess) > reward(0.5, late, multiplier, excess)


@given(RATIO, st.floats(0, 1), st.floats(0, 1), MULTIPLIER)
def test_reward_increases_with_accuracy(ratio: float, first: float, other: float, multiplier: float) -> None:
    worse, better = sorted((first, other))
    assert reward(better, ratio, multiplier) >= reward(worse, ratio, multiplier)


@given(RATIO, MULTIPLIER, MULTIPLIER)
def test_reward_decreases_with_multiplier(ratio: float, first: float, other: float) -> None:
    lower, higher = sorted((first, other))
    assert reward(0.5, ratio, lower) >= reward(0.5, ratio, higher)


def test_violation_by_hand() -> None:
    budget = torch.full((5,), 100.0)
    violations = Reward(excess=0.5).violation(torch.tensor([1.0, 100.0, 100.1, 150.0, 900.0]), budget)
    torch.testing.assert_close(violations, torch.tensor([0.0, 0.0, 1.0005, 1.25, 1.5]))


@given(st.lists(st.floats(0, 1), max_size=50), st.floats(0, 10))
def test_multiplier_follows_violations_within_bounds(fractions: list[float], first: float) -> None:
    multiplier = ConstraintMultiplier(value=first, target=0.1, rate=2.0, max_value=10.0)
    for violations in fractions:
        before = multiplier.value
        multiplier.update(violations)
        assert 0.0 <= multiplier.value <= 10.0
        if violations > 0.1:
            assert multiplier.value > before or multiplier.value == 10.0
        if violations < 0.1:
            assert multiplier.value < before or multiplier.value == 0.0


def test_dual_ascent_converges_to_target() -> None:
    """The gain from being late is uniform on [0, 1]; requests are late while it exceeds the multiplier."""
    multiplier = ConstraintMultiplier(value=0.0, target=0.2, rate=0.5, max_value=10.0)
    for _ in range(100):
        multiplier.update(max(0.0, 1.0 - multiplier.value))
    assert multiplier.value == pytest.approx(0.8)
