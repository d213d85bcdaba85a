"""Terms stand for the problem they were made of, and changes are what swaps change."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseflow.codesign.layout.qap.kernels.tabu.reference import changes
from sparseflow.codesign.layout.qap.problem import cost
from sparseflow.codesign.layout.qap.terms import Terms
from sparseflow.errors import InputError
from tests.codesign.layout.qap.problems import KINDS, random_problem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", [False, True])
def test_terms_are_worth_the_problem(kind: str, floats: bool) -> None:
    flow, distance = random_problem(kind, 7, floats=floats)
    terms = Terms.of(flow, distance)
    for seed in range(5):
        p = np.random.default_rng(seed).permutation(7)
        q = terms.inside(p)
        np.testing.assert_array_equal(terms.outside(q), p)
        worth = (terms.a * terms.ordered(terms.b, q)).sum()
        assert worth == pytest.approx(terms.scale * cost(flow, distance, p), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_term_is_symmetric_or_antisymmetric(kind: str) -> None:
    terms = Terms.of(*random_problem(kind, 6))
    for number, (a, b) in enumerate(zip(terms.a, terms.b, strict=True)):
        sign = 1 if number < terms.symmetric else -1
        np.testing.assert_array_equal(a, sign * a.T)
        np.testing.assert_array_equal(b, sign * b.T)
    assert len(terms.a) == {"asymmetric": 2, "stack": 4}.get(kind, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
def test_changes_are_what_swaps_change(kind: str, dtype: torch.dtype) -> None:
    flow, distance = random_problem(kind, 6, seed=2)
    terms = Terms.of(flow, distance)
    starts = np.stack([np.random.default_rng(seed).permutation(6) for seed in range(3)])
    found = changes(
        torch.tensor(terms.a).to(dtype), torch.tensor(terms.b).to(dtype), torch.tensor(terms.inside(starts))
    )
    assert found.dtype == dtype
    for start, changed in zip(starts, found, strict=True):
        base = cost(flow, distance, start)
        for u in range(6):
            for v in range(6):
                swapped = terms.inside(start)
                swapped[[u, v]] = swapped[[v, u]]
                after = cost(flow, distance, terms.outside(swapped))
                assert changed[u, v].item() == terms.scale * (after - base)


def test_dummies_come_last_and_are_not_swapped_with_each_other() -> None:
    flow, distance = random_problem("dummies", 8)
    terms = Terms.of(flow, distance)
    idle = ~(flow.any(0) | flow.any(1))
    assert terms.movers == 4 and set(terms.order[4:]) == set(np.flatnonzero(idle))
    assert terms.swaps == 4 * 3 // 2 + 4 * 4
    assert Terms.of(np.zeros((3, 3)), np.ones((3, 3))).swaps == 0


def test_what_a_search_adds_up_stays_below_the_wall() -> None:
    flow, distance = random_problem("asymmetric", 8)
    terms = Terms.of(flow, distance)
    found = changes(torch.tensor(terms.a), torch.tensor(terms.b), torch.arange(8)[None])
    assert 2 * found.abs().max() < terms.wall


def test_exact_dtypes_are_chosen() -> None:
    small = Terms.of([[0, 1], [1, 0]], [[0, 1], [1, 0]])
    assert {array.dtype for array in small.working()[:2]} == {np.dtype(np.float64)}
    huge = Terms.of(np.array([[0, 2**50], [2**50, 0]]), [[0, 1], [1, 0]])
    a, b, wall = huge.working()
    assert a.dtype == b.dtype == np.int64 and type(wall) is np.int64
    with pytest.raises(InputError):
        Terms.of(np.array([[0, 2**59], [2**59, 0]]), [[0, 1], [1, 0]])
    with pytest.raises(InputError, match="64"):
        Terms.of(np.full((2, 2), 1e200), np.full((2, 2), 1e200))
