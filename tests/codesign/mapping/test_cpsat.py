"""Tests of `codesign.mapping.cpsat`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import MappingGoal, MappingProblem, cpsat
from sparseflow.codesign.mapping.local_search import NO_EFFORT, search_locally
from sparseflow.codesign.mapping.search import MappingRequest, StrategyResult
from sparseflow.errors import InputError
from tests.codesign.mapping.naive import GOALS, changed, objective, value, varied

pytest.importorskip("ortools")


def solve(
    problem: MappingProblem, goal: MappingGoal, *, seconds: float = 60.0, **overrides: object
) -> StrategyResult:
    return cpsat.solve_cpsat(
        MappingRequest(problem=problem, goal=goal, time_limit_s=seconds, **overrides)  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("seed", range(8))
def test_cpsat_finds_optimum(seed: int) -> None:
    problem = varied(seed, most_segments=6, most_slots=3)
    resolution = (problem.num_segments + problem.num_edges) / cpsat.TICKS
    for goal, (best, mapping) in zip(GOALS, exhaust(problem, GOALS), strict=True):
        result = solve(problem, goal)
        if mapping is None:
            assert result.infeasible and result.mapping is None
            continue
        assert result.finished and result.mapping is not None
        value_ms = objective(problem, goal, result.mapping.tolist())
        # Without a start a tick is a share of the longest that a mapping can take, not of the best.
        longest = np.where(problem.allowed, problem.latency_ms, 0.0).sum() + 10.0 * problem.num_edges
        longest *= 1.01 * (goal.period_weight + goal.serial_weight)
        assert best * (1.0 - 1e-12) <= value_ms <= best + longest * resolution
        assert best - longest * resolution <= result.lower_bound_ms <= best * (1.0 + 1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_cpsat_keeps_optimal_start(seed: int) -> None:
    problem = random_problem(7, 3, seed=seed, slack=1.2, skips=0.5)
    for goal in GOALS[:2]:
        ((best, mapping),) = exhaust(problem, [goal])
        result = solve(problem, goal, start=np.array(mapping))
        assert value(problem, goal, result.mapping) == pytest.approx(best, rel=1e-12)
        assert best * (1.0 - 1e-5) <= result.lower_bound_ms <= best * (1.0 + 1e-12)


def test_cpsat_timeout_is_not_infeasible() -> None:
    problem = random_problem(24, 8, seed=0, skips=0.3)
    start = search_locally(
        MappingRequest(problem=problem, goal=MappingGoal(), time_limit_s=60.0), effort=NO_EFFORT
    ).mapping
    assert start is not None
    late = solve(problem, MappingGoal(), seconds=1e-6, start=start, workers=1)
    assert late.mapping is not None and not late.finished and not late.infeasible
    assert late.lower_bound_ms <= value(problem, MappingGoal(), late.mapping)


@pytest.mark.parametrize("seed", range(8))
def test_find_feasible_mapping(seed: int) -> None:
    problem = varied(seed)
    if seed % 2:
        problem = changed(problem, limit_mb=np.floor(problem.limit_mb * 0.7))
    ((best, _),) = exhaust(problem, [MappingGoal()])
    result = cpsat.find_feasible_mapping(
        MappingRequest(problem=problem, goal=MappingGoal(), time_limit_s=60.0)
    )
    assert result.infeasible == math.isinf(best) and result.finished
    if result.mapping is not None:
        assert math.isfinite(objective(problem, MappingGoal(), result.mapping.tolist()))


def test_cpsat_with_too_many_variables_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpsat, "MAX_VARIABLES", 10)
    with pytest.raises(InputError, match="'local'"):
        solve(random_problem(5, 3, seed=0), MappingGoal())


def test_cpsat_with_other_tie_weights() -> None:
    problem = random_problem(6, 3, seed=4, slack=2.0)
    for weight in (1e-5, 0.0123, 1.0, 3.0):
        goal = MappingGoal(tie_weight=weight)
        ((best, mapping),) = exhaust(problem, [goal])
        result = solve(problem, goal, start=np.array(mapping))
        assert best * (1.0 - 1e-3) <= result.lower_bound_ms <= best * (1.0 + 1e-12)
