"""Cost models that rank the schedules of one problem during a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sparseflow.core.extras import require
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.model.features import ScheduleFeatures
from sparseflow.tuning.schedule.schedule import Schedule

ScheduleScorer = Callable[[Sequence[Schedule]], np.ndarray]
"""Schedules -> scores, shape [n]; higher is faster. Only the order of scores is meaningful."""

_MIN_TRIALS = 8
"""Minimum number of trials to fit the trees."""

_REFIT_INTERVAL = 4
"""New trials between fits."""

MAX_LOG_SLOWDOWN = 3.0
"""Log ratio to the best schedule beyond which slower schedules are not distinguished."""

_SLOPE_SCALE = 2.0
"""Factor from a difference in log time to the log-odds that one of two schedules is faster."""

_MAX_CACHED_SCHEDULES = 50_000
"""Schedules with cached prior scores."""

_NUM_BOOST_ROUNDS = 60
_XGBOOST_PARAMS = {
    "objective": "rank:pairwise", "tree_method": "hist", "max_depth": 5, "eta": 0.15, "min_child_weight": 0.1,
    "subsample": 0.8, "colsample_bytree": 0.6, "lambda": 1.0, "base_score": 0.0, "nthread": 1, "verbosity": 0,
}  # fmt: skip


class FeatureExtractor(Protocol):
    """Computes features of schedules of one problem; see `ScheduleFeatures`."""

    def compute(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """Compute the features of schedules, float32, shape [schedules, features]."""
        ...


class CostModel(Protocol):
    """Ranks the schedules of one problem and learns from its measurements."""

    def score(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """Score schedules, shape [n]; higher is faster.

        Only the order is meaningful; scores before and after `observe` are not comparable.
        """
        ...

    def observe(self, trials: Sequence[Trial]) -> None:
        """Learn from measurements, including failures, which count as slow."""
        ...


class BoostedTrees:
    """Boosted trees on schedule features that learn to rank the measured schedules.

    The score is the prior's score times a fitted slope plus the output of the trees. Before the first fit it
    is the prior's score. The trees are fitted again every few trials on all trials with one thread, which
    takes some 10 ms. Equal trials in equal order give equal scores.

    Args:
        features: Features of the problem.
        prior: Scores before any measurement, such as a network's; by default `score_by_counts`.
        seed: Random seed of the row and column subsampling.

    Raises:
        MissingExtraError: XGBoost is missing.
    """

    def __init__(
        self, features: FeatureExtractor, *, prior: ScheduleScorer | None = None, seed: int = 0
    ) -> None:
        self._xgboost = require("xgboost", "tuning")
        self._features = features
        self._prior_scorer: ScheduleScorer = prior or (
            lambda schedules: score_by_counts(features.compute(schedules))
        )
        self._prior_scores: dict[Schedule, float] = {}
        self._seed = seed
        self._costs: dict[Schedule, float] = {}
        self._num_fitted = 0
        self._trees: Any = None
        self._fit_slope = 0.0

    def observe(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            cost = math.log(trial.ratio) if trial.error is None else math.inf
            self._costs[trial.schedule] = min(cost, self._costs.get(trial.schedule, math.inf))

    def score(self, schedules: Sequence[Schedule]) -> np.ndarray:
        if len(self._costs) >= max(_MIN_TRIALS, self._num_fitted + _REFIT_INTERVAL):
            self._fit()
        prior = self._score_prior(schedules)
        if self._trees is None or not len(schedules):
            return prior
        columns = np.column_stack([self._features.compute(schedules), prior]).astype(np.float32)
        return self._fit_slope * prior + self._trees.inplace_predict(columns)

    def _score_prior(self, schedules: Sequence[Schedule]) -> np.ndarray:
        """Return the cached scores of the prior."""
        fresh = [schedule for schedule in dict.fromkeys(schedules) if schedule not in self._prior_scores]
        if fresh:
            if len(self._prior_scores) > _MAX_CACHED_SCHEDULES:
                self._prior_scores.clear()
                fresh = list(dict.fromkeys(schedules))
            self._prior_scores |= zip(fresh, map(float, self._prior_scorer(fresh)), strict=True)
        return np.array([self._prior_scores[schedule] for schedule in schedules], float)

    def _fit(self) -> None:
        self._num_fitted = len(self._costs)
        schedules, costs = list(self._costs), np.array([*self._costs.values()])
        best = costs.min()
        if not (math.isfinite(best) and costs.max() > best):
            return  # all failed, or all are equal
        log_speeds = -np.minimum(costs - best, MAX_LOG_SLOWDOWN)
        prior = self._score_prior(schedules)
        self._fit_slope = _SLOPE_SCALE * _fit_slope(prior, log_speeds)
        columns = np.column_stack([self._features.compute(schedules), prior]).astype(np.float32)
        rows = self._xgboost.DMatrix(
            columns,
            label=log_speeds - log_speeds.min(),
            base_margin=self._fit_slope * prior,
            qid=np.zeros(len(log_speeds), np.int32),
        )
        self._trees = self._xgboost.train(
            {**_XGBOOST_PARAMS, "seed": self._seed}, rows, num_boost_round=_NUM_BOOST_ROUNDS
        )


class CountModel:
    """Ranks schedules by `score_by_counts` and learns nothing; it is ready without imports or a network.

    Args:
        features: Features of the problem.
    """

    def __init__(self, features: ScheduleFeatures) -> None:
        self._features = features

    def score(self, schedules: Sequence[Schedule]) -> np.ndarray:
        return score_by_counts(self._features.compute(schedules))

    def observe(self, trials: Sequence[Trial]) -> None:
        pass


def score_by_counts(features: np.ndarray) -> np.ndarray:
    """Score schedules by counts of steps and bytes, for searches without another prior.

    Args:
        features: Result of `ScheduleFeatures.compute`.

    Returns:
        Negative log of the estimated nanoseconds per element, float64, shape [n]. The weights were fitted to
        a few hundred measurements on a CPU with 64-byte vectors.
    """
    column = dict(zip(ScheduleFeatures.names, features.T.astype(float), strict=True))

    def exp2(name: str) -> np.ndarray:
        return 2.0 ** column[name]

    vector = column["vector of results"] + column["vector of a sum"] + column["vector of lanes"]
    vector_cost = np.where(vector > 0.0, 0.1, np.where(column["vector hinted at"] > 0.0, 0.8, 0.25))
    cost = vector_cost * exp2("log2 vectors per element")
    cost += 0.1 * sum(exp2(f"log2 bodies {index} per element") for index in range(1, 6))
    cost += 0.1 * exp2("log2 results written per element")
    cost += 0.005 * exp2("log2 bytes past l1 per element") + 0.01 * exp2("log2 bytes past l2 per element")
    cost += 0.3 * exp2("log2 stored over coordinates") * exp2("log2 walks")
    cost *= exp2("log2 imbalance") / exp2("log2 threads")
    shared = column["place parallel"] >= 0.0
    parallel_cost = exp2("log2 times shared") * (1000.0 + 75.0 * exp2("log2 chunks a thread"))
    return -np.log(cost + shared * parallel_cost / exp2("log2 elements"))


def _fit_slope(prior: np.ndarray, speeds: np.ndarray) -> float:
    """Fit the slope from prior scores to log speeds by least squares; 0 if it is negative."""
    centered = prior - prior.mean()
    variance = float((centered**2).sum())
    if not variance > 0.0:
        return 0.0
    return max(float((centered * speeds).sum()) / variance, 0.0)
