"""Large-neighborhood search of `codesign.mapping.local_search`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import MappingGoal, MappingProblem, Mode, compute_lower_bound
from sparseflow.codesign.mapping import local_search as local_module
from sparseflow.codesign.mapping.arrays import build_arrays
from sparseflow.codesign.mapping.branch_and_bound import BranchAndBound
from sparseflow.codesign.mapping.local_search import NO_EFFORT, refine_neighborhoods, search_locally
from sparseflow.codesign.mapping.search import MappingRequest
from tests.codesign.mapping.naive import GOALS, objective, value, varied


@pytest.mark.parametrize("seed", range(10))
def test_neighborhood_of_all_segments_is_optimal(seed: int) -> None:
    problem = varied(seed, most_segments=8, most_slots=4)
    for goal, (best, _) in zip(GOALS, exhaust(problem, GOALS), strict=True):
        request = MappingRequest(problem=problem, goal=goal, time_limit_s=60.0)
        start = search_locally(request, effort=NO_EFFORT).mapping
        if start is not None:
            mapping = refine_neighborhoods(request, start, max_neighborhoods=3, seed=0)
            assert objective(problem, goal, mapping.tolist()) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_refinement_is_feasible_and_no_worse(seed: int) -> None:
    problem = random_problem(30, 7, seed=seed, slack=1.1, skips=0.5)
    for goal in GOALS:
        request = MappingRequest(problem=problem, goal=goal, time_limit_s=60.0)
        start = search_locally(request, effort=NO_EFFORT).mapping
        assert start is not None
        mapping = refine_neighborhoods(request, start, max_neighborhoods=20, seed=seed)
        assert compute_lower_bound(problem, goal).value_ms <= objective(problem, goal, mapping.tolist())
        assert value(problem, goal, mapping) < value(problem, goal, start)
        assert (
            refine_neighborhoods(request, start, max_neighborhoods=20, seed=seed).tolist() == mapping.tolist()
        )


@pytest.mark.parametrize("seed", range(10))
def test_fixed_segments_stay_and_free_ones_are_optimal(seed: int) -> None:
    problem, rng = random_problem(7, 3, seed=seed, slack=1.5, skips=1.0), np.random.default_rng(seed)
    for goal in GOALS:
        request = MappingRequest(problem=problem, goal=goal, time_limit_s=60.0)
        start = search_locally(request, effort=NO_EFFORT).mapping
        assert start is not None
        free, allowed = rng.random(7) < 0.5, np.array([True, True, False])
        free[rng.integers(7)] = True
        branching, weights = BranchAndBound(build_arrays(problem), goal), np.full(3, goal.period_weight / 3.0)
        branching.reset(np.inf, start, free, weights, np.zeros(3), allowed)
        while not branching.finished:
            branching.expand(1)
        values = {}
        for number in range(2 ** int(free.sum())):
            mapping = start.copy()
            mapping[free] = [number >> bit & 1 for bit in range(int(free.sum()))]
            values[objective(problem, goal, mapping.tolist())] = mapping
        if min(values) < np.inf:
            assert branching.best_ms == pytest.approx(min(values), rel=1e-9)
            assert value(problem, goal, branching.best) == pytest.approx(min(values), rel=1e-9)


@pytest.mark.parametrize("mode", ["balanced", "serial"])
def test_visited_neighborhoods_are_skipped(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[int], list[bool], list[bool]]] = []

    class Noted(BranchAndBound):
        def reset(self, *arguments: Any, **named: Any) -> None:
            _, mapping, free, *_, allowed = arguments
            started.append((mapping.tolist(), free.tolist(), allowed.tolist()))
            super().reset(*arguments, **named)

    monkeypatch.setattr(local_module, "BranchAndBound", Noted)
    problem = random_problem(12, 5, seed=0, slack=1.5)
    request = MappingRequest(problem=problem, goal=MappingGoal(mode=mode), time_limit_s=60.0)
    start = search_locally(request, effort=NO_EFFORT).mapping
    assert start is not None
    refine_neighborhoods(request, start, max_neighborhoods=60, seed=0)
    assert len(started) == len({str(item) for item in started})
    # Four of five slots, the fullest among them where the period counts, for each mapping on the way.
    mappings = {str(mapping) for mapping, *_ in started}
    assert len(mappings) > 1 and len(started) <= len(mappings) * (4 if mode == "balanced" else 5)


def test_slots_with_zero_latency() -> None:
    distances = 1.0 - np.eye(4)
    problem = MappingProblem.chain(
        latency_ms=np.zeros((6, 4)), memory_mb=np.full(6, 10.0), limit_mb=np.full(4, 20.0),
        traffic_bytes=[3e6, 1e6, 3e6, 1e6, 3e6], fixed_ms=0.5 * distances, ms_per_byte=1e-6 * distances,
    )  # fmt: skip
    for goal in GOALS:
        ((best, _),) = exhaust(problem, [goal])
        request = MappingRequest(problem=problem, goal=goal, time_limit_s=60.0)
        mapping = refine_neighborhoods(request, np.array([0, 1, 2, 3, 0, 1]), max_neighborhoods=3, seed=0)
        assert objective(problem, goal, mapping.tolist()) == pytest.approx(best)


def test_equal_slot_outside_neighborhood_is_ignored() -> None:
    # Slots 1 and 2 are alike and empty, and only the second of them may be used.
    problem = MappingProblem.chain(
        latency_ms=np.full((4, 3), 1.0), memory_mb=np.zeros(4), limit_mb=np.full(3, 1.0),
        traffic_bytes=np.zeros(3), fixed_ms=np.zeros((3, 3)), ms_per_byte=np.zeros((3, 3)),
    )  # fmt: skip
    branching, allowed = BranchAndBound(build_arrays(problem), MappingGoal()), np.array([True, False, True])
    start, everything = np.zeros(4, dtype=np.int64), np.ones(4, dtype=bool)
    branching.reset(4.004, start, everything, np.full(3, 1.0 / 3.0), np.zeros(3), allowed)
    while not branching.finished:
        branching.expand(1)
    assert branching.best_ms == pytest.approx(2.004) and branching.best is not None
    assert sorted(branching.best.tolist()) == [0, 0, 2, 2]


def test_refinement_of_one_slot_or_without_time_changes_nothing() -> None:
    for problem, limit in ((random_problem(5, 1, seed=0), 60.0), (random_problem(9, 3, seed=0), 1e-9)):
        request = MappingRequest(problem=problem, goal=MappingGoal(), time_limit_s=limit)
        start = search_locally(request, effort=NO_EFFORT).mapping
        assert start is not None
        assert refine_neighborhoods(request, start, max_neighborhoods=5, seed=0).tolist() == start.tolist()
