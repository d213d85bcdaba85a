"""Masked choices, and plans as paths through the grid."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.adaptive.controllers.plan_distribution import (
    SHAPE,
    PlanDistribution,
    PlanPath,
    compute_entropy,
    mask_logits,
    sample_categorical,
)
from sparseflow.adaptive.plan.space import PlanAction, PlanSpace
from sparseflow.errors import InputError, PlanError, RunError
from tests.adaptive.synthetic import make_space

SPACES = [
    make_space(),
    make_space(depth=4, top_k=3, tiers=1),
    make_space(depth=2, top_k=1, tiers=0),
    make_space(depth=12, top_k=2),
]


def masked_log_softmax(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    return mask_logits(logits, allowed).log_softmax(-1)


@st.composite
def masked_choices(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    size = draw(st.integers(1, 6))
    logits = draw(st.lists(st.floats(-20, 20), min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    return torch.tensor([logits], dtype=torch.float64), torch.tensor([mask])


@given(masked_choices())
def test_masked_softmax_matches_softmax_of_allowed_logits(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, mask = case
    log_probs, remaining_probs = masked_log_softmax(logits, mask), logits[mask].softmax(0)
    torch.testing.assert_close(log_probs[mask].exp(), remaining_probs)
    assert bool((log_probs[~mask] == -math.inf).all())
    torch.testing.assert_close(
        compute_entropy(log_probs)[0], -(remaining_probs * remaining_probs.log()).sum()
    )


@given(masked_choices())
def test_gradients_are_finite_and_zero_where_masked(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, mask = case
    logits.requires_grad_()
    log_probs = masked_log_softmax(logits, mask)
    (compute_entropy(log_probs).sum() + log_probs[mask].sum()).backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
    assert bool((logits.grad[~mask] == 0).all())


def test_entropy_passes_gradcheck() -> None:
    mask = torch.tensor([[True, False, True, True]])
    logits = torch.tensor([[0.3, 9.0, -1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: compute_entropy(masked_log_softmax(x, mask)), logits)


@given(masked_choices(), st.floats(0, 1, exclude_max=True))
def test_sample_categorical_is_inverse_transform(
    case: tuple[torch.Tensor, torch.Tensor], uniform: float
) -> None:
    logits, mask = case
    log_probs = masked_log_softmax(logits, mask)
    index = int(sample_categorical(log_probs, torch.tensor([uniform], dtype=torch.float64)))
    assert bool(mask[0, index])
    below = log_probs[0].exp().cumsum(0)
    assert below[index] >= uniform - 1e-12
    assert index == 0 or below[index - 1] <= uniform + 1e-12


def test_sample_categorical_at_ends_is_allowed() -> None:
    mask = torch.tensor([[False, True, True, False]] * 2)
    log_probs = masked_log_softmax(torch.tensor([[0.0, 0.1, 0.2, 0.0]] * 2), mask)
    ends = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert sample_categorical(log_probs, ends).tolist() == [1, 2]


def test_masked_logits_may_be_nan_or_infinite() -> None:
    mask = torch.tensor([[True, False, False, True]])
    log_probs = masked_log_softmax(torch.tensor([[0.0, math.nan, -math.inf, 0.0]]), mask)
    torch.testing.assert_close(log_probs[mask].exp(), torch.tensor([0.5, 0.5]))


def test_mask_logits_without_choice_or_with_nan_is_refused() -> None:
    with pytest.raises(InputError):
        masked_log_softmax(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
    with pytest.raises(RunError):
        masked_log_softmax(torch.tensor([[0.0, math.nan]]), torch.ones(1, 2, dtype=torch.bool))


@pytest.mark.parametrize("plans", SPACES, ids=len)
def test_plans_and_actions_are_inverse(plans: PlanSpace) -> None:
    choices = PlanDistribution(plans)
    assert choices.plans(choices.actions).tolist() == list(range(len(plans)))
    for number, row in enumerate(choices.actions.tolist()):
        assert plans.plan(PlanAction(*row)) == plans.plans[number]
    assert int((choices.grid >= 0).sum()) == len(plans)


def test_space_of_16_blocks_has_225_plans() -> None:
    assert len(PlanDistribution(make_space()).actions) == 225


@pytest.mark.parametrize("plans", SPACES, ids=len)
def test_action_without_plan_is_refused(plans: PlanSpace) -> None:
    choices = PlanDistribution(plans)
    missing = (choices.grid < 0).nonzero()
    if len(missing):
        with pytest.raises(PlanError):
            choices.plans(missing[:1])


def allowed_of(choices: PlanDistribution, seed: int, rows: int = 3) -> torch.Tensor:
    random = np.random.default_rng(seed)
    allowed = torch.from_numpy(random.random((rows, len(choices.actions))) < random.choice([0.02, 0.3, 1.0]))
    allowed[:, int(random.integers(allowed.shape[1]))] = True
    return allowed


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(range(len(SPACES))))
def test_path_probabilities_match_conditional_softmaxes(seed: int, which: int) -> None:
    """Compares the probability of every plan with conditional softmaxes, by enumeration."""
    choices = PlanDistribution(SPACES[which])
    allowed = allowed_of(choices, seed, rows=1)
    random = np.random.default_rng(seed)
    logits = [torch.from_numpy(random.normal(size=(1, size))) for size in SHAPE]
    allowed_actions = choices.actions[allowed[0]]
    path = PlanPath(choices.masks(allowed), torch.zeros(len(allowed_actions), dtype=torch.int64))
    for scores, choice in zip(logits, allowed_actions.T, strict=True):
        path.step(scores.expand(len(allowed_actions), -1), choice=choice)
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
def test_sampled_plans_are_allowed(seed: int) -> None:
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


def test_sampled_frequencies_match_probabilities() -> None:
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


def test_path_continues_given_choices() -> None:
    choices = PlanDistribution(make_space())
    path = PlanPath(choices.masks(), torch.zeros(1, dtype=torch.int64))
    path.choices += [torch.tensor([2]), torch.tensor([4])]
    path.step(torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0]]))
    path.step(torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0]]))
    # The last position has a single block count.
    assert [int(choice) for choice in path.choices] == [2, 4, 2, 0]


def test_masks_allow_existing_block_counts() -> None:
    tiers, positions, top_ks, options = PlanDistribution(make_space()).masks()
    assert bool(tiers.all()) and bool(positions.all()) and bool(top_ks.all())
    for tier, position, top_k in itertools.product(range(3), range(5), range(5)):
        assert options[0, tier, position, top_k].sum() == 5 - position


def test_masks_invalid_allowed_is_refused() -> None:
    choices = PlanDistribution(make_space())
    with pytest.raises(InputError):
        choices.masks(torch.ones(1, 224, dtype=torch.bool))
    with pytest.raises(InputError):
        choices.masks(torch.zeros(1, 225, dtype=torch.bool))
