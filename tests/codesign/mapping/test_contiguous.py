"""Tests of `codesign.mapping.contiguous`."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
import pytest

from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import MappingGoal, MappingProblem, MappingSolver
from sparseflow.codesign.mapping.contiguous import solve_contiguous
from sparseflow.codesign.mapping.search import MappingRequest
from sparseflow.errors import InputError
from tests.codesign.mapping.naive import GOALS, best_contiguous, changed, value, varied


def solve(problem: MappingProblem, goal: MappingGoal) -> np.ndarray | None:
    return solve_contiguous(MappingRequest(problem=problem, goal=goal, time_limit_s=60.0)).mapping


def assert_contiguous(mapping: np.ndarray) -> None:
    runs = [slot for slot, _ in groupby(mapping.tolist())]
    assert len(set(runs)) == len(runs)


@pytest.mark.parametrize("seed", range(13))
def test_solve_contiguous_of_chain_is_optimal(seed: int) -> None:
    problem = varied(seed, most_segments=6)
    ends = np.arange(1, problem.num_segments)
    problem = changed(problem, src=ends - 1, dst=ends, traffic_bytes=problem.traffic_bytes[: len(ends)])
    for goal in GOALS:
        result = solve(problem, goal)
        assert value(problem, goal, result) == pytest.approx(best_contiguous(problem, goal), rel=1e-12)
        if result is not None:
            assert_contiguous(result)


@pytest.mark.parametrize("seed", range(10))
def test_solve_contiguous_on_uniform_network_is_optimal(seed: int) -> None:
    problem = random_problem(6, 3, seed=seed, skips=1.0, slack=1.3 + seed % 3)
    distances = 1.0 - np.eye(3)
    problem = changed(problem, fixed_ms=0.03 * distances, ms_per_byte=2e-6 * distances)
    for goal in GOALS:
        assert value(problem, goal, solve(problem, goal)) == pytest.approx(best_contiguous(problem, goal))


@pytest.mark.parametrize("seed", range(10))
def test_solve_contiguous_of_any_problem_is_feasible(seed: int) -> None:
    problem = varied(seed, most_segments=7)
    for goal in GOALS:
        result = solve(problem, goal)
        if result is not None:
            assert math.isfinite(value(problem, goal, result))
            assert_contiguous(result)


def test_solve_contiguous_with_too_many_slots_is_refused() -> None:
    with pytest.raises(InputError, match="12"):
        solve(random_problem(14, 13, seed=0), MappingGoal())


def test_solve_contiguous_ignores_empty_slots() -> None:
    problem = random_problem(6, 15, seed=0, slack=3.0)
    limit = problem.limit_mb.copy()
    limit[4:] = 0.0
    limit[:4] = 1e4
    result = MappingSolver(strategy="dp").solve_mapping(changed(problem, limit_mb=limit))
    assert result.strategy == "dp" and max(result.mapping) < 4


def test_solve_contiguous_without_fitting_runs_is_refused() -> None:
    # 30 + 30 and 20 + 20 fit, in this order only if not in runs.
    problem = MappingProblem.chain(
        latency_ms=np.ones((4, 2)),
        memory_mb=[30.0, 20.0, 30.0, 20.0],
        limit_mb=[60.0, 40.0],
        traffic_bytes=np.zeros(3),
        fixed_ms=np.zeros((2, 2)),
        ms_per_byte=np.zeros((2, 2)),
    )
    with pytest.raises(InputError):
        MappingSolver(strategy="dp").solve_mapping(problem)
    assert MappingSolver().solve_mapping(problem).mapping == [0, 1, 0, 1]
