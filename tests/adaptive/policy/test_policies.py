"""Policies against brute force over all plans, and what each may and may not look at."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import OutcomeTable, QuantileLatencies, budget_grid, find_feasible
from sparseflow.adaptive.policy.policies import (
    ControllerPolicy,
    ImitationPolicy,
    LookupTablePolicy,
    MarginPolicy,
    OraclePolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
    argmax_with_ties,
    fraction_in_time,
)
from sparseflow.errors import InputError
from tests.adaptive.synthetic import WIDTH, make_outcomes, make_space

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
def test_the_lookup_table_by_brute_force(seed: int, budget: float) -> None:
    known = table(seed)
    policy = LookupTablePolicy.from_outcomes(known, quantile=0.9)
    (result,) = policy.choose(known, torch.tensor([0]), torch.tensor([budget])).tolist()
    costs, accuracy = known.latency_quantiles_ms(0.9), known.correct.mean(0)
    fit = [plan for plan in range(len(SMALL)) if costs[plan] <= torch.tensor(budget)]
    if not fit:
        assert costs[result] == costs.min()
        return
    top = max(float(accuracy[plan]) for plan in fit)
    equal = [plan for plan in fit if float(accuracy[plan]) >= top - 1e-6]
    assert result in equal and float(costs[result]) == pytest.approx(
        min(float(costs[plan]) for plan in equal)
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 50), st.floats(20.0, 300.0))
def test_no_plan_is_right_and_in_time_more_often_than_the_oracle(seed: int, budget: float) -> None:
    known = table(seed)
    indices, budgets = torch.arange(24), torch.full((24,), budget)
    ideal = goodput(OraclePolicy(), known, indices, budgets)
    for plan in range(len(SMALL)):
        assert bool((ideal >= goodput(StaticPolicy(plan=plan), known, indices, budgets) - 1e-6).all())


def test_the_oracle_prefers_to_be_in_time_then_what_it_is_told_then_the_faster() -> None:
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
    right = OutcomeTable(
        space=SMALL,
        correct=correct,
        latency_ms=latency_ms,
        language=outcome_table.language[:1],
        tokens=outcome_table.tokens[:1],
    )
    assert OraclePolicy(prefer=prefer).choose(right, sample, budget).tolist() == [4]
    allowed = torch.ones(1, len(SMALL), dtype=torch.bool)
    allowed[0, 4:6] = False
    assert OraclePolicy().choose(right, sample, budget, allowed=allowed).tolist() == [6]


def test_the_best_static_plan_by_brute_force() -> None:
    known = table()
    budgets = budget_grid(known.budget_range_ms(), 7)
    indices = torch.arange(24).repeat_interleave(7)
    values = [
        float(goodput(StaticPolicy(plan=index), known, indices, budgets.repeat(24)).mean())
        for index in range(len(SMALL))
    ]
    assert values[StaticPolicy.from_outcomes(known, budgets).plan] == pytest.approx(max(values))
    timely = torch.stack([fraction_in_time(known.latency_ms, budget).mean(0) for budget in budgets]).mean(0)
    careful = StaticPolicy.from_outcomes(known, budgets, attainment=0.8).plan
    assert float(timely[careful]) >= 0.8
    assert values[careful] == pytest.approx(max(v for v, t in zip(values, timely, strict=True) if t >= 0.8))
    assert float(timely[StaticPolicy.from_outcomes(known, budgets * 0.1, attainment=1.0).plan]) == float(
        timely.max()
    )


def test_random_takes_every_plan_that_fits_and_no_other() -> None:
    known = table()
    costs = QuantileLatencies.from_outcomes(known, 0.5)
    budget = float(costs.plans_ms.median())
    samples = torch.zeros(4000, dtype=torch.int64)
    result = RandomPolicy(costs=costs, seed=1).choose(known, samples, torch.full((4000,), budget))
    fits = costs.plans_ms <= budget
    counts = result.bincount(minlength=len(SMALL)).float()
    assert bool((counts[~fits] == 0).all())
    expected = 4000 / int(fits.sum())
    assert float((counts[fits] - expected).abs().max()) < 5 * math.sqrt(expected)
    repeated = RandomPolicy(costs=costs, seed=1).choose(known, samples, torch.full((4000,), budget))
    assert torch.equal(result, repeated)
    other = RandomPolicy(costs=costs, seed=2).choose(known, samples, torch.full((4000,), budget))
    assert not torch.equal(result, other)


def test_where_nothing_fits_the_cheapest_does() -> None:
    costs = torch.tensor([[3.0, 2.0, 2.0], [3.0, 2.0, 1.0]])
    mask = find_feasible(costs, torch.tensor([1.0, 2.0]))
    assert mask.tolist() == [[False, True, True], [False, True, True]]


def test_controllers_choose_among_what_fits_in_any_order_of_blocks() -> None:
    known = make_outcomes(2100, seed=3, repeats=2)
    new_controllers = Controllers(known.space, width=WIDTH, model_id="m")
    new_controllers.fit_features(known.language, known.tokens)
    costs = QuantileLatencies.from_outcomes(known, 0.9)
    policy = ControllerPolicy(controllers=new_controllers, costs=costs)
    samples = torch.arange(2100).flip(0)
    budgets = torch.linspace(60.0, 300.0, 2100)
    result = policy.choose(known, samples, budgets)
    assert bool(find_feasible(costs(known, samples), budgets)[torch.arange(2100), result].all())
    free = ControllerPolicy(controllers=new_controllers)
    subset_choices = free.choose(known, samples[-60:], budgets[-60:])
    assert torch.equal(free.choose(known, samples, budgets)[-60:], subset_choices)
    with pytest.raises(InputError):
        policy.choose(table(), torch.tensor([0]), torch.tensor([100.0]))
    assert ImitationPolicy(controllers=new_controllers).name == "supervised on oracle"


def test_a_margin_is_a_share_of_the_budget() -> None:
    known = table()
    policy = LookupTablePolicy.from_outcomes(known)
    samples, budgets = torch.arange(24), torch.linspace(20.0, 200.0, 24)
    margin_policy = MarginPolicy(policy=policy, margin=0.5)
    assert torch.equal(
        margin_policy.choose(known, samples, budgets), policy.choose(known, samples, budgets / 2)
    )
    assert margin_policy.name == policy.name
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError):
            MarginPolicy(policy=policy, margin=wrong)


def test_a_budget_that_is_none() -> None:
    known = table()
    costs = QuantileLatencies.from_outcomes(known)
    new_controllers = Controllers(SMALL, width=WIDTH, model_id="m")
    policies: list[Policy] = [
        LookupTablePolicy.from_outcomes(known),
        StaticPolicy(plan=0),
        RandomPolicy(costs=costs),
        OraclePolicy(),
        ControllerPolicy(controllers=new_controllers),
        MarginPolicy(policy=OraclePolicy(), margin=0.9),
    ]
    for policy in policies:
        for wrong in (math.nan, 0.0, -5.0):
            with pytest.raises(InputError):
                policy.choose(known, torch.tensor([0]), torch.tensor([wrong]))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_best_is_the_lexicographic_maximum(seed: int, plans: int) -> None:
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
