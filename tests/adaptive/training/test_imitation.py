"""Imitation: the loss is the oracle's likelihood, and it can be learnt by heart."""

from __future__ import annotations

import torch

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.policy.outcomes import QuantileLatencies, budget_grid, find_feasible
from sparseflow.adaptive.policy.policies import ControllerPolicy, OraclePolicy
from sparseflow.adaptive.training.joint import ImitationTargets
from tests.adaptive.synthetic import WIDTH, make_outcomes


def test_the_loss_is_the_likelihood_of_the_oracles_plans() -> None:
    table = make_outcomes(32)
    new_controllers = Controllers(table.space, width=WIDTH, model_id="m")
    new_controllers.fit_features(table.language, table.tokens)
    samples, budgets = torch.arange(32), torch.linspace(60.0, 300.0, 32)
    costs = QuantileLatencies.from_outcomes(table, 0.5)
    for case in (None, costs):
        allowed = None if case is None else find_feasible(case(table, samples), budgets)
        oracle = OraclePolicy(prefer=table.correct.mean(0)).choose(table, samples, budgets, allowed=allowed)
        actions = [table.space.action(table.space.plans[plan]) for plan in oracle.tolist()]
        rows = torch.tensor(
            [[action.tier, action.position, action.top_k, action.option] for action in actions]
        )
        with torch.no_grad():
            weighed = new_controllers.choose(
                table.language, budgets, table.get_latency_tokens, allowed=allowed, action=rows
            )
            loss = ImitationTargets(table, case).loss(new_controllers, samples, budgets)
        torch.testing.assert_close(loss, -weighed.log_prob.mean())
        assert weighed.plan.tolist() == oracle.tolist()


def test_labels_do_not_follow_luck() -> None:
    """With equally good plans for a request, the one that is good for most is the label, not the quickest."""
    table = make_outcomes(200)
    prefer = table.correct.mean(0)
    samples, budgets = torch.arange(200), torch.full((200,), 1000.0)
    labels = OraclePolicy(prefer=prefer).choose(table, samples, budgets)
    assert bool((prefer[labels] == prefer.max()).all())
    assert bool((prefer[OraclePolicy().choose(table, samples, budgets)] < prefer.max()).any())


def test_a_few_requests_are_learnt_by_heart() -> None:
    table = make_outcomes(8)
    new_controllers = Controllers(table.space, width=WIDTH, model_id="m")
    new_controllers.fit_features(table.language, table.tokens)
    imitation, budgets = ImitationTargets(table), budget_grid(table.budget_range_ms(), 4)
    samples, repeated_budgets = torch.arange(8).repeat_interleave(4), budgets.repeat(8)
    optimizer = torch.optim.Adam(new_controllers.parameters(), lr=5e-3)
    for _ in range(80):
        optimizer.zero_grad()
        imitation.loss(new_controllers, samples, repeated_budgets).backward()
        optimizer.step()
    labels = OraclePolicy(prefer=table.correct.mean(0)).choose(table, samples, repeated_budgets)
    result = ControllerPolicy(controllers=new_controllers).choose(table, samples, repeated_budgets)
    assert float((result == labels).float().mean()) > 0.9
