"""Models that tell fast schedules of a problem from slow ones without running them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sparseflow.core.extras import require
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.model.features import Features
from sparseflow.tuning.schedule.schedule import Schedule

Scorer = Callable[[Sequence[Schedule]], np.ndarray]
"""Schedules -> scores, shape (n,); the higher, the faster. Only their order need mean something."""

_LEAST = 8
"""Trials before there is anything to learn from."""

_EVERY = 4
"""New trials after which it is learned anew."""

SLOWEST = 3.0
"""Logarithm of how many times as long as the best a schedule takes that is no longer told from worse ones."""

_SHARPNESS = 2.0
"""What a difference in log time is multiplied by to give the odds that one of two schedules is faster."""

_REMEMBERED = 50_000
"""Schedules whose prior scores are kept."""

_ROUNDS = 60
_SETTINGS = {
    "objective": "rank:pairwise", "tree_method": "hist", "max_depth": 5, "eta": 0.15, "min_child_weight": 0.1,
    "subsample": 0.8, "colsample_bytree": 0.6, "lambda": 1.0, "base_score": 0.0, "nthread": 1, "verbosity": 0,
}  # fmt: skip


class CostModel(Protocol):
    """Ranks the schedules of one problem, better the more of it was measured.

    A network that knows matrices can stand here as it is, if `observe` does nothing, or be what another model
    starts from: `BoostedTrees(features, prior=scorer)`.
    """

    def scores(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """A number for each, shape (n,); the higher, the faster it is thought to be.

        Only the order matters: scores say nothing about milliseconds, and those that were given before
        something was observed do not compare with those given after.
        """
        ...

    def observe(self, trials: Sequence[Trial]) -> None:
        """Learn from what was measured of this problem. Failures are among it: they count as slow."""
        ...


class BoostedTrees:
    """Boosted trees on what schedules do, which learn in which order those that were measured come.

    Scores are a prior's, stretched as fits the measurements, plus what trees add to that. Until there is
    enough to learn from they are the prior's. Trees are grown anew every few trials, from all of them, on one
    thread; that takes some hundredths of a second. The same trials in the same order give the same scores.

    Args:
        features: Of the problem.
        prior: What is thought of schedules beforehand, such as by a network; by default `rough`.
        seed: What rows and columns for each tree are drawn from.

    Raises:
        MissingExtraError: XGBoost is missing.
    """

    def __init__(self, features: Features, *, prior: Scorer | None = None, seed: int = 0) -> None:
        self._xgboost = require("xgboost", "tuning")
        self._features = features
        self._given: Scorer = prior or (lambda schedules: rough(features.of(schedules)))
        self._told: dict[Schedule, float] = {}
        self._seed = seed
        self._costs: dict[Schedule, float] = {}
        self._learned = 0
        self._trees: Any = None
        self._slope = 0.0

    def observe(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            cost = math.log(trial.ratio) if trial.error is None else math.inf
            self._costs[trial.schedule] = min(cost, self._costs.get(trial.schedule, math.inf))

    def scores(self, schedules: Sequence[Schedule]) -> np.ndarray:
        if len(self._costs) >= max(_LEAST, self._learned + _EVERY):
            self._learn()
        prior = self._prior(schedules)
        if self._trees is None or not len(schedules):
            return prior
        columns = np.column_stack([self._features.of(schedules), prior]).astype(np.float32)
        return self._slope * prior + self._trees.inplace_predict(columns)

    def _prior(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """The prior's scores; a search asks for the same schedules again and again."""
        fresh = [each for each in dict.fromkeys(schedules) if each not in self._told]
        if fresh:
            if len(self._told) > _REMEMBERED:
                self._told.clear()
                fresh = list(dict.fromkeys(schedules))
            self._told |= zip(fresh, map(float, self._given(fresh)), strict=True)
        return np.array([self._told[each] for each in schedules], float)

    def _learn(self) -> None:
        self._learned = len(self._costs)
        schedules, costs = list(self._costs), np.array([*self._costs.values()])
        best = costs.min()
        if not (math.isfinite(best) and costs.max() > best):
            return  # all failed, or all are alike
        speeds = -np.minimum(costs - best, SLOWEST)
        prior = self._prior(schedules)
        self._slope = _SHARPNESS * _slope(prior, speeds)
        columns = np.column_stack([self._features.of(schedules), prior]).astype(np.float32)
        rows = self._xgboost.DMatrix(
            columns,
            label=speeds - speeds.min(),
            base_margin=self._slope * prior,
            qid=np.zeros(len(speeds), np.int32),
        )
        self._trees = self._xgboost.train({**_SETTINGS, "seed": self._seed}, rows, num_boost_round=_ROUNDS)


def rough(features: np.ndarray) -> np.ndarray:
    """Scores from a count of steps and bytes alone; what a search begins with when it knows nothing better.

    Args:
        features: As `Features.of` gives them.

    Returns:
        float64, (n,): minus the logarithm of a guess at the nanoseconds for each element. The weights were
        fitted to a few hundred measurements on a processor with vectors of 64 bytes.
    """
    column = dict(zip(Features.names, features.T.astype(float), strict=True))

    def of(name: str) -> np.ndarray:
        return 2.0 ** column[name]

    vector = column["vector of results"] + column["vector of a sum"] + column["vector of lanes"]
    each = np.where(vector > 0.0, 0.1, np.where(column["vector hinted at"] > 0.0, 0.8, 0.25))
    cost = each * of("log2 vectors per element")
    cost += 0.1 * sum(of(f"log2 bodies {place} per element") for place in range(1, 6))
    cost += 0.1 * of("log2 results written per element")
    cost += 0.005 * of("log2 bytes past l1 per element") + 0.01 * of("log2 bytes past l2 per element")
    cost += 0.3 * of("log2 stored over coordinates") * of("log2 walks")
    cost *= of("log2 imbalance") / of("log2 threads")
    shared = column["place parallel"] >= 0.0
    begun = of("log2 times shared") * (1000.0 + 75.0 * of("log2 chunks a thread"))
    return -np.log(cost + shared * begun / of("log2 elements"))


def _slope(prior: np.ndarray, speeds: np.ndarray) -> float:
    """What a prior's scores are multiplied by to come closest to log speeds; 0 if they point elsewhere."""
    spread = prior - prior.mean()
    variance = float((spread**2).sum())
    if not variance > 0.0:
        return 0.0
    return max(float((spread * speeds).sum()) / variance, 0.0)
