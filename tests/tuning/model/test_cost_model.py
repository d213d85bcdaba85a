"""Models learn the order of schedules from trials, start from what is known, and mind nothing odd."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sparseflow.errors import MissingExtraError
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.model.cost_model import BoostedTrees, CostModel, rough
from sparseflow.tuning.model.features import Features
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import presets
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Mode, Schedule
from sparseflow.tuning.schedule.space import Space

MATRIX = as_coo((np.random.default_rng(0).random((500, 400)) < 0.02).astype(np.float32))
PROBLEM = Problem(operator=OPERATORS["spmm"], matrix=MATRIX, n_cols=64)
SPACE = Space(PROBLEM.operator, PROBLEM.extents, threads=(1, 2))


@pytest.fixture(scope="module")
def features() -> Features:
    return Features(PROBLEM, 2)


def samples(count: int, seed: int) -> list[Schedule]:
    rng = np.random.default_rng(seed)
    return list(dict.fromkeys(SPACE.sample(rng) for _ in range(count)))


def made_up(schedule: Schedule) -> float:
    """What `rough` knows nothing of."""
    cost = 1.0 if schedule.vectorize is None else 3.0
    cost *= 1.0 + 0.3 * abs(math.log2(schedule.chunk) - 3.0)
    return cost * (1.0 + sum(level.mode is Mode.DENSE for level in schedule.formats[0].modes))


def trials(schedules: Sequence[Schedule], cost: Callable[[Schedule], float] = made_up) -> list[Trial]:
    found = []
    for schedule in schedules:
        ratio = cost(schedule)
        worked = math.isfinite(ratio)
        found.append(
            Trial(schedule=schedule, latency_ms=ratio, ratio=ratio, error=None if worked else "broke")
        )
    return found


def agreement(model: CostModel, cost: Callable[[Schedule], float] = made_up, seed: int = 99) -> float:
    """Rank correlation of scores with speeds, on schedules that were not told."""
    schedules = samples(200, seed)
    pair = model.scores(schedules), [-cost(schedule) for schedule in schedules]
    return float(np.corrcoef([np.argsort(np.argsort(each)) for each in pair])[0, 1])


def test_it_learns(features: Features) -> None:
    model = BoostedTrees(features)
    before = agreement(model)
    model.observe(trials(samples(100, 1)))
    assert agreement(model) > max(0.7, before + 0.3)


def test_it_learns_more_from_more(features: Features) -> None:
    model, some = BoostedTrees(features), samples(160, 1)
    model.observe(trials(some[:12]))
    before = agreement(model)
    model.observe(trials(some[12:]))
    assert agreement(model) > before + 0.2


def test_what_it_thinks_before(features: Features) -> None:
    some = samples(50, 2)
    assert (BoostedTrees(features).scores(some) == rough(features.of(some))).all()
    prior = dict(zip(some, np.random.default_rng(0).random(50), strict=True))
    model = BoostedTrees(features, prior=lambda asked: np.array([prior[each] for each in asked]))
    assert model.scores(some).tolist() == list(prior.values())
    model.observe(trials(some[:4]))
    assert model.scores(some).tolist() == list(prior.values()), "too few to learn from"


def test_a_prior_that_knows_is_followed(features: Features) -> None:
    """Far ahead of what as few trials teach without it, whatever the prior's scale."""

    def knows(schedules: Sequence[Schedule]) -> np.ndarray:
        return np.array([-1e-3 * math.log(made_up(each)) for each in schedules])

    told = trials(samples(12, 3))
    informed, plain = BoostedTrees(features, prior=knows), BoostedTrees(features)
    for model in (informed, plain):
        model.observe(told)
    assert agreement(informed) > agreement(plain) + 0.1


def test_a_prior_that_is_wrong_is_overcome(features: Features) -> None:
    def wrong(schedules: Sequence[Schedule]) -> np.ndarray:
        return np.array([math.log(made_up(each)) for each in schedules])

    model = BoostedTrees(features, prior=wrong)
    assert agreement(model) < -0.9
    model.observe(trials(samples(100, 1)))
    assert agreement(model) > 0.7


def test_failures_are_slow(features: Features) -> None:
    def cost(schedule: Schedule) -> float:
        return math.inf if schedule.vectorize is None else made_up(schedule)

    model = BoostedTrees(features)
    model.observe(trials(samples(120, 1), cost))
    some = samples(200, 5)
    scores = model.scores(some)
    fails = np.array([not math.isfinite(cost(each)) for each in some])
    assert np.median(scores[fails]) < np.quantile(scores[~fails], 0.2)


@pytest.mark.parametrize("cost", [lambda _: math.inf, lambda _: 1.0, lambda _: 1e-300])
def test_nothing_to_learn(features: Features, cost: Callable[[Schedule], float]) -> None:
    model, some = BoostedTrees(features), samples(40, 1)
    model.observe(trials(some, cost))
    assert (model.scores(some) == rough(features.of(some))).all()


def test_extreme_costs(features: Features) -> None:
    model, some = BoostedTrees(features), samples(60, 1)
    model.observe(trials(some[::2], lambda _: 1e-300))
    model.observe(trials(some[1::2], lambda _: 1e300))
    assert np.isfinite(model.scores(some)).all()


def test_the_same_trials_give_the_same_scores(features: Features) -> None:
    some, told = samples(50, 7), trials(samples(60, 1))
    first, second, other = BoostedTrees(features), BoostedTrees(features), BoostedTrees(features, seed=1)
    np.random.seed(0)  # what is global must not matter
    for model in (first, second, other):
        model.observe(told)
    assert (first.scores(some) == second.scores(some)).all()
    assert (first.scores(some) != other.scores(some)).any()
    assert (first.scores(some[:5]) == first.scores(some)[:5]).all(), "nor do the others matter"


def test_told_twice_the_better_counts(features: Features) -> None:
    some = samples(60, 1)
    once, twice = BoostedTrees(features), BoostedTrees(features)
    once.observe(trials(some))
    twice.observe(trials(some))
    twice.observe(trials(some, lambda each: 5.0 * made_up(each)))
    assert (once.scores(some) == twice.scores(some)).all()


def test_no_schedules(features: Features) -> None:
    model = BoostedTrees(features)
    assert model.scores([]).shape == (0,)
    model.observe(trials(samples(60, 1)))
    assert model.scores([]).shape == (0,)


def test_without_xgboost(features: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "xgboost" else find(name, *a)
    )
    with pytest.raises(MissingExtraError, match=r"xgboost.*sparseflow\[tuning\]"):
        BoostedTrees(features)


@pytest.mark.parametrize("operator", OPERATORS)
def test_rough_scores(operator: str) -> None:
    """The best of the hand-written schedules score above most that are drawn blindly."""
    wide = 64 if OPERATORS[operator].dense_axes else None
    problem = Problem(operator=OPERATORS[operator], matrix=MATRIX, n_cols=wide)
    features, rng = Features(problem, 2), np.random.default_rng(0)
    space = Space(problem.operator, problem.extents, threads=(1, 2))
    drawn = rough(features.of([space.sample(rng) for _ in range(300)]))
    by_hand = rough(features.of([*presets(problem.operator, problem.extents, 2).values()]))
    assert np.isfinite(drawn).all()
    assert by_hand.max() > np.quantile(drawn, 0.75)
