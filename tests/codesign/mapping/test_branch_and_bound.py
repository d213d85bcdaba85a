"""Branch and bound: the optimum of all mappings, or the proof that there is none."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import Goal, Problem
from sparseflow.codesign.mapping.arrays import tables
from sparseflow.codesign.mapping.branch_and_bound import exact
from sparseflow.codesign.mapping.search import Answer, Request
from sparseflow.errors import InputError
from tests.codesign.mapping.naive import GOALS, changed, objective, value, varied


def asked(problem: Problem, goal: Goal, **others: object) -> Answer:
    return exact(Request(problem=problem, goal=goal, time_limit_s=60.0, **others))  # pyright: ignore[reportArgumentType]


def assert_the_optimum(problem: Problem) -> None:
    for goal, (best, mapping) in zip(GOALS, exhaust(problem, GOALS), strict=True):
        found = asked(problem, goal)
        if mapping is None:
            assert found.none_exists and found.mapping is None
            continue
        assert found.finished and found.mapping is not None
        assert value(problem, goal, found.mapping) == pytest.approx(best, rel=1e-9)
        assert objective(problem, goal, found.mapping.tolist()) == pytest.approx(best, rel=1e-9)
        assert objective(problem, goal, mapping) == pytest.approx(best, rel=1e-12)
        assert found.lower_bound_ms == value(problem, goal, found.mapping)
        # From a start, be it the optimum itself.
        again = asked(problem, goal, start=found.mapping)
        assert value(problem, goal, again.mapping) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(80))
def test_it_is_the_best_of_all_mappings(seed: int) -> None:
    assert_the_optimum(varied(seed))


@pytest.mark.parametrize("seed", range(4))
def test_it_is_the_best_of_a_million_mappings(seed: int) -> None:
    assert_the_optimum(random_problem(10, 4, seed=seed, skips=0.5 * (seed % 2), slack=1.1))


@pytest.mark.parametrize("seed", range(12))
def test_without_room_for_all_there_is_none(seed: int) -> None:
    problem = varied(seed, most_segments=6)
    assert_the_optimum(changed(problem, limit_mb=np.floor(problem.limit_mb * 0.6)))


def test_slots_that_are_alike_are_told() -> None:
    apart = 1.0 - np.eye(4)
    problem = Problem.chain(
        latency_ms=np.ones((3, 4)) * [[1.0], [2.0], [3.0]],
        memory_mb=[1.0, 2.0, 3.0],
        limit_mb=[5.0, 5.0, 4.0, 5.0],
        traffic_bytes=[1.0, 2.0],
        fixed_ms=apart,
        ms_per_byte=apart,
    )
    assert tables(problem).twin.tolist() == [-1, 0, -1, 1]
    # The way from 0 to 1 is not the way from 0 to 3.
    fixed = apart.copy()
    fixed[0, 1] = fixed[1, 0] = 2.0
    assert tables(changed(problem, fixed_ms=fixed)).twin.tolist() == [-1, 0, -1, -1]


def test_what_does_not_end_says_so_and_keeps_a_bound() -> None:
    problem = random_problem(24, 8, seed=0, skips=0.3)
    start = exact(Request(problem=problem, goal=Goal(), time_limit_s=60.0), most_nodes=500)
    assert not start.finished and not start.none_exists
    assert start.mapping is not None
    assert 0.0 < start.lower_bound_ms < value(problem, Goal(), start.mapping)


def test_too_many_to_try_them_all() -> None:
    with pytest.raises(InputError, match="'exact'"):
        exhaust(random_problem(24, 8, seed=0), [Goal()])
