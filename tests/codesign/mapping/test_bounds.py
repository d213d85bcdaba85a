"""Tests of `codesign.mapping.bounds`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.codesign.exhaustive import exhaust
from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import MappingGoal, MappingProblem, bounds, compute_lower_bound
from tests.codesign.mapping.naive import GOALS, changed, varied

CLOSE = 1.0 + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_bound_is_below_every_mapping(seed: int) -> None:
    problem = varied(seed, most_segments=7)
    for goal, (best, _) in zip(GOALS, exhaust(problem, GOALS), strict=True):
        if math.isfinite(best):
            assert 0.0 <= compute_lower_bound(problem, goal).value_ms <= best * CLOSE
            # What is known may be the optimum itself, or anything above it.
            assert compute_lower_bound(problem, goal, incumbent_ms=best).value_ms <= best * CLOSE
            assert compute_lower_bound(problem, goal, incumbent_ms=1.1 * best).value_ms <= best * CLOSE


@pytest.mark.parametrize("seed", range(10))
def test_multipliers_bound_every_mapping(seed: int) -> None:
    problem, rng = varied(seed), np.random.default_rng(seed)
    for goal in GOALS:
        bound = compute_lower_bound(problem, goal)
        assert (bound.busy_weights >= 0.0).all() and (bound.memory_weights >= 0.0).all()
        assert bound.busy_weights.sum() <= goal.period_weight * (1.0 + 1e-12)
        busy = rng.exponential(1.0, problem.num_slots)
        assert (bound.busy_weights * busy).sum() <= goal.period_weight * busy.max() * CLOSE


@pytest.mark.parametrize("dear", [1.0, 1e6, 1e12, 1e15])
def test_any_multipliers_give_a_bound(dear: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is used up to the last byte, and dear: what is added and what is taken off are alike."""

    def multipliers(problem: MappingProblem, *_: object) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(problem.num_slots), np.full(problem.num_slots, dear)

    monkeypatch.setattr(bounds, "_multipliers", multipliers)
    goal = MappingGoal(mode="serial")
    for seed in range(100):
        rng = np.random.default_rng(seed)
        memory = rng.integers(1, 10**9, 6) / 1e6
        problem = MappingProblem.chain(
            latency_ms=rng.lognormal(0.0, 1e-3, (6, 1)), memory_mb=memory, limit_mb=[memory.sum()],
            traffic_bytes=np.zeros(5), fixed_ms=np.zeros((1, 1)), ms_per_byte=np.zeros((1, 1)),
        )  # fmt: skip
        ((best, _),) = exhaust(problem, [goal])
        value_ms = compute_lower_bound(problem, goal).value_ms
        assert 0.99 * best < value_ms <= best * (1.0 + 1e-15), f"{seed}: {value_ms} > {best}"


def test_incumbent_tightens_bound() -> None:
    better = 0
    for seed in range(10):
        problem = random_problem(10, 4, seed=seed, slack=2.0)
        ((best, _),) = exhaust(problem, [MappingGoal()])
        better += (
            compute_lower_bound(problem, MappingGoal(), incumbent_ms=best).value_ms
            > compute_lower_bound(problem, MappingGoal()).value_ms
        )
    assert better > 0


def test_bound_of_one_slot_is_tight() -> None:
    problem = random_problem(6, 1, seed=0)
    for goal in GOALS:
        ((best, _),) = exhaust(problem, [goal])
        assert compute_lower_bound(problem, goal).value_ms == pytest.approx(best, rel=1e-9)


def test_bound_without_transfers_is_tight() -> None:
    problem = random_problem(6, 3, seed=1, slack=100.0, traffic=0.0)
    goal = MappingGoal(mode="serial")
    ((best, _),) = exhaust(problem, [goal])
    assert compute_lower_bound(problem, goal).value_ms == pytest.approx(best, rel=1e-9)


def test_bound_includes_forced_transfers() -> None:
    chain = MappingProblem.chain(
        latency_ms=np.ones((4, 3)),
        memory_mb=np.full(4, 10.0),
        limit_mb=np.full(3, 20.0),
        traffic_bytes=[5e6, 1e6, 9e6],
        fixed_ms=0.5 * (1.0 - np.eye(3)),
        ms_per_byte=1e-6 * (1.0 - np.eye(3)),
    )
    # Two slots at least, so one edge at least; the least takes 1.5 ms, and that happens to be enough.
    assert bounds.min_communication_ms(chain) == pytest.approx(1.5)
    goal = MappingGoal(mode="serial")
    assert compute_lower_bound(chain, goal).value_ms == pytest.approx(5.5)
    assert exhaust(chain, [goal])[0][0] == pytest.approx(5.5)
    assert bounds.min_communication_ms(changed(chain, limit_mb=np.full(3, 40.0))) == 0.0
    # In two pieces that fit on a slot each, nothing need be cut.
    distances = changed(chain, src=[0, 2], dst=[1, 3], traffic_bytes=[5e6, 9e6])
    assert bounds.min_communication_ms(distances) == 0.0
    assert bounds.min_communication_ms(changed(chain, src=[], dst=[], traffic_bytes=[])) == 0.0


def test_bound_is_at_most_incumbent() -> None:
    problem = random_problem(5, 2, seed=0)
    assert compute_lower_bound(problem, MappingGoal(), incumbent_ms=1e-6).value_ms == 1e-6


@pytest.mark.parametrize("mode", ["balanced", "serial"])
def test_bound_without_linear_program_is_valid(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    goal = MappingGoal(mode=mode)  # pyright: ignore[reportArgumentType]
    problem = random_problem(8, 3, seed=3, slack=1.2)
    value_ms = compute_lower_bound(problem, goal).value_ms
    monkeypatch.setattr(bounds, "MAX_PAIRS", 0)
    assert (
        0.0
        < compute_lower_bound(problem, goal).value_ms
        <= value_ms * CLOSE
        <= exhaust(problem, [goal])[0][0] * CLOSE**2
    )
