"""Tests of `codesign.layout.qap.terms`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseflow.codesign.layout.qap.kernels.tabu.reference import compute_changes
from sparseflow.codesign.layout.qap.problem import compute_cost
from sparseflow.codesign.layout.qap.terms import QapTerms
from sparseflow.errors import InputError
from tests.codesign.layout.qap.problems import KINDS, random_problem


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("floats", [False, True])
def test_terms_have_cost_of_problem(kind: str, floats: bool) -> None:
    flow, distance = random_problem(kind, 7, floats=floats)
    terms = QapTerms.from_matrices(flow, distance)
    for seed in range(5):
        p = np.random.default_rng(seed).permutation(7)
        q = terms.to_rows(p)
        np.testing.assert_array_equal(terms.from_rows(q), p)
        objective = (terms.a * terms.order_distances(terms.b, q)).sum()
        assert objective == pytest.approx(terms.scale * compute_cost(flow, distance, p), rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_terms_are_symmetric_or_antisymmetric(kind: str) -> None:
    terms = QapTerms.from_matrices(*random_problem(kind, 6))
    for number, (a, b) in enumerate(zip(terms.a, terms.b, strict=True)):
        sign = 1 if number < terms.num_symmetric else -1
        np.testing.assert_array_equal(a, sign * a.T)
        np.testing.assert_array_equal(b, sign * b.T)
    assert len(terms.a) == {"asymmetric": 2, "stack": 4}.get(kind, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64])
def test_swap_formula_matches_cost_difference(kind: str, dtype: torch.dtype) -> None:
    flow, distance = random_problem(kind, 6, seed=2)
    terms = QapTerms.from_matrices(flow, distance)
    starts = np.stack([np.random.default_rng(seed).permutation(6) for seed in range(3)])
    changes = compute_changes(
        torch.tensor(terms.a).to(dtype), torch.tensor(terms.b).to(dtype), torch.tensor(terms.to_rows(starts))
    )
    assert changes.dtype == dtype
    for start, changed in zip(starts, changes, strict=True):
        base = compute_cost(flow, distance, start)
        for u in range(6):
            for v in range(6):
                swapped = terms.to_rows(start)
                swapped[[u, v]] = swapped[[v, u]]
                after = compute_cost(flow, distance, terms.from_rows(swapped))
                assert changed[u, v].item() == terms.scale * (after - base)


def test_items_without_flow_come_last() -> None:
    flow, distance = random_problem("dummies", 8)
    terms = QapTerms.from_matrices(flow, distance)
    idle = ~(flow.any(0) | flow.any(1))
    assert terms.num_movers == 4 and set(terms.order[4:]) == set(np.flatnonzero(idle))
    assert terms.num_swaps == 4 * 3 // 2 + 4 * 4
    assert QapTerms.from_matrices(np.zeros((3, 3)), np.ones((3, 3))).num_swaps == 0


def test_sums_stay_below_big_m() -> None:
    flow, distance = random_problem("asymmetric", 8)
    terms = QapTerms.from_matrices(flow, distance)
    changes = compute_changes(torch.tensor(terms.a), torch.tensor(terms.b), torch.arange(8)[None])
    assert 2 * changes.abs().max() < terms.big_m


def test_working_dtype_is_exact() -> None:
    small = QapTerms.from_matrices([[0, 1], [1, 0]], [[0, 1], [1, 0]])
    assert {array.dtype for array in small.to_working_dtype()[:2]} == {np.dtype(np.float64)}
    huge = QapTerms.from_matrices(np.array([[0, 2**50], [2**50, 0]]), [[0, 1], [1, 0]])
    a, b, big_m = huge.to_working_dtype()
    assert a.dtype == b.dtype == np.int64 and type(big_m) is np.int64
    with pytest.raises(InputError):
        QapTerms.from_matrices(np.array([[0, 2**59], [2**59, 0]]), [[0, 1], [1, 0]])
    with pytest.raises(InputError, match="64"):
        QapTerms.from_matrices(np.full((2, 2), 1e200), np.full((2, 2), 1e200))
