"""Encoding of latency budgets as vectors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cosine_similarity

from sparseflow.adaptive.controllers.budget_encoding import encode_budget
from sparseflow.errors import InputError

BUDGETS = st.floats(1.0, 1e6)


def cosine(first: float, other: float) -> float:
    a, b = encode_budget(torch.tensor([first, other], dtype=torch.float64)).double()
    return float(cosine_similarity(a, b, dim=0))


def test_similarity_separates_close_and_distant_budgets() -> None:
    assert cosine(170, 171) > 0.999
    assert cosine(170, 180) < 0.96
    assert cosine(170, 380) < 0.5


def test_encoding_has_shape_dtype_and_norm() -> None:
    encoding = encode_budget(torch.tensor([1.0, 33.3, 1e6]))
    assert encoding.shape == (3, 256) and encoding.dtype == torch.float32
    torch.testing.assert_close(encoding.norm(dim=1), torch.full((3,), 16.0))
    assert encode_budget(torch.tensor([5]), dim=8).shape == (1, 8)


def test_encoding_matches_formula() -> None:
    x = math.pi * math.log(180) / math.log(1e6)
    weights = [(4 - j) / j for j in (1, 2, 3)]
    scale = 6 / sum(weights)
    sines = [math.sqrt(scale * a) * math.sin(j * x) for j, a in enumerate(weights, start=1)]
    cosines = [math.sqrt(scale * a) * math.cos(j * x) for j, a in enumerate(weights, start=1)]
    torch.testing.assert_close(encode_budget(torch.tensor([180.0]), dim=6)[0], torch.tensor(sines + cosines))


@given(BUDGETS, st.floats(1.001, 1e6), st.floats(1.001, 1e6))
def test_similarity_decreases_with_distance(first: float, nearby: float, further: float) -> None:
    second, third = first * nearby, first * nearby * further
    # float32 does not separate vectors at the far end.
    if third <= 1e6 and third / first <= 9e5:
        assert cosine(first, second) > cosine(first, third)
        assert cosine(third, second) > cosine(third, first)


@given(st.lists(BUDGETS, min_size=1, max_size=20))
def test_encoding_is_finite(budgets: list[float]) -> None:
    assert bool(encode_budget(torch.tensor(budgets, dtype=torch.float64)).isfinite().all())


def test_budgets_one_permille_apart_differ() -> None:
    encoding = encode_budget(torch.logspace(0, 6, 13_817, dtype=torch.float64))
    assert len(encoding.unique(dim=0)) == 13_817


def test_budgets_out_of_range_are_clamped() -> None:
    encoding = encode_budget(torch.tensor([0.1, 1.0, 1e6, 1e9, math.inf]))
    assert torch.equal(encoding[0], encoding[1])
    assert torch.equal(encoding[2], encoding[3]) and torch.equal(encoding[2], encoding[4])


@pytest.mark.parametrize("wrong", [math.nan, 0.0, -1.0, -math.inf])
def test_invalid_budget_is_refused(wrong: float) -> None:
    with pytest.raises(InputError):
        encode_budget(torch.tensor([100.0, wrong]))


def test_invalid_shape_or_dim_is_refused() -> None:
    with pytest.raises(InputError):
        encode_budget(torch.ones(2, 2))
    for dim in (0, 1, 255):
        with pytest.raises(InputError):
            encode_budget(torch.ones(1), dim=dim)
