"""Neighbourhoods: no worse, the optimum where one holds all, and nothing moved that should stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import Goal, Mode, Problem, lower_bound
from sparseflow.codesign.mapping import local_search as local_module
from sparseflow.codesign.mapping.arrays import tables
from sparseflow.codesign.mapping.branch_and_bound import Branching
from sparseflow.codesign.mapping.local_search import NONE, local, refine
from sparseflow.codesign.mapping.search import Request
from tests.codesign.mapping.naive import GOALS, objective, value, varied


@pytest.mark.parametrize("seed", range(30))
def test_a_neighbourhood_of_everything_is_the_optimum(seed: int) -> None:
    problem = varied(seed, most_segments=8, most_slots=4)
    for goal, (best, _) in zip(GOALS, exhaust(problem, GOALS), strict=True):
        request = Request(problem=problem, goal=goal, time_limit_s=60.0)
        start = local(request, effort=NONE).mapping
        if start is not None:
            found = refine(request, start, tries=3, seed=0)
            assert objective(problem, goal, found.tolist()) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_it_is_no_worse_and_fits(seed: int) -> None:
    problem = random_problem(30, 7, seed=seed, slack=1.1, skips=0.5)
    for goal in GOALS:
        request = Request(problem=problem, goal=goal, time_limit_s=60.0)
        start = local(request, effort=NONE).mapping
        assert start is not None
        found = refine(request, start, tries=20, seed=seed)
        assert lower_bound(problem, goal).value_ms <= objective(problem, goal, found.tolist())
        assert value(problem, goal, found) < value(problem, goal, start)
        assert refine(request, start, tries=20, seed=seed).tolist() == found.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_those_that_are_not_free_stay_and_the_rest_is_as_good_as_can_be(seed: int) -> None:
    problem, rng = random_problem(7, 3, seed=seed, slack=1.5, skips=1.0), np.random.default_rng(seed)
    for goal in GOALS:
        request = Request(problem=problem, goal=goal, time_limit_s=60.0)
        start = local(request, effort=NONE).mapping
        assert start is not None
        free, allowed = rng.random(7) < 0.5, np.array([True, True, False])
        free[rng.integers(7)] = True
        branching, weights = Branching(tables(problem), goal), np.full(3, goal.period_weight / 3.0)
        branching.begin(np.inf, start, free, weights, np.zeros(3), allowed)
        while not branching.done:
            branching.go_on(1)
        values = {}
        for number in range(2 ** int(free.sum())):
            mapping = start.copy()
            mapping[free] = [number >> bit & 1 for bit in range(int(free.sum()))]
            values[objective(problem, goal, mapping.tolist())] = mapping
        if min(values) < np.inf:
            assert branching.best_ms == pytest.approx(min(values), rel=1e-9)
            assert value(problem, goal, branching.best) == pytest.approx(min(values), rel=1e-9)


@pytest.mark.parametrize("mode", ["balanced", "serial"])
def test_what_was_looked_at_is_not_looked_at_again(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[list[int], list[bool], list[bool]]] = []

    class Noted(Branching):
        def begin(self, *given: Any, **named: Any) -> None:
            _, mapping, free, *_, allowed = given
            begun.append((mapping.tolist(), free.tolist(), allowed.tolist()))
            super().begin(*given, **named)

    monkeypatch.setattr(local_module, "Branching", Noted)
    problem = random_problem(12, 5, seed=0, slack=1.5)
    request = Request(problem=problem, goal=Goal(mode=mode), time_limit_s=60.0)
    start = local(request, effort=NONE).mapping
    assert start is not None
    refine(request, start, tries=60, seed=0)
    assert len(begun) == len({str(each) for each in begun})
    # Four of five slots, the fullest among them where the period counts, for each mapping on the way.
    mappings = {str(mapping) for mapping, *_ in begun}
    assert len(mappings) > 1 and len(begun) <= len(mappings) * (4 if mode == "balanced" else 5)


def test_slots_that_take_no_time_are_as_good_as_others() -> None:
    apart = 1.0 - np.eye(4)
    problem = Problem.chain(
        latency_ms=np.zeros((6, 4)), memory_mb=np.full(6, 10.0), limit_mb=np.full(4, 20.0),
        traffic_bytes=[3e6, 1e6, 3e6, 1e6, 3e6], fixed_ms=0.5 * apart, ms_per_byte=1e-6 * apart,
    )  # fmt: skip
    for goal in GOALS:
        ((best, _),) = exhaust(problem, [goal])
        request = Request(problem=problem, goal=goal, time_limit_s=60.0)
        found = refine(request, np.array([0, 1, 2, 3, 0, 1]), tries=3, seed=0)
        assert objective(problem, goal, found.tolist()) == pytest.approx(best)


def test_a_slot_is_tried_where_the_one_like_it_may_not_be() -> None:
    # Slots 1 and 2 are alike and empty, and only the second of them may be used.
    problem = Problem.chain(
        latency_ms=np.full((4, 3), 1.0), memory_mb=np.zeros(4), limit_mb=np.full(3, 1.0),
        traffic_bytes=np.zeros(3), fixed_ms=np.zeros((3, 3)), ms_per_byte=np.zeros((3, 3)),
    )  # fmt: skip
    branching, allowed = Branching(tables(problem), Goal()), np.array([True, False, True])
    start, everything = np.zeros(4, dtype=np.int64), np.ones(4, dtype=bool)
    branching.begin(4.004, start, everything, np.full(3, 1.0 / 3.0), np.zeros(3), allowed)
    while not branching.done:
        branching.go_on(1)
    assert branching.best_ms == pytest.approx(2.004) and branching.best is not None
    assert sorted(branching.best.tolist()) == [0, 0, 2, 2]


def test_one_slot_and_no_time_change_nothing() -> None:
    for problem, limit in ((random_problem(5, 1, seed=0), 60.0), (random_problem(9, 3, seed=0), 1e-9)):
        request = Request(problem=problem, goal=Goal(), time_limit_s=limit)
        start = local(request, effort=NONE).mapping
        assert start is not None
        assert refine(request, start, tries=5, seed=0).tolist() == start.tolist()
