"""Evaluation of policies: measures, paired intervals, and calibrated margins."""

from __future__ import annotations

import json

import pytest
import torch

from sparseflow.adaptive.policy.evaluation import calibrate_margin, compare_policies, evaluate_policy
from sparseflow.adaptive.policy.outcomes import OutcomeTable, budget_grid
from sparseflow.adaptive.policy.policies import (
    MarginPolicy,
    OraclePolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
)
from sparseflow.errors import InputError
from tests.adaptive.synthetic import make_lookup_policy, make_outcomes, make_space

SMALL = make_space(depth=2, top_k=1, tiers=2)


def by_hand() -> OutcomeTable:
    """Two samples, two plans: the quick one is right for the first sample, the slow one for both."""
    template = make_outcomes(2, plans=SMALL)
    assert len(SMALL) == 2
    return OutcomeTable(
        space=SMALL, correct=torch.tensor([[1.0, 1.0], [0.0, 1.0]]),
        latency_ms=torch.tensor([[[10.0, 10.0], [20.0, 40.0]], [[10.0, 10.0], [20.0, 40.0]]]),
        language=template.language, tokens=template.tokens,
    )  # fmt: skip


def select(table: OutcomeTable, samples: torch.Tensor) -> OutcomeTable:
    tensors = {
        name: getattr(table, name)[samples] for name in ("correct", "latency_ms", "language", "tokens")
    }
    return OutcomeTable(space=table.space, **tensors)


def test_evaluate_policy_computes_measures() -> None:
    table, budgets = by_hand(), torch.tensor([50.0, 30.0])
    slow = evaluate_policy(StaticPolicy(plan=1), table, budgets)
    assert (slow.accuracy.mean, slow.attainment.mean, slow.goodput.mean) == (1.0, 0.75, 0.75)
    # At 30 ms the oracle takes the quick plan for the first sample.
    assert slow.regret.mean == pytest.approx(0.125) and slow.latency_ms == 30.0
    assert [row["budget_ms"] for row in slow.curve] == [30.0, 50.0]
    assert slow.curve[0] == {"budget_ms": 30.0, "accuracy": 1.0, "attainment": 0.5, "goodput": 0.5}
    assert (slow.margin, slow.met) == (1.0, None)
    quick = evaluate_policy(StaticPolicy(plan=0), table, budgets)
    assert (quick.accuracy.mean, quick.attainment.mean, quick.regret.mean) == (0.5, 1.0, pytest.approx(0.375))
    assert evaluate_policy(OraclePolicy(), table, budgets).regret.mean == 0.0
    assert json.loads(json.dumps(slow.to_dict()))["regret"]["mean"] == pytest.approx(0.125)


def test_evaluate_policy_averages_several_policies() -> None:
    table = make_outcomes(40, jitter=0.1)
    budgets, costs_ms = budget_grid(table.budget_range_ms(), 5), table.latency_quantiles_ms()
    policies = [RandomPolicy(costs_ms=costs_ms, seed=seed) for seed in range(3)]
    mean = evaluate_policy(policies, table, budgets)
    evaluations = [evaluate_policy(policy, table, budgets) for policy in policies]
    accuracies = [evaluation.accuracy.mean for evaluation in evaluations]
    assert mean.accuracy.mean == pytest.approx(sum(accuracies) / 3)
    regrets = torch.stack([evaluation.per_request["regret"] for evaluation in evaluations])
    torch.testing.assert_close(mean.per_request["regret"], regrets.mean(0))


def test_compare_policies_intervals_are_paired() -> None:
    table = make_outcomes(60, jitter=0.1)
    budgets = budget_grid(table.budget_range_ms(), 4)
    lookup, oracle = (
        evaluate_policy(make_lookup_policy(table), table, budgets),
        evaluate_policy(OraclePolicy(), table, budgets),
    )
    comparison = compare_policies(oracle, lookup)["goodput"]
    assert (
        comparison.mean == pytest.approx(lookup.regret.mean)
        and comparison.low <= comparison.mean <= comparison.high
    )
    assert (
        comparison.high - comparison.low
        < lookup.goodput.high - lookup.goodput.low + oracle.goodput.high - oracle.goodput.low
    )
    same = compare_policies(lookup, lookup)["accuracy"]
    assert (same.mean, same.low, same.high) == (0.0, 0.0, 0.0)
    part = select(table, torch.arange(20))
    with pytest.raises(InputError):
        compare_policies(evaluate_policy(OraclePolicy(), part, budgets), lookup)


