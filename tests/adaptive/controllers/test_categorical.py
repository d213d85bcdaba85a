"""Masked choices: likelihoods, entropies, draws and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.adaptive.controllers.plan_distribution import (
    compute_entropy,
    gather_choice,
    masked_log_softmax,
    sample_categorical,
)
from sparseflow.errors import InputError, RunError


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    size = draw(st.integers(1, 6))
    logits = draw(st.lists(st.floats(-20, 20), min_size=size, max_size=size))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    return torch.tensor([logits], dtype=torch.float64), torch.tensor([mask])


@given(cases())
def test_against_a_softmax_of_what_is_left(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, mask = case
    log_probs, remaining_probs = masked_log_softmax(logits, mask), logits[mask].softmax(0)
    torch.testing.assert_close(log_probs[mask].exp(), remaining_probs)
    assert bool((log_probs[~mask] == -math.inf).all())
    torch.testing.assert_close(
        compute_entropy(log_probs)[0], -(remaining_probs * remaining_probs.log()).sum()
    )


@given(cases())
def test_gradients_are_finite_and_none_is_masked_ones(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    logits, mask = case
    logits.requires_grad_()
    log_probs = masked_log_softmax(logits, mask)
    (compute_entropy(log_probs).sum() + log_probs[mask].sum()).backward()
    assert logits.grad is not None and bool(logits.grad.isfinite().all())
    assert bool((logits.grad[~mask] == 0).all())


def test_entropy_has_the_gradient_of_its_formula() -> None:
    mask = torch.tensor([[True, False, True, True]])
    logits = torch.tensor([[0.3, 9.0, -1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: compute_entropy(masked_log_softmax(x, mask)), logits)


@given(cases(), st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_inverse_of_the_distribution(
    case: tuple[torch.Tensor, torch.Tensor], uniform: float
) -> None:
    logits, mask = case
    log_probs = masked_log_softmax(logits, mask)
    index = int(sample_categorical(log_probs, torch.tensor([uniform], dtype=torch.float64)))
    assert bool(mask[0, index])
    below = log_probs[0].exp().cumsum(0)
    assert below[index] >= uniform - 1e-12
    assert index == 0 or below[index - 1] <= uniform + 1e-12


def test_the_ends_of_a_draw() -> None:
    mask = torch.tensor([[False, True, True, False]] * 2)
    log_probs = masked_log_softmax(torch.tensor([[0.0, 0.1, 0.2, 0.0]] * 2), mask)
    ends = torch.tensor([0.0, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert sample_categorical(log_probs, ends).tolist() == [1, 2]


def test_the_likelihood_of_a_choice() -> None:
    log_probs = masked_log_softmax(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[True, False, True]]))
    torch.testing.assert_close(
        gather_choice(log_probs, torch.tensor([2])), torch.tensor([-math.log(1 + math.exp(-1))])
    )


def test_logits_that_are_masked_may_be_anything() -> None:
    mask = torch.tensor([[True, False, False, True]])
    log_probs = masked_log_softmax(torch.tensor([[0.0, math.nan, -math.inf, 0.0]]), mask)
    torch.testing.assert_close(log_probs[mask].exp(), torch.tensor([0.5, 0.5]))


def test_what_is_refused() -> None:
    with pytest.raises(InputError):
        masked_log_softmax(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
    with pytest.raises(RunError):
        masked_log_softmax(torch.tensor([[0.0, math.nan]]), torch.ones(1, 2, dtype=torch.bool))
