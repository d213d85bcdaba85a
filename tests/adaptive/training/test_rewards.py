"""Rewards: late is worse than slow, and the price of being late follows how often it happens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.adaptive.training.grpo import ConstraintMultiplier, Reward
from sparseflow.errors import InputError

SHARE = st.floats(0.01, 5.0)
EXCESS = st.floats(0.0, 3.0)
PRICE = st.floats(0.0, 10.0)


def reward(accuracy: float, share: float, price: float, excess: float = 0.25) -> float:
    right, took_ms, budget_ms = torch.tensor([accuracy, 100.0 * share, 100.0], dtype=torch.float64)
    return float(Reward(excess=excess)(right, took_ms, budget_ms, price))


@given(SHARE, PRICE, EXCESS)
def test_within_the_budget_only_accuracy_counts(share: float, price: float, excess: float) -> None:
    assert reward(0.7, min(share, 1.0), price, excess) == pytest.approx(0.7)


@given(SHARE, SHARE, PRICE, EXCESS)
def test_later_is_never_better(first: float, other: float, price: float, excess: float) -> None:
    sooner, later = sorted((first, other))
    assert reward(0.5, sooner, price, excess) >= reward(0.5, later, price, excess)


@given(SHARE, SHARE, st.floats(0.01, 10.0), EXCESS)
def test_using_the_budget_is_never_worse_than_overrunning_it(
    used: float, over: float, price: float, excess: float
) -> None:
    used, over = min(used, 1.0), max(over, 1.0 + 1e-6)
    assert reward(0.5, used, price, excess) > reward(0.5, over, price, excess)


@given(SHARE, st.floats(0, 1), st.floats(0, 1), PRICE)
def test_more_accurate_is_better(share: float, first: float, other: float, price: float) -> None:
    worse, better = sorted((first, other))
    assert reward(better, share, price) >= reward(worse, share, price)


@given(SHARE, PRICE, PRICE)
def test_a_higher_price_never_pays(share: float, first: float, other: float) -> None:
    lower, higher = sorted((first, other))
    assert reward(0.5, share, lower) >= reward(0.5, share, higher)


def test_the_shape_by_hand() -> None:
    budget = torch.full((5,), 100.0)
    violations = Reward(excess=0.5).violation(torch.tensor([1.0, 100.0, 100.1, 150.0, 900.0]), budget)
    torch.testing.assert_close(violations, torch.tensor([0.0, 0.0, 1.0005, 1.25, 1.5]))


@pytest.mark.parametrize("excess", [-0.1, math.inf, math.nan])
def test_a_shape_that_is_refused(excess: float) -> None:
    with pytest.raises(InputError):
        Reward(excess=excess)


@given(st.lists(st.floats(0, 1), max_size=50), st.floats(0, 10))
def test_the_price_follows_violations_and_stays_in_its_bounds(shares: list[float], first: float) -> None:
    price = ConstraintMultiplier(value=first, target=0.1, rate=2.0, max_value=10.0)
    for share in shares:
        before = price.value
        price.update(share)
        assert 0.0 <= price.value <= 10.0
        if share > 0.1:
            assert price.value > before or price.value == 10.0
        if share < 0.1:
            assert price.value < before or price.value == 0.0


def test_dual_ascent_finds_the_price_at_which_the_share_is_the_one_asked() -> None:
    """Requests whose gain from being late is uniform on [0, 1] are late while the price is below the gain."""
    price = ConstraintMultiplier(value=0.0, target=0.2, rate=0.5, max_value=10.0)
    for _ in range(100):
        price.update(max(0.0, 1.0 - price.value))
    assert price.value == pytest.approx(0.8)


@pytest.mark.parametrize(
    "wrong",
    [
        {"target": 1.0},
        {"target": -0.1},
        {"rate": -1.0},
        {"value": 11.0},
        {"max_value": math.inf},
        {"value": math.nan},
    ],
)
def test_prices_that_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        ConstraintMultiplier(**wrong)
