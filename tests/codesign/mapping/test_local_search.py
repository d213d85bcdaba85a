"""Tests of `codesign.mapping.local_search`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import MappingGoal, MappingProblem, local_search
from sparseflow.codesign.mapping.local_search import NO_EFFORT, SearchEffort, search_locally
from sparseflow.codesign.mapping.search import MappingRequest, StrategyResult
from tests.codesign.mapping.naive import GOALS, changed, objective, value, varied

LITTLE = SearchEffort(rounds=2, steps=2_000, neighborhoods=0)


def solve(
    problem: MappingProblem, goal: MappingGoal, *, effort: SearchEffort = LITTLE, **overrides: object
) -> StrategyResult:
    request = MappingRequest(problem=problem, goal=goal, time_limit_s=60.0, **overrides)  # pyright: ignore[reportArgumentType]
    return search_locally(request, effort=effort)


@pytest.mark.parametrize("seed", range(10))
def test_search_locally_is_feasible_and_near_optimum(seed: int) -> None:
    problem = varied(seed)
    for goal, (best, _) in zip(GOALS, exhaust(problem, GOALS), strict=True):
        result = solve(problem, goal)
        if math.isinf(best):
            assert result.mapping is None
            continue
        # It may miss the few that fit where next to none does; what it returns always fits.
        if result.mapping is not None:
            value_ms = objective(problem, goal, result.mapping.tolist())
            assert value_ms == pytest.approx(value(problem, goal, result.mapping), rel=1e-12)
            assert best * (1.0 - 1e-9) <= value_ms <= best * 1.25


@pytest.mark.parametrize("seed", range(8))
def test_search_locally_with_tight_memory(seed: int) -> None:
    problem = random_problem(20, 5, seed=seed, slack=1.02)
    result = solve(problem, MappingGoal())
    assert result.mapping is not None and math.isfinite(
        objective(problem, MappingGoal(), result.mapping.tolist())
    )


def test_search_locally_is_no_worse_than_start() -> None:
    problem = random_problem(10, 4, seed=5, slack=1.3)
    for goal in GOALS:
        ((best, mapping),) = exhaust(problem, [goal])
        result = solve(
            problem, goal, effort=SearchEffort(rounds=1, steps=100, neighborhoods=1), start=np.array(mapping)
        )
        assert value(problem, goal, result.mapping) == pytest.approx(best, rel=1e-12)


def test_search_locally_is_deterministic_for_a_seed() -> None:
    problem = random_problem(30, 6, seed=1, skips=0.5)
    first, repeated = (solve(problem, MappingGoal(), seed=3) for _ in range(2))
    assert first.mapping is not None and repeated.mapping is not None
    assert first.mapping.tolist() == repeated.mapping.tolist()
    short = SearchEffort(rounds=1, steps=400, neighborhoods=0)
    rows = [solve(problem, MappingGoal(), seed=seed, effort=short).mapping for seed in range(4)]
    assert len({tuple(mapping.tolist()) for mapping in rows if mapping is not None}) > 1


def test_search_locally_ends_at_time_limit() -> None:
    problem = random_problem(40, 6, seed=2, slack=1.2)
    values = [
        value(problem, MappingGoal(), solve(problem, MappingGoal(), effort=effort).mapping)
        for effort in (NO_EFFORT, LITTLE)
    ]
    assert values[1] <= values[0]
    endless = SearchEffort(rounds=1, steps=10**9, neighborhoods=10**9)
    late = search_locally(
        MappingRequest(problem=problem, goal=MappingGoal(), time_limit_s=1e-9), effort=endless
    )
    assert late.mapping is not None and not late.finished


def test_search_locally_uses_connected_slots_only() -> None:
    # Slots in a ring, one way around: 0 -> 1 -> 2 -> 3 -> 0.
    problem = random_problem(9, 4, seed=0, slack=1.4)
    fixed = np.full((4, 4), np.inf)
    np.fill_diagonal(fixed, 0.0)
    for slot in range(4):
        fixed[slot, (slot + 1) % 4] = 0.1
    ring = changed(problem, fixed_ms=fixed)
    for goal in GOALS[:2]:
        ((best, _),) = exhaust(ring, [goal])
        result = solve(ring, goal, effort=SearchEffort(rounds=4, steps=25_000, neighborhoods=0))
        assert result.mapping is not None
        assert best * (1.0 - 1e-9) <= objective(ring, goal, result.mapping.tolist()) <= best * 1.1


def test_search_locally_of_zero_latency() -> None:
    problem = random_problem(5, 2, seed=0, slack=10.0, traffic=0.0)
    zero = changed(problem, latency_ms=np.zeros((5, 2)))
    assert value(zero, MappingGoal(), solve(zero, MappingGoal()).mapping) == 0.0


def test_search_locally_stops_at_the_lower_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_search._Annealer, "anneal", lambda *_: pytest.fail("searched"))
    result = solve(random_problem(10, 3, seed=0), MappingGoal(), lower_bound_ms=1e9)
    assert result.mapping is not None and result.finished


def test_search_effort_grows_with_problem() -> None:
    steps = [
        SearchEffort.for_problem(random_problem(k, s, seed=0)).steps
        for k, s in ((2, 2), (12, 4), (24, 8), (200, 36))
    ]
    assert steps == sorted(steps) and steps[0] < steps[-1]
