"""Gilmore-Lawler bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.codesign.layout.qap.problem import gilmore_lawler_bound
from tests.codesign.layout.qap.problems import KINDS, best_cost, chain, cliques, random_problem


@settings(deadline=None, max_examples=30)
@given(kind=st.sampled_from(KINDS), n=st.integers(1, 5), seed=st.integers(0, 999), floats=st.booleans())
def test_bound_is_below_every_permutation(kind: str, n: int, seed: int, floats: bool) -> None:
    flow, distance = random_problem(kind, n, seed, floats=floats)
    bound = gilmore_lawler_bound(flow, distance)
    assert isinstance(bound, float if floats else int)
    assert bound <= best_cost(flow, distance) + 1e-9


def test_bound_of_equal_flows_or_distances_is_tight() -> None:
    rng = np.random.default_rng(0)
    flow = rng.integers(0, 9, (6, 6))
    equal = np.full((6, 6), 3)
    assert gilmore_lawler_bound(flow, equal) == 3 * flow.sum()
    flow, distance, best = cliques(3, 4)
    assert gilmore_lawler_bound(flow, distance) == best
    flow, distance, best = chain(12)
    assert 0 < gilmore_lawler_bound(flow, distance) <= best


def test_bound_of_one_way_flows_uses_both_directions() -> None:
    distance = random_problem("symmetric", 6)[1]
    np.fill_diagonal(distance, 0)
    distance = np.abs(distance)
    flow = np.triu(random_problem("asymmetric", 6)[0], 1)
    flow = np.abs(flow)
    both = gilmore_lawler_bound(flow + flow.T, distance)
    assert gilmore_lawler_bound(flow, distance) >= -(-both // 2)


def test_bound_of_huge_integers_is_valid() -> None:
    flow = np.array([[0, 2**57 + 1], [2**57 + 1, 0]])
    distance = np.array([[0, 1], [1, 0]])
    bound = gilmore_lawler_bound(flow, distance)
    assert isinstance(bound, int)
    assert bound <= 2**58 + 2 <= bound + 2**20


@pytest.mark.parametrize("n", [1, 2])
def test_bound_of_tiny_problems(n: int) -> None:
    flow, distance = random_problem("asymmetric", n)
    assert gilmore_lawler_bound(flow, distance) <= best_cost(flow, distance)
