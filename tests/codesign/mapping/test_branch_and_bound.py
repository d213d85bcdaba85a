"""Tests of `codesign.mapping.branch_and_bound`."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import MappingGoal, MappingProblem
from sparseflow.codesign.mapping.arrays import build_arrays
from sparseflow.codesign.mapping.branch_and_bound import branch_and_bound
from sparseflow.codesign.mapping.search import MappingRequest, StrategyResult
from sparseflow.errors import InputError
from tests.codesign.mapping.naive import GOALS, changed, objective, value, varied


def solve(problem: MappingProblem, goal: MappingGoal, **overrides: object) -> StrategyResult:
    return branch_and_bound(MappingRequest(problem=problem, goal=goal, time_limit_s=60.0, **overrides))  # pyright: ignore[reportArgumentType]


def assert_the_optimum(problem: MappingProblem) -> None:
    for goal, (best, mapping) in zip(GOALS, exhaust(problem, GOALS), strict=True):
        result = solve(problem, goal)
        if mapping is None:
            assert result.infeasible and result.mapping is None
            continue
        assert result.finished and result.mapping is not None
        assert value(problem, goal, result.mapping) == pytest.approx(best, rel=1e-9)
        assert objective(problem, goal, result.mapping.tolist()) == pytest.approx(best, rel=1e-9)
        assert objective(problem, goal, mapping) == pytest.approx(best, rel=1e-12)
        assert result.lower_bound_ms == value(problem, goal, result.mapping)
        # From a start, be it the optimum itself.
        repeated = solve(problem, goal, start=result.mapping)
        assert value(problem, goal, repeated.mapping) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(26))
def test_branch_and_bound_finds_optimum(seed: int) -> None:
    assert_the_optimum(varied(seed))


@pytest.mark.parametrize("seed", range(4))
def test_branch_and_bound_finds_optimum_of_a_million_mappings(seed: int) -> None:
    assert_the_optimum(random_problem(10, 4, seed=seed, skips=0.5 * (seed % 2), slack=1.1))


@pytest.mark.parametrize("seed", range(12))
def test_branch_and_bound_proves_infeasibility(seed: int) -> None:
    problem = varied(seed, most_segments=6)
    assert_the_optimum(changed(problem, limit_mb=np.floor(problem.limit_mb * 0.6)))


def test_equal_slots_are_detected() -> None:
    distances = 1.0 - np.eye(4)
    problem = MappingProblem.chain(
        latency_ms=np.ones((3, 4)) * [[1.0], [2.0], [3.0]],
        memory_mb=[1.0, 2.0, 3.0],
        limit_mb=[5.0, 5.0, 4.0, 5.0],
        traffic_bytes=[1.0, 2.0],
        fixed_ms=distances,
        ms_per_byte=distances,
    )
    assert build_arrays(problem).equal_slot.tolist() == [-1, 0, -1, 1]
    # The way from 0 to 1 is not the way from 0 to 3.
    fixed = distances.copy()
    fixed[0, 1] = fixed[1, 0] = 2.0
    assert build_arrays(changed(problem, fixed_ms=fixed)).equal_slot.tolist() == [-1, 0, -1, -1]


def test_unfinished_search_has_bound() -> None:
    problem = random_problem(24, 8, seed=0, skips=0.3)
    start = branch_and_bound(
        MappingRequest(problem=problem, goal=MappingGoal(), time_limit_s=60.0), max_nodes=500
    )
    assert not start.finished and not start.infeasible
    assert start.mapping is not None
    assert 0.0 < start.lower_bound_ms < value(problem, MappingGoal(), start.mapping)


def test_large_problem_is_unfinished() -> None:
    with pytest.raises(InputError, match="'exact'"):
        exhaust(random_problem(24, 8, seed=0), [MappingGoal()])
