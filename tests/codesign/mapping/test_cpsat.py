"""CP-SAT: the optimum to within its ticks, bounds that hold, and no mapping told from no time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import Goal, Problem, Progress, cpsat
from sparseflow.codesign.mapping.local_search import NONE, local
from sparseflow.codesign.mapping.search import Answer, Request
from sparseflow.errors import InputError
from tests.codesign.mapping.naive import GOALS, changed, objective, value, varied

pytest.importorskip("ortools")


def asked(problem: Problem, goal: Goal, *, seconds: float = 60.0, **others: object) -> Answer:
    return cpsat.cpsat(
        Request(problem=problem, goal=goal, time_limit_s=seconds, **others)  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.parametrize("seed", range(16))
def test_it_is_the_best_of_all_mappings(seed: int) -> None:
    problem = varied(seed, most_segments=6, most_slots=3)
    resolution = (problem.segments + problem.edges) / cpsat.TICKS
    for goal, (best, mapping) in zip(GOALS, exhaust(problem, GOALS), strict=True):
        found = asked(problem, goal)
        if mapping is None:
            assert found.none_exists and found.mapping is None
            continue
        assert found.finished and found.mapping is not None
        worth = objective(problem, goal, found.mapping.tolist())
        # Without a start a tick is a share of the longest that a mapping can take, not of the best.
        longest = np.where(problem.allowed, problem.latency_ms, 0.0).sum() + 10.0 * problem.edges
        longest *= 1.01 * (goal.period_weight + goal.serial_weight)
        assert best * (1.0 - 1e-12) <= worth <= best + longest * resolution
        assert best - longest * resolution <= found.lower_bound_ms <= best * (1.0 + 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_from_the_best_it_stays_there(seed: int) -> None:
    problem = random_problem(7, 3, seed=seed, slack=1.2, skips=0.5)
    for goal in GOALS[:2]:
        ((best, mapping),) = exhaust(problem, [goal])
        found = asked(problem, goal, start=np.array(mapping))
        assert value(problem, goal, found.mapping) == pytest.approx(best, rel=1e-12)
        assert best * (1.0 - 1e-5) <= found.lower_bound_ms <= best * (1.0 + 1e-12)


def test_what_is_out_of_time_is_not_impossible() -> None:
    problem = random_problem(24, 8, seed=0, skips=0.3)
    start = local(Request(problem=problem, goal=Goal(), time_limit_s=60.0), effort=NONE).mapping
    assert start is not None
    late = asked(problem, Goal(), seconds=1e-6, start=start, workers=1)
    assert late.mapping is not None and not late.finished and not late.none_exists
    assert late.lower_bound_ms <= value(problem, Goal(), late.mapping)


def test_progress_closes_in() -> None:
    told: list[Progress] = []
    problem = random_problem(8, 3, seed=0)
    found = asked(problem, Goal(), progress=told.append)
    assert told and all(one.strategy == "cpsat" for one in told)
    assert all(one.lower_bound_ms <= one.objective_ms for one in told)
    assert min(one.objective_ms for one in told) == pytest.approx(value(problem, Goal(), found.mapping))


@pytest.mark.parametrize("seed", range(16))
def test_some_mapping_or_none(seed: int) -> None:
    problem = varied(seed)
    if seed % 2:
        problem = changed(problem, limit_mb=np.floor(problem.limit_mb * 0.7))
    ((best, _),) = exhaust(problem, [Goal()])
    found = cpsat.any_mapping(Request(problem=problem, goal=Goal(), time_limit_s=60.0))
    assert found.none_exists == math.isinf(best) and found.finished
    if found.mapping is not None:
        assert math.isfinite(objective(problem, Goal(), found.mapping.tolist()))


def test_too_many_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpsat, "MOST_VARIABLES", 10)
    with pytest.raises(InputError, match="'local'"):
        asked(random_problem(5, 3, seed=0), Goal())


def test_other_weights_of_the_sum() -> None:
    problem = random_problem(6, 3, seed=4, slack=2.0)
    for weight in (1e-5, 0.0123, 1.0, 3.0):
        goal = Goal(tie_weight=weight)
        ((best, mapping),) = exhaust(problem, [goal])
        found = asked(problem, goal, start=np.array(mapping))
        assert best * (1.0 - 1e-3) <= found.lower_bound_ms <= best * (1.0 + 1e-12)
