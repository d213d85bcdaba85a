"""Boosted trees that learn the order of schedules from trials and a prior."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from sparseflow.errors import MissingExtraError
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.model.cost_model import BoostedTrees, CostModel, score_by_counts
from sparseflow.tuning.model.features import ScheduleFeatures
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.parser import LevelMode
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace

MATRIX = as_coo((np.random.default_rng(0).random((500, 400)) < 0.02).astype(np.float32))
PROBLEM = SparseProblem(operator=OPERATORS["spmm"], matrix=MATRIX, n_cols=64)
SPACE = ScheduleSpace(PROBLEM.operator, PROBLEM.extents, threads=(1, 2))


@pytest.fixture(scope="module")
def features() -> ScheduleFeatures:
    return ScheduleFeatures(PROBLEM, 2)


def samples(count: int, seed: int) -> list[Schedule]:
    rng = np.random.default_rng(seed)
    return list(dict.fromkeys(SPACE.sample(rng) for _ in range(count)))


def made_up(schedule: Schedule) -> float:
    """A cost that `rough` does not model."""
    cost = 1.0 if schedule.vectorize is None else 3.0
    cost *= 1.0 + 0.3 * abs(math.log2(schedule.chunk or 8) - 3.0)
    return cost * (1.0 + sum(level.mode is LevelMode.DENSE for level in schedule.formats[0].modes))


def trials(schedules: Sequence[Schedule], cost: Callable[[Schedule], float] = made_up) -> list[Trial]:
    result = []
    for schedule in schedules:
        ratio = cost(schedule)
        succeeded = math.isfinite(ratio)
        result.append(
            Trial(schedule=schedule, latency_ms=ratio, ratio=ratio, error=None if succeeded else "broke")
        )
    return result


def agreement(model: CostModel, cost: Callable[[Schedule], float] = made_up, seed: int = 99) -> float:
    """Compute the rank correlation of scores with speeds on schedules that were not observed."""
    schedules = samples(200, seed)
    pair = model.score(schedules), [-cost(schedule) for schedule in schedules]
    return float(np.corrcoef([np.argsort(np.argsort(item)) for item in pair])[0, 1])


def test_fit_learns_ranking(features: ScheduleFeatures) -> None:
    model = BoostedTrees(features)
    before = agreement(model)
    model.observe(trials(samples(100, 1)))
    assert agreement(model) > max(0.7, before + 0.3)


def test_fit_improves_with_trials(features: ScheduleFeatures) -> None:
    model, subset = BoostedTrees(features), samples(160, 1)
    model.observe(trials(subset[:12]))
    before = agreement(model)
    model.observe(trials(subset[12:]))
    assert agreement(model) > before + 0.2


def test_score_before_trials_is_prior(features: ScheduleFeatures) -> None:
    subset = samples(50, 2)
    assert (BoostedTrees(features).score(subset) == score_by_counts(features.compute(subset))).all()
    prior = dict(zip(subset, np.random.default_rng(0).random(50), strict=True))
    model = BoostedTrees(features, prior=lambda item: np.array([prior[schedule] for schedule in item]))
    assert model.score(subset).tolist() == list(prior.values())
    model.observe(trials(subset[:4]))
    assert model.score(subset).tolist() == list(prior.values()), "too few trials to fit trees"


def test_score_follows_good_prior(features: ScheduleFeatures) -> None:
    """With a prior the ranking is far better than without one, whatever its scale."""

    def knows(schedules: Sequence[Schedule]) -> np.ndarray:
        return np.array([-1e-3 * math.log(made_up(schedule)) for schedule in schedules])

    messages = trials(samples(12, 3))
    informed, plain = BoostedTrees(features, prior=knows), BoostedTrees(features)
    for model in (informed, plain):
        model.observe(messages)
    assert agreement(informed) > agreement(plain) + 0.1


def test_score_overcomes_wrong_prior(features: ScheduleFeatures) -> None:
    def wrong(schedules: Sequence[Schedule]) -> np.ndarray:
        return np.array([math.log(made_up(schedule)) for schedule in schedules])

    model = BoostedTrees(features, prior=wrong)
    assert agreement(model) < -0.9
    model.observe(trials(samples(100, 1)))
    assert agreement(model) > 0.7


def test_failures_are_slow(features: ScheduleFeatures) -> None:
    def cost(schedule: Schedule) -> float:
        return math.inf if schedule.vectorize is None else made_up(schedule)

    model = BoostedTrees(features)
    model.observe(trials(samples(120, 1), cost))
    subset = samples(200, 5)
    scores = model.score(subset)
    fails = np.array([not math.isfinite(cost(item)) for item in subset])
    assert np.median(scores[fails]) < np.quantile(scores[~fails], 0.2)


@pytest.mark.parametrize("cost", [lambda _: math.inf, lambda _: 1.0, lambda _: 1e-300])
def test_uninformative_trials_keep_prior(
    features: ScheduleFeatures, cost: Callable[[Schedule], float]
) -> None:
    model, subset = BoostedTrees(features), samples(40, 1)
    model.observe(trials(subset, cost))
    assert (model.score(subset) == score_by_counts(features.compute(subset))).all()


def test_extreme_costs(features: ScheduleFeatures) -> None:
    model, subset = BoostedTrees(features), samples(60, 1)
    model.observe(trials(subset[::2], lambda _: 1e-300))
    model.observe(trials(subset[1::2], lambda _: 1e300))
    assert np.isfinite(model.score(subset)).all()


def test_scores_are_deterministic(features: ScheduleFeatures) -> None:
    subset, messages = samples(50, 7), trials(samples(60, 1))
    first, second, other = BoostedTrees(features), BoostedTrees(features), BoostedTrees(features, seed=1)
    np.random.seed(0)  # the global generator must not matter
    for model in (first, second, other):
        model.observe(messages)
    assert (first.score(subset) == second.score(subset)).all()
    assert (first.score(subset) != other.score(subset)).any()
    assert (first.score(subset[:5]) == first.score(subset)[:5]).all(), (
        "a score does not depend on other schedules"
    )


def test_repeated_schedule_keeps_better_cost(features: ScheduleFeatures) -> None:
    subset = samples(60, 1)
    once, repeated = BoostedTrees(features), BoostedTrees(features)
    once.observe(trials(subset))
    repeated.observe(trials(subset))
    repeated.observe(trials(subset, lambda item: 5.0 * made_up(item)))
    assert (once.score(subset) == repeated.score(subset)).all()


def test_no_schedules(features: ScheduleFeatures) -> None:
    model = BoostedTrees(features)
    assert model.score([]).shape == (0,)
    model.observe(trials(samples(60, 1)))
    assert model.score([]).shape == (0,)


def test_missing_xgboost_raises(features: ScheduleFeatures, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "xgboost" else find(name, *a)
    )
    with pytest.raises(MissingExtraError):
        BoostedTrees(features)


@pytest.mark.parametrize("operator", OPERATORS)
def test_score_by_counts_ranks_presets(operator: str) -> None:
    """The best preset scores above most random schedules."""
    wide = 64 if OPERATORS[operator].dense_axes else None
    problem = SparseProblem(operator=OPERATORS[operator], matrix=MATRIX, n_cols=wide)
    features, rng = ScheduleFeatures(problem, 2), np.random.default_rng(0)
    space = ScheduleSpace(problem.operator, problem.extents, threads=(1, 2))
    sample_scores = score_by_counts(features.compute([space.sample(rng) for _ in range(300)]))
    by_hand = score_by_counts(
        features.compute([*build_presets(problem.operator, problem.extents, 2).values()])
    )
    assert np.isfinite(sample_scores).all()
    assert by_hand.max() > np.quantile(sample_scores, 0.75)
