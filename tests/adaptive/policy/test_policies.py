"""Policies against brute force over all plans."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import OutcomeTable, budget_grid, find_feasible
from sparseflow.adaptive.policy.policies import (
    ControllerPolicy,
    MarginPolicy,
    OraclePolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
    argmax_with_ties,
    fraction_in_time,
)
from sparseflow.errors import InputError
from tests.adaptive.synthetic import WIDTH, make_lookup_policy, make_outcomes, make_space

SMALL = make_space(depth=3, top_k=2, tiers=2)


def table(seed: int = 0) -> OutcomeTable:
    return make_outcomes(24, seed=seed, luck=0.3, jitter=0.2, repeats=3, plans=SMALL)


def goodput(
    policy: Policy, outcomes: OutcomeTable, samples: torch.Tensor, budgets: torch.Tensor
) -> torch.Tensor:
    plans = policy.choose(outcomes, samples, budgets)
    timely = fraction_in_time(outcomes.latency_ms[samples, plans], budgets[:, None])
    return outcomes.correct[samples, plans] * timely


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 50), st.floats(1.0, 400.0))
def test_lookup_table_selects_most_accurate_feasible_plan(seed: int, budget: float) -> None:
    outcomes = table(seed)
    policy = make_lookup_policy(outcomes, quantile=0.9)
    (plan,) = policy.choose(outcomes, torch.tensor([0]), torch.tensor([budget])).tolist()
    costs_ms, accuracy = outcomes.latency_quantiles_ms(0.9), outcomes.correct.mean(0)
    fit = [plan for plan in range(len(SMALL)) if costs_ms[plan] <= torch.tensor(budget)]
    if not fit:
        assert costs_ms[plan] == costs_ms.min()
        return
    best_accuracy = max(float(accuracy[plan]) for plan in fit)
    ties = [plan for plan in fit if float(accuracy[plan]) >= best_accuracy - 1e-6]
    assert plan in ties and float(costs_ms[plan]) == pytest.approx(
        min(float(costs_ms[plan]) for plan in ties)
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 50), st.floats(20.0, 300.0))
def test_oracle_goodput_is_upper_bound_of_static_plans(seed: int, budget: float) -> None:
    outcomes = table(seed)
    indices, budgets = torch.arange(24), torch.full((24,), budget)
    oracle_goodput = goodput(OraclePolicy(), outcomes, indices, budgets)
    for plan in range(len(SMALL)):
        assert bool(
            (oracle_goodput >= goodput(StaticPolicy(plan=plan), outcomes, indices, budgets) - 1e-6).all()
        )


def test_oracle_breaks_ties_by_time_preference_and_latency() -> None:
    outcome_table = table()
    latency_ms = torch.full((1, len(SMALL), 3), 200.0)
    latency_ms[0, 4], latency_ms[0, 5], latency_ms[0, 6] = 50.0, 40.0, 45.0
    correct = torch.zeros(1, len(SMALL))
    single_table = OutcomeTable(
        space=SMALL,
        correct=correct,
        latency_ms=latency_ms,
        language=outcome_table.language[:1],
        tokens=outcome_table.tokens[:1],
    )
    sample, budget = torch.tensor([0]), torch.tensor([100.0])
    assert OraclePolicy().choose(single_table, sample, budget).tolist() == [5]
    prefer = torch.zeros(len(SMALL))
    prefer[6] = 1.0
    assert OraclePolicy(prefer=prefer).choose(single_table, sample, budget).tolist() == [6]
    correct[0, 4] = 1.0
    correct_table = replace(single_table, correct=correct)
    assert OraclePolicy(prefer=prefer).choose(correct_table, sample, budget).tolist() == [4]
    allowed = torch.ones(1, len(SMALL), dtype=torch.bool)
    allowed[0, 4:6] = False
    assert OraclePolicy().choose(correct_table, sample, budget, allowed=allowed).tolist() == [6]


def test_static_policy_selects_plan_with_highest_goodput() -> None:
    outcomes = table()
    budgets = budget_grid(outcomes.budget_range_ms(), 7)
    indices = torch.arange(24).repeat_interleave(7)
    values = [
        float(goodput(StaticPolicy(plan=index), outcomes, indices, budgets.repeat(24)).mean())
        for index in range(len(SMALL))
    ]
    assert values[StaticPolicy.from_outcomes(outcomes, budgets).plan] == pytest.approx(max(values))
    timely = torch.stack([fraction_in_time(outcomes.latency_ms, budget).mean(0) for budget in budgets]).mean(
        0
    )
    careful_plan = StaticPolicy.from_outcomes(outcomes, budgets, attainment=0.8).plan
    assert float(timely[careful_plan]) >= 0.8
    assert values[careful_plan] == pytest.approx(
        max(v for v, t in zip(values, timely, strict=True) if t >= 0.8)
    )
    assert float(timely[StaticPolicy.from_outcomes(outcomes, budgets * 0.1, attainment=1.0).plan]) == float(
        timely.max()
    )


def test_random_policy_is_uniform_over_feasible_plans() -> None:
    outcomes = table()
    costs_ms = outcomes.latency_quantiles_ms(0.5)
    budget = float(costs_ms.median())
    samples = torch.zeros(4000, dtype=torch.int64)
    result = RandomPolicy(costs_ms=costs_ms, seed=1).choose(outcomes, samples, torch.full((4000,), budget))
    fits = costs_ms <= budget
    counts = result.bincount(minlength=len(SMALL)).float()
    assert bool((counts[~fits] == 0).all())
    expected = 4000 / int(fits.sum())
    assert float((counts[fits] - expected).abs().max()) < 5 * math.sqrt(expected)
    repeated = RandomPolicy(costs_ms=costs_ms, seed=1).choose(outcomes, samples, torch.full((4000,), budget))
    assert torch.equal(result, repeated)
    other = RandomPolicy(costs_ms=costs_ms, seed=2).choose(outcomes, samples, torch.full((4000,), budget))
    assert not torch.equal(result, other)


def test_find_feasible_without_fitting_plan_returns_cheapest() -> None:
    mask = find_feasible(torch.tensor([3.0, 2.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert mask.tolist() == [[False, True, True], [False, True, True], [True, True, True]]


def test_controller_policy_chooses_feasible_plans_in_any_block_order() -> None:
    outcomes = make_outcomes(2100, seed=3, repeats=2)
    controllers = Controllers(outcomes.space, width=WIDTH, model_id="m")
    controllers.fit_features(outcomes.language, outcomes.tokens)
    costs_ms = outcomes.latency_quantiles_ms(0.9)
    policy = ControllerPolicy(controllers=controllers, costs_ms=costs_ms)
    samples = torch.arange(2100).flip(0)
    budgets = torch.linspace(60.0, 300.0, 2100)
    result = policy.choose(outcomes, samples, budgets)
    assert bool(find_feasible(costs_ms, budgets)[torch.arange(2100), result].all())
    free = ControllerPolicy(controllers=controllers)
    choices = free.choose(outcomes, samples[-60:], budgets[-60:])
    assert torch.equal(free.choose(outcomes, samples, budgets)[-60:], choices)
    with pytest.raises(InputError):
        policy.choose(table(), torch.tensor([0]), torch.tensor([100.0]))


def test_margin_policy_scales_budget() -> None:
    outcomes = table()
    policy = make_lookup_policy(outcomes)
    samples, budgets = torch.arange(24), torch.linspace(20.0, 200.0, 24)
    margin_policy = MarginPolicy(policy=policy, margin=0.5)
    assert torch.equal(
        margin_policy.choose(outcomes, samples, budgets), policy.choose(outcomes, samples, budgets / 2)
    )
    assert margin_policy.name == policy.name
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError):
            MarginPolicy(policy=policy, margin=wrong)


def test_choose_with_invalid_budget_raises() -> None:
    outcomes = table()
    controllers = Controllers(SMALL, width=WIDTH, model_id="m")
    policies: list[Policy] = [
        make_lookup_policy(outcomes),
        StaticPolicy(plan=0),
        RandomPolicy(costs_ms=outcomes.latency_quantiles_ms()),
        OraclePolicy(),
        ControllerPolicy(controllers=controllers),
        MarginPolicy(policy=OraclePolicy(), margin=0.9),
    ]
    for policy in policies:
        for wrong in (math.nan, 0.0, -5.0):
            with pytest.raises(InputError):
                policy.choose(outcomes, torch.tensor([0]), torch.tensor([wrong]))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_argmax_with_ties_is_lexicographic_maximum(seed: int, plans: int) -> None:
    random = torch.Generator().manual_seed(seed)
    values, tie, last = (torch.randint(-1, 2, (4, plans), generator=random).float() for _ in range(3))
    allowed = torch.rand(4, plans, generator=random) < 0.6
    allowed[:, 0] = True
    for row, plan in enumerate(argmax_with_ties(values, allowed, tie, last).tolist()):
        keys = [
            (values[row, index], tie[row, index], last[row, index], -index)
            for index in range(plans)
            if allowed[row, index]
        ]
        assert (values[row, plan], tie[row, plan], last[row, plan], -plan) == max(keys)
