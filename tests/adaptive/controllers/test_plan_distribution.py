"""Plans as paths: every allowed plan can be reached, and nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.controllers.plan_distribution import SHAPE, PlanDistribution, PlanPath
from sparseflow.adaptive.plan.space import PlanAction, PlanSpace
from sparseflow.errors import InputError, PlanError
from tests.adaptive.synthetic import make_space

SPACES = [
    make_space(),
    make_space(depth=4, top_k=3, tiers=1),
    make_space(depth=2, top_k=1, tiers=0),
    make_space(depth=12, top_k=2),
]


@pytest.mark.parametrize("plans", SPACES, ids=len)
def test_plans_and_actions_are_each_others(plans: PlanSpace) -> None:
    choices = PlanDistribution(plans)
    assert choices.plans(choices.actions).tolist() == list(range(len(plans)))
    for number, row in enumerate(choices.actions.tolist()):
        assert plans.plan(PlanAction(*row)) == plans.plans[number]
    assert int((choices.grid >= 0).sum()) == len(plans)


def test_the_document_has_225_plans() -> None:
    assert len(PlanDistribution(make_space()).actions) == 225


@pytest.mark.parametrize("plans", SPACES, ids=len)
def test_an_action_of_no_plan(plans: PlanSpace) -> None:
    choices = PlanDistribution(plans)
    missing = (choices.grid < 0).nonzero()
    if len(missing):
        with pytest.raises(PlanError):
            choices.plans(missing[:1])


def allowed_of(choices: PlanDistribution, seed: int, rows: int = 3) -> torch.Tensor:
    random = np.random.default_rng(seed)
    actual = torch.from_numpy(random.random((rows, len(choices.actions))) < random.choice([0.02, 0.3, 1.0]))
    actual[:, int(random.integers(actual.shape[1]))] = True
    return actual


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(range(len(SPACES))))
def test_paths_sum_to_one_over_the_allowed_plans(seed: int, which: int) -> None:
    """The probability of every plan by enumeration, against conditional softmaxes written out."""
    choices = PlanDistribution(SPACES[which])
    allowed = allowed_of(choices, seed, rows=1)
    random = np.random.default_rng(seed)
    logits = [torch.from_numpy(random.normal(size=(1, size))) for size in SHAPE]
    allowed_actions = choices.actions[allowed[0]]
    path = PlanPath(choices.masks(allowed), torch.zeros(len(allowed_actions), dtype=torch.int64))
    for item, choice in zip(logits, allowed_actions.T, strict=True):
        path.step(item.expand(len(allowed_actions), -1), choice=choice)
    assert isinstance(path.log_prob, torch.Tensor) and isinstance(path.entropy, torch.Tensor)
    torch.testing.assert_close(path.log_prob.exp().sum(), torch.tensor(1.0, dtype=torch.float64))

    all_paths = {tuple(row) for row in allowed_actions.tolist()}
    for row, log_prob, entropy in zip(allowed_actions.tolist(), path.log_prob, path.entropy, strict=True):
        target, spread = 0.0, 0.0
        for step, scores in enumerate(logits):
            open_to = sorted({other[step] for other in all_paths if other[:step] == tuple(row[:step])})
            probability = scores[0, open_to].softmax(0)
            target += float(probability[open_to.index(row[step])].log())
            spread -= float((probability * probability.log()).sum())
        assert float(log_prob) == pytest.approx(target)
        assert float(entropy) == pytest.approx(spread)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_what_is_drawn_is_allowed(seed: int) -> None:
    choices = PlanDistribution(make_space())
    allowed = allowed_of(choices, seed)
    random = np.random.default_rng(seed)
    rows = torch.arange(3).repeat_interleave(20)
    path = PlanPath(choices.masks(allowed), rows)
    for size in SHAPE:
        path.step(
            torch.from_numpy(random.normal(size=(60, size))), uniform=torch.from_numpy(random.random(60))
        )
    plans = choices.plans(torch.stack(path.choices, 1))
    assert bool(allowed[rows, plans].all())


def test_draws_have_the_frequencies_of_their_likelihood() -> None:
    choices = PlanDistribution(make_space(depth=2, top_k=3, tiers=2))
    random = np.random.default_rng(0)
    logits = [torch.from_numpy(random.normal(size=(1, size))).expand(20_000, -1) for size in SHAPE]
    path = PlanPath(choices.masks(), torch.zeros(20_000, dtype=torch.int64))
    for logit in logits:
        path.step(logit, uniform=torch.from_numpy(random.random(20_000)))
    assert isinstance(path.log_prob, torch.Tensor)
    plans = choices.plans(torch.stack(path.choices, 1))
    for plan in range(len(choices.actions)):
        probability = float(path.log_prob[plans == plan][0].exp())
        assert float((plans == plan).float().mean()) == pytest.approx(probability, abs=0.015)


def test_a_step_that_was_decided_elsewhere() -> None:
    choices = PlanDistribution(make_space())
    path = PlanPath(choices.masks(), torch.zeros(1, dtype=torch.int64))
    path.append(torch.tensor([2]))
    path.append(torch.tensor([4]))
    path.step(torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0]]))
    path.step(torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0]]))
    # The last position has one count of blocks only.
    assert [int(choice) for choice in path.choices] == [2, 4, 2, 0]


def test_masks_are_those_of_the_document() -> None:
    tiers, positions, top_ks, options = PlanDistribution(make_space()).masks()
    assert bool(tiers.all()) and bool(positions.all()) and bool(top_ks.all())
    for tier, position, top_k in itertools.product(range(3), range(5), range(5)):
        assert options[0, tier, position, top_k].sum() == 5 - position


def test_what_is_refused() -> None:
    choices = PlanDistribution(make_space())
    with pytest.raises(InputError):
        choices.masks(torch.ones(1, 224, dtype=torch.bool))
    with pytest.raises(InputError):
        choices.masks(torch.zeros(1, 225, dtype=torch.bool))
