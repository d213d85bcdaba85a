"""Judging: the measures by hand, paired intervals, and margins that keep an attainment."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sparseflow.adaptive.policy.evaluation import calibrate_margin, compare_policies, evaluate_policy
from sparseflow.adaptive.policy.outcomes import OutcomeTable, QuantileLatencies, budget_grid
from sparseflow.adaptive.policy.policies import (
    LookupTablePolicy,
    MarginPolicy,
    OraclePolicy,
    Policy,
    RandomPolicy,
    StaticPolicy,
)
from sparseflow.errors import InputError
from tests.adaptive.synthetic import make_outcomes, make_space

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


def test_the_measures_by_hand() -> None:
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


def test_several_seeds_are_judged_by_their_mean() -> None:
    table = make_outcomes(40, jitter=0.1)
    budgets, costs = budget_grid(table.budget_range_ms(), 5), QuantileLatencies.from_outcomes(table)
    indices = [RandomPolicy(costs=costs, seed=seed) for seed in range(3)]
    batched, single = (
        evaluate_policy(indices, table, budgets),
        [evaluate_policy(item, table, budgets) for item in indices],
    )
    assert batched.accuracy.mean == pytest.approx(sum(item.accuracy.mean for item in single) / 3)
    torch.testing.assert_close(
        batched.per_request["regret"], torch.stack([item.per_request["regret"] for item in single]).mean(0)
    )


def test_intervals_are_paired_and_over_images() -> None:
    table = make_outcomes(60, jitter=0.1)
    budgets = budget_grid(table.budget_range_ms(), 4)
    lookup, oracle = (
        evaluate_policy(LookupTablePolicy.from_outcomes(table), table, budgets),
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
    # The same request three times, of one image, is no more than once; of three images it would be.
    thrice = table.select(torch.arange(60).repeat_interleave(3))
    for images, known in ((torch.arange(60).repeat_interleave(3), 1), (torch.arange(180), 3)):
        many_scores = evaluate_policy(
            LookupTablePolicy.from_outcomes(table), replace(thrice, images=images), budgets
        ).goodput
        single = evaluate_policy(
            LookupTablePolicy.from_outcomes(table), replace(table, images=torch.arange(60)), budgets
        ).goodput
        share = (many_scores.high - many_scores.low) / (single.high - single.low)
        assert share == pytest.approx(known**-0.5, rel=0.15)
    with pytest.raises(InputError):
        compare_policies(evaluate_policy(OraclePolicy(), thrice, budgets), lookup)


def test_some_requests_are_compared_by_themselves() -> None:
    table = make_outcomes(60, jitter=0.1)
    budgets = budget_grid(table.budget_range_ms(), 6)
    lookup, oracle = (
        evaluate_policy(LookupTablePolicy.from_outcomes(table), table, budgets),
        evaluate_policy(OraclePolicy(), table, budgets),
    )
    overall = compare_policies(oracle, lookup)["goodput"].mean
    thirds = [
        compare_policies(oracle, lookup, budgets=slice(index, index + 2))["goodput"].mean
        for index in (0, 2, 4)
    ]
    assert sum(thirds) / 3 == pytest.approx(overall) and len(set(thirds)) > 1
    subset = torch.arange(60) < 20
    own_result = compare_policies(oracle, lookup, samples=subset)["goodput"]
    remainder = compare_policies(oracle, lookup, samples=~subset)["goodput"]
    assert (20 * own_result.mean + 40 * remainder.mean) / 60 == pytest.approx(overall)
    part = table.select(torch.arange(20))
    single = compare_policies(
        evaluate_policy(OraclePolicy(), part, budgets),
        evaluate_policy(LookupTablePolicy.from_outcomes(table), part, budgets),
    )["goodput"]
    assert (own_result.mean, own_result.low, own_result.high) == pytest.approx(
        (single.mean, single.low, single.high)
    )
    with pytest.raises(InputError):
        compare_policies(oracle, lookup, samples=torch.zeros(60, dtype=torch.bool))
    with pytest.raises(InputError):
        compare_policies(oracle, evaluate_policy(LookupTablePolicy.from_outcomes(table), table, budgets[1:]))


def test_a_margin_keeps_the_attainment_that_is_asked() -> None:
    train, validation = make_outcomes(60, seed=1, jitter=0.2), make_outcomes(60, seed=2, jitter=0.2)
    budgets = budget_grid(train.budget_range_ms(), 6)[1:]
    for policy in (
        LookupTablePolicy.from_outcomes(train, quantile=0.5),
        LookupTablePolicy.from_outcomes(train, quantile=0.99),
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


def test_an_attainment_that_cannot_be_kept_is_said() -> None:
    table = by_hand()
    margin_policy = calibrate_margin(StaticPolicy(plan=1), table, torch.tensor([5.0, 30.0]), 0.9)
    assert not margin_policy.met
    assert evaluate_policy(margin_policy, table, torch.tensor([30.0])).met is False
    with pytest.raises(InputError):
        calibrate_margin(OraclePolicy(), table, torch.tensor([30.0]), 1.5)


def test_what_is_refused() -> None:
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
