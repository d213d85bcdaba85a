"""Imitation of the oracle."""

from __future__ import annotations

import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import budget_grid, find_feasible
from sparseflow.adaptive.policy.policies import ControllerPolicy, OraclePolicy
from sparseflow.adaptive.training.joint import ImitationTargets
from tests.adaptive.synthetic import WIDTH, make_outcomes


def test_loss_is_negative_log_likelihood_of_oracle_plans() -> None:
    table = make_outcomes(32)
    controllers = Controllers(table.space, width=WIDTH, model_id="m")
    controllers.fit_features(table.language, table.tokens)
    samples, budgets = torch.arange(32), torch.linspace(60.0, 300.0, 32)
    for costs_ms in (None, table.latency_quantiles_ms(0.5)):
        allowed = None if costs_ms is None else find_feasible(costs_ms, budgets)
        oracle = OraclePolicy(prefer=table.correct.mean(0)).choose(table, samples, budgets, allowed=allowed)
        actions = [table.space.action(table.space.plans[plan]) for plan in oracle.tolist()]
        rows = torch.tensor(
            [[action.tier, action.position, action.top_k, action.option] for action in actions]
        )
        with torch.no_grad():
            choice = controllers.choose(
                table.language, budgets, table.get_latency_tokens, allowed=allowed, action=rows
            )
            loss = ImitationTargets(table, costs_ms).loss(controllers, samples, budgets)
        torch.testing.assert_close(loss, -choice.log_prob.mean())
        assert choice.plan.tolist() == oracle.tolist()


def test_targets_among_equal_plans_prefer_accurate_ones() -> None:
    table = make_outcomes(200)
    prefer = table.correct.mean(0)
    samples, budgets = torch.arange(200), torch.full((200,), 1000.0)
    labels = OraclePolicy(prefer=prefer).choose(table, samples, budgets)
    assert bool((prefer[labels] == prefer.max()).all())
    assert bool((prefer[OraclePolicy().choose(table, samples, budgets)] < prefer.max()).any())


def test_imitation_overfits_few_requests() -> None:
    table = make_outcomes(8)
    controllers = Controllers(table.space, width=WIDTH, model_id="m")
    controllers.fit_features(table.language, table.tokens)
    imitation, budgets = ImitationTargets(table), budget_grid(table.budget_range_ms(), 4)
    samples, repeated_budgets = torch.arange(8).repeat_interleave(4), budgets.repeat(8)
    optimizer = torch.optim.Adam(controllers.parameters(), lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        imitation.loss(controllers, samples, repeated_budgets).backward()
        optimizer.step()
    labels = OraclePolicy(prefer=table.correct.mean(0)).choose(table, samples, repeated_budgets)
    result = ControllerPolicy(controllers=controllers).choose(table, samples, repeated_budgets)
    assert float((result == labels).float().mean()) > 0.9