def test_compare_policies_of_subset_equals_comparison_on_subset() -> None:
    table = make_outcomes(60, jitter=0.1)
    budgets = budget_grid(table.budget_range_ms(), 6)
    lookup, oracle = (
        evaluate_policy(make_lookup_policy(table), table, budgets),
        evaluate_policy(OraclePolicy(), table, budgets),
    )
    overall = compare_policies(oracle, lookup)["goodput"].mean
    thirds = [
        compare_policies(oracle, lookup, budgets=slice(index, index + 2))["goodput"].mean
        for index in (0, 2, 4)
    ]
    assert sum(thirds) / 3 == pytest.approx(overall) and len(set(thirds)) > 1
    is_first = torch.arange(60) < 20
    first_gain = compare_policies(oracle, lookup, samples=is_first)["goodput"]
    other_gain = compare_policies(oracle, lookup, samples=~is_first)["goodput"]
    assert (20 * first_gain.mean + 40 * other_gain.mean) / 60 == pytest.approx(overall)
    part = select(table, torch.arange(20))
    single = compare_policies(
        evaluate_policy(OraclePolicy(), part, budgets),
        evaluate_policy(make_lookup_policy(table), part, budgets),
    )["goodput"]
    assert (first_gain.mean, first_gain.low, first_gain.high) == pytest.approx(
        (single.mean, single.low, single.high)
    )
    with pytest.raises(InputError):
        compare_policies(oracle, lookup, samples=torch.zeros(60, dtype=torch.bool))
    with pytest.raises(InputError):
        compare_policies(oracle, evaluate_policy(make_lookup_policy(table), table, budgets[1:]))


def test_calibrate_margin_reaches_attainment() -> None:
    train, validation = make_outcomes(60, seed=1, jitter=0.2), make_outcomes(60, seed=2, jitter=0.2)
    budgets = budget_grid(train.budget_range_ms(), 6)[1:]
    for policy in (
        make_lookup_policy(train, quantile=0.5),
        make_lookup_policy(train, quantile=0.99),
    ):
        margin_policy = calibrate_margin(policy, validation, budgets, 0.9)
        scores = evaluate_policy(margin_policy, validation, budgets)
        assert (
            margin_policy.met
            and scores.met
            and scores.attainment.mean >= 0.9
            and scores.margin == margin_policy.margin
        )
        plain = evaluate_policy(policy, validation, budgets)
        if plain.attainment.mean >= 0.9:
            assert scores.accuracy.mean >= plain.accuracy.mean, "a careful policy becomes bolder"
        else:
            assert margin_policy.margin < 1.0


def test_calibrate_margin_with_unreachable_attainment_is_not_met() -> None:
    table = by_hand()
    margin_policy = calibrate_margin(StaticPolicy(plan=1), table, torch.tensor([5.0, 30.0]), 0.9)
    assert not margin_policy.met
    assert evaluate_policy(margin_policy, table, torch.tensor([30.0])).met is False
    with pytest.raises(InputError):
        calibrate_margin(OraclePolicy(), table, torch.tensor([30.0]), 1.5)


def test_evaluate_policy_with_invalid_arguments_raises() -> None:
    table, budgets = by_hand(), torch.tensor([30.0])
    none: list[Policy] = []
    for wrong in (none, [OraclePolicy(), StaticPolicy(plan=0)]):
        with pytest.raises(InputError):
            evaluate_policy(wrong, table, budgets)
    with pytest.raises(InputError):
        evaluate_policy(OraclePolicy(), table, torch.tensor([-1.0]))
    assert (
        evaluate_policy(
            [MarginPolicy(policy=OraclePolicy(), margin=margin) for margin in (0.8, 1.0)], table, budgets
        ).margin
        == 0.9
    )
