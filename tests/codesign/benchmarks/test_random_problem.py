"""Tests of `benchmarks/codesign/random_problem.py`."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping.cpsat import find_feasible_mapping
from sparseflow.codesign.mapping.objective import MappingGoal
from sparseflow.codesign.mapping.search import MappingRequest
from sparseflow.errors import InputError


@pytest.mark.parametrize("seed", range(10))
def test_random_problem_is_feasible(seed: int) -> None:
    problem = random_problem(15, 4, seed=seed, slack=1.0, refused=0.3, skips=1.0)
    assert (problem.memory_mb == np.round(problem.memory_mb)).all() and problem.num_edges == 14 + 15
    pytest.importorskip("ortools")
    assert (
        find_feasible_mapping(MappingRequest(problem=problem, goal=MappingGoal(), time_limit_s=60.0)).mapping
        is not None
    )


def test_random_problem_is_deterministic_for_a_seed() -> None:
    first, two, three = (random_problem(6, 3, seed=seed) for seed in (4, 4, 5))
    assert np.array_equal(first.latency_ms, two.latency_ms) and np.array_equal(first.fixed_ms, two.fixed_ms)
    assert not np.array_equal(first.latency_ms, three.latency_ms)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (2, 1), (2, 3)])
def test_smallest_problem(sizes: tuple[int, int]) -> None:
    problem = random_problem(*sizes, seed=0, skips=1.0)
    assert (problem.num_segments, problem.num_slots) == sizes


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="1"):
        random_problem(0, 3, seed=0)
    with pytest.raises(InputError, match="`slack`"):
        random_problem(3, 3, seed=0, slack=0.5)
    with pytest.raises(InputError, match="`refused`"):
        random_problem(3, 3, seed=0, refused=1.0)
