"""Tests of `codesign.layout.qap.assignment`."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.codesign.layout.qap.assignment import assign
from sparseflow.codesign.layout.qap.problem import compute_cost, pad_flow
from sparseflow.errors import InputError, MissingExtraError
from tests.codesign.layout.qap.problems import KINDS, best_cost, chain, cliques, random_problem

METHODS = ("auto", "tabu", "annealing")


@settings(deadline=None, max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    n=st.integers(2, 6),
    seed=st.integers(0, 999),
    floats=st.booleans(),
    method=st.sampled_from(METHODS),
)
def test_assign_solves_small_problems(kind: str, n: int, seed: int, floats: bool, method: str) -> None:
    flow, distance = random_problem(kind, n, seed, floats=floats)
    result = assign(flow, distance, method=method, restarts=4, seed=seed)
    assert result.cost == pytest.approx(best_cost(flow, distance), rel=1e-9, abs=1e-9)
    assert isinstance(result.cost, float if floats else int)
    assert result.cost == compute_cost(flow, distance, result.permutation)
    assert result.lower_bound <= result.cost and result.gap >= 0.0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("floats", [False, True])
def test_assign_finds_known_optima(method: str, floats: bool) -> None:
    flow, distance, best = cliques(4, 5)
    result = assign(flow * (0.3 if floats else 1), distance, method=method, restarts=4)
    assert result.cost == pytest.approx(best * (0.3 if floats else 1))
    assert result.gap == pytest.approx(0.0, abs=1e-9)
    flow, distance, best = chain(10)
    assert assign(flow, distance, method=method, restarts=6, iterations=5000).cost == best


def test_assign_is_deterministic_for_a_seed() -> None:
    flow, distance = random_problem("symmetric", 14)
    for method in METHODS:
        first, repeated, other = (
            assign(flow, distance, method=method, restarts=3, iterations=40, seed=seed) for seed in (1, 1, 2)
        )
        np.testing.assert_array_equal(first.permutations, repeated.permutations)
        assert first.costs == repeated.costs
        assert not np.array_equal(first.permutations, other.permutations)
        # More restarts go on where fewer ended.
        more = assign(flow, distance, method=method, restarts=4, iterations=40, seed=1)
        np.testing.assert_array_equal(more.permutations[:3], first.permutations)


def test_assignment_fields_are_consistent() -> None:
    flow, distance = random_problem("asymmetric", 9)
    result = assign(flow, distance, method="tabu", restarts=3, iterations=50)
    assert result.finished and result.elapsed_s > 0.0
    assert result.permutations.shape == (3, 9) and result.permutation.dtype == np.int64
    assert list(result.costs) == [compute_cost(flow, distance, p) for p in result.permutations]
    assert result.cost == min(result.costs)
    assert result.evaluations == 3 * 50 * 36
    assert result.gap == pytest.approx((result.cost - result.lower_bound) / abs(result.cost))


@pytest.mark.parametrize("method", METHODS)
def test_assign_within_budget_returns_best_so_far(method: str) -> None:
    flow, distance = random_problem("symmetric", 12)
    result = assign(flow, distance, method=method, restarts=3, iterations=2**29, budget_s=0.05)
    assert not result.finished
    assert 1 <= len(result.costs) <= 3
    assert result.cost == compute_cost(flow, distance, result.permutation)
    assert 0 < result.evaluations < 2**29 * 66


@pytest.mark.parametrize("method", METHODS)
def test_assign_is_no_worse_than_start(method: str) -> None:
    flow, distance, best = chain(30)
    order = assign(flow, distance, method="tabu", restarts=2, iterations=200).permutation
    result = assign(flow, distance, method=method, restarts=1, iterations=1, start=order)
    assert result.cost <= compute_cost(flow, distance, order)
    # The best permutation is known: things in the order in which the chain runs.
    ends = np.flatnonzero(flow.sum(0) == 1)
    trajectory = [int(ends[0])]
    while len(trajectory) < 30:
        trajectory.append(
            next(int(k) for k in np.flatnonzero(flow[trajectory[-1]]) if int(k) not in trajectory)
        )
    perfect = np.argsort(trajectory)
    assert assign(flow, distance, method=method, restarts=2, iterations=3, start=perfect).cost == best


@pytest.mark.parametrize("method", METHODS)
def test_assign_padded_flow(method: str) -> None:
    flow = pad_flow(random_problem("symmetric", 3)[0], 6)
    distance = random_problem("symmetric", 6)[1]
    result = assign(flow, distance, method=method, restarts=4)
    assert result.cost == best_cost(flow, distance)
    # Swaps of two dummies are none.
    assert result.evaluations % (3 + 9) == 0


@pytest.mark.parametrize("floats", [False, True])
def test_assign_without_flow(floats: bool) -> None:
    kind: Any = np.float64 if floats else np.int64
    result = assign(kind([[3]]), kind([[5]]), restarts=2)
    assert (result.cost, result.lower_bound, result.gap, result.evaluations, result.finished) == (
        15,
        15,
        0.0,
        0,
        True,
    )
    assert result.permutations.tolist() == [[0], [0]]
    idle = assign(np.zeros((4, 4), kind), np.ones((4, 4), kind), start=[3, 1, 0, 2])
    assert (idle.cost, idle.gap, idle.permutation.tolist()) == (0, 0.0, [3, 1, 0, 2])
    # All permutations cost the same.
    equal = assign(np.ones((5, 5), kind), np.ones((5, 5), kind), iterations=20)
    assert (equal.cost, equal.gap) == (25, 0.0)


def test_assign_huge_integers_is_exact() -> None:
    flow, distance, best = chain(7)
    result = assign(flow * (2**45 + 1), distance, restarts=4, iterations=300)
    assert result.cost == best * (2**45 + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "greedy"}, r"`method` \(='greedy'\)"),
        ({"restarts": 0}, r"`restarts` \(=0\)"),
        ({"iterations": 0}, r"`iterations` \(=0\)"),
        ({"iterations": 2**30}, r"`iterations` \(=1073741824\)"),
        ({"budget_s": 0.0}, r"`budget_s` \(=0\.0\)"),
        ({"budget_s": float("nan")}, r"`budget_s` \(=nan\)"),
        ({"seed": -1}, r"`seed` \(=-1\)"),
        ({"start": [0, 0, 1]}, r"a permutation of 0 … 2"),
    ],
)
def test_invalid_arguments_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        assign(np.eye(3), np.eye(3), **settings)


@pytest.mark.parametrize("package", ["numba", "scipy"])
def test_missing_package_names_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    flow, distance, _ = chain(4)
    with pytest.raises(MissingExtraError, match=rf"`{package}`"):
        assign(flow, distance, iterations=2)
