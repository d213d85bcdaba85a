"""What every way to search must do, and that those that learn beat the one that does not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np
import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.evaluate import Trial
from sparseflow.tuning.operators import OPERATORS
from sparseflow.tuning.presets import presets
from sparseflow.tuning.schedule import Mode, Schedule
from sparseflow.tuning.search import STRATEGIES, strategy
from sparseflow.tuning.search.annealing import Annealing
from sparseflow.tuning.search.base import Strategy
from sparseflow.tuning.search.evolutionary import Evolutionary
from sparseflow.tuning.space import Space

EXTENTS = {"spmm": {"i": 1000, "k": 700, "j": 100}, "spmv": {"i": 1000, "j": 700}}
EXTENTS["sddmm"] = {"i": 1000, "j": 700, "k": 100}

every = pytest.mark.parametrize("name", STRATEGIES)
learning = pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "random"])


def space_of(operator: str = "spmm") -> Space:
    return Space(OPERATORS[operator], EXTENTS[operator], threads=(1, 4))


def begun(name: str, seed: int = 0, space: Space | None = None) -> Strategy:
    return STRATEGIES[name](space or space_of(), np.random.default_rng(seed))


def made_up(schedule: Schedule) -> float:
    """A cost with what real ones have: decisions that matter much, others little, and some together."""
    cost = 1.0
    cost *= 1.0 if schedule.parallel == schedule.lreorder[0] else 3.0
    cost *= 1.0 if schedule.vectorize is not None else 2.0
    inner = dict(schedule.sub_axes("j")).get("j1") or 1
    cost *= 1.0 + 0.3 * abs(math.log2(inner) - 5.0)
    cost *= 1.0 + 0.05 * abs(math.log2(schedule.chunk) - 6.0)
    cost *= 1.0 + 0.2 * sum(level.mode is not Mode.COMPRESSED for level in schedule.formats[0].modes)
    cost *= 1.0 if schedule.unroll_factor == 4 else 1.1
    rows = dict(schedule.sub_axes("i")).get("i1") or 1
    return cost * (1.0 + 0.1 * abs(math.log2(rows) - 3.0))


def told(schedule: Schedule, cost: float) -> Trial:
    return Trial(schedule=schedule, latency_ms=cost, ratio=cost)


def run(walk: Strategy, asks: int, cost: Callable[[Schedule], float] = made_up) -> list[Schedule]:
    asked = []
    for _ in range(asks):
        schedule = walk.ask()
        walk.tell(told(schedule, cost(schedule)))
        asked.append(schedule)
    return asked


def test_names() -> None:
    assert {"random", "evolutionary", "annealing"} <= set(STRATEGIES)
    assert all(one.name == name for name, one in STRATEGIES.items())
    assert all(strategy(name) is one for name, one in STRATEGIES.items())


@pytest.mark.parametrize("name", ["", "Random", "bayes"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(InputError, match=f"method '{name}' is not known; choose one of: random, "):
        strategy(name)


@every
@pytest.mark.parametrize("operator", OPERATORS)
def test_asks_what_can_run(name: str, operator: str) -> None:
    space = space_of(operator)
    for schedule in run(begun(name, space=space), 200):
        assert schedule.problems(space.operator, space.shape) == []
        assert schedule.canonical(space.operator, space.shape) == schedule
        assert schedule.threads in space.threads


@every
def test_depends_on_the_seed_only(name: str) -> None:
    np.random.seed(3)  # what is global must not matter
    first = run(begun(name, 5), 100)
    np.random.seed(4)
    assert run(begun(name, 5), 100) == first
    assert run(begun(name, 6), 100) != first


@every
def test_time_taken_does_not_matter(name: str) -> None:
    walks = [begun(name), begun(name)]
    for number in range(60):
        schedules = [walk.ask() for walk in walks]
        assert schedules[0] == schedules[1]
        for walk, disturbed in zip(walks, (False, True), strict=True):
            walk.tell(
                Trial(
                    schedule=schedules[0],
                    latency_ms=1.0 + number * disturbed,
                    ratio=made_up(schedules[0]),
                    disturbed=disturbed,
                    seconds={"build": float(number * disturbed)},
                )
            )


@every
def test_failures_only(name: str) -> None:
    space, walk = space_of(), begun(name)
    asked = []
    for _ in range(100):
        asked.append(walk.ask())
        walk.tell(Trial(schedule=asked[-1], error="it broke"))
    assert all(schedule.problems(space.operator, space.shape) == [] for schedule in asked)
    assert len(set(asked)) > 50, "it goes on looking"


@every
def test_failures_among_successes(name: str) -> None:
    space, walk = space_of(), begun(name)
    for number in range(200):
        schedule = walk.ask()
        assert schedule.problems(space.operator, space.shape) == []
        failed = number % 3 == 0 or schedule.vectorize is None
        walk.tell(Trial(schedule=schedule, error="it broke") if failed else told(schedule, made_up(schedule)))


@every
def test_never_told(name: str) -> None:
    space, walk = space_of(), begun(name)
    asked = [walk.ask() for _ in range(100)]
    assert all(schedule.problems(space.operator, space.shape) == [] for schedule in asked)
    assert len(set(asked)) > 50


@every
@pytest.mark.parametrize("operator", OPERATORS)
def test_told_what_it_never_asked(name: str, operator: str) -> None:
    # By hand, and with sizes, threads and a level that the space does not hold.
    space = Space(OPERATORS[operator], EXTENTS[operator], threads=(1, 4), max_split=2)
    walk = begun(name, space=space)
    known = list(presets(space.operator, space.shape, 7).values())
    for number in range(100):
        walk.tell(told(known[number % len(known)], 1.0 + number))
        assert walk.ask().problems(space.operator, space.shape) == []


@every
def test_told_the_same_again_and_again(name: str) -> None:
    walk = begun(name)
    schedule = walk.ask()
    for _ in range(300):
        walk.tell(told(schedule, 1.0))
    assert len({walk.ask() for _ in range(100)}) > 20


@every
@pytest.mark.parametrize("cost", [1e-300, 1.0, 1e300])
def test_equal_and_extreme_costs(name: str, cost: float) -> None:
    assert len(set(run(begun(name), 100, lambda schedule: cost))) > 50


@every
def test_costs_far_apart(name: str) -> None:
    costs = iter([1e-200, 1e200] * 50)
    run(begun(name), 100, lambda schedule: next(costs))


@every
def test_a_space_of_one(name: str) -> None:
    space = Space(OPERATORS["spmv"], {"i": 1, "j": 1}, threads=(1,), max_split=1)
    asked = set(run(begun(name, space=space), 200, lambda schedule: 1.0 + len(str(schedule)) % 7))
    assert 1 < len(asked) <= space.size()


@learning
def test_better_than_random(name: str) -> None:
    def best(one: str, seed: int) -> float:
        return min(map(made_up, run(begun(one, seed), 150)))

    seeds = range(12)
    assert statistics.mean(best(name, seed) for seed in seeds) < 0.9 * statistics.mean(
        best("random", seed) for seed in seeds
    )


@learning
def test_learns_from_what_is_told_before(name: str) -> None:
    """A search that is told of a good schedule asks for better ones than one that is not."""
    good = min(run(begun("random", 99), 500), key=made_up)
    informed, plain = [], []
    for seed in range(8):
        walk = begun(name, seed)
        walk.tell(told(good, made_up(good)))
        informed.append(statistics.median(map(made_up, run(walk, 20))))
        plain.append(statistics.median(map(made_up, run(begun(name, seed), 20))))
    assert statistics.mean(informed) < statistics.mean(plain)


def test_evolution_forgets_all_but_the_best() -> None:
    space = space_of()
    walk = Evolutionary(space, np.random.default_rng(0), parents=1, fresh=0.0, crossed=0.0)
    schedules = run(begun("random", 1), 30)
    for schedule in schedules:
        walk.tell(told(schedule, made_up(schedule)))
    best = min(schedules, key=made_up)

    def alike(others: list[Schedule]) -> float:
        return statistics.mean(other.lreorder == best.lreorder for other in others)

    assert alike([walk.ask() for _ in range(200)]) > 3 * alike(run(begun("random", 2), 200))


def test_evolution_of_fresh_draws_is_random() -> None:
    space = space_of()
    asked = run(Evolutionary(space, np.random.default_rng(0), fresh=1.0), 50)
    assert len(set(asked)) > 40


def test_annealing_takes_worse_steps_while_warm_and_none_when_cold() -> None:
    space = space_of()
    schedules = run(begun("random", 1), 400)

    def steps_taken(warmth: float) -> int:
        walk = Annealing(space, np.random.default_rng(0), warmth=warmth, cooling=1.0, patience=10**6)
        walk.tell(told(schedules[0], 1.0))
        taken = 0
        for schedule in schedules[1:]:
            before = walk._here
            walk.tell(told(schedule, 1.5 * (before.ratio if before else 1.0)))
            taken += walk._here is not before
            walk._here = before
        return taken

    cold, mild, hot = (steps_taken(warmth) for warmth in (1e-6, 0.5, 100.0))
    assert cold == 0
    # 1.5^(-1/0.5) = 0.44, and 1.5^(-1/100) = 0.996
    assert 0.35 < mild / 399 < 0.55 and hot / 399 > 0.97


def test_annealing_goes_back_to_the_best() -> None:
    space = space_of()
    walk = Annealing(space, np.random.default_rng(0), warmth=1e9, cooling=1.0, patience=5)
    first, *others = run(begun("random", 1), 6)
    walk.tell(told(first, 1.0))
    for schedule in others:
        walk.tell(told(schedule, 2.0))
    assert walk._here is not None and walk._here.schedule == first
