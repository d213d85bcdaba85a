"""Search methods by name, with and without a cost model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping

import numpy as np

from sparseflow.tuning.model.cost_model import BoostedTrees, CountModel, ScheduleScorer
from sparseflow.tuning.model.features import ScheduleFeatures
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.space import ScheduleSpace
from sparseflow.tuning.search.annealing import SimulatedAnnealing
from sparseflow.tuning.search.base import RandomSearch, Strategy
from sparseflow.tuning.search.evolutionary import EvolutionarySearch
from sparseflow.tuning.search.guided import GuidedSearch
from sparseflow.tuning.search.qlearning import QLearningSearch

Prior = Callable[[SparseProblem, int], ScheduleScorer]
"""(problem, threads) -> scorer of its schedules before anything is measured."""

STRATEGIES: Mapping[str, type[Strategy]] = {
    "random": RandomSearch,
    "evolutionary": EvolutionarySearch,
    "annealing": SimulatedAnnealing,
    "qlearning": QLearningSearch,
}
"""Name -> search method without a cost model."""

GUIDED_PREFIX = "guided-"
"""Prefix of the name of a method that is guided by a cost model."""

METHODS = (*STRATEGIES, *(GUIDED_PREFIX + name for name in STRATEGIES))
"""Names of all search methods."""

DEFAULT_METHOD = "guided-evolutionary"

_MODEL_MODULES = ("torch", "xgboost")
"""Modules of the cost model; importing them takes longer than some measurements."""

_IMPORT_S = 1.2
"""Assumed time of the first import of each of these modules, seconds."""

_MODEL_BUILDS = 1.5
"""Time to read the pattern for the cost model, over the longest time to build a baseline."""


def create_strategy(
    method: str,
    problem: SparseProblem,
    threads: int,
    rng: np.random.Generator,
    *,
    prior: Prior | None,
    max_start_s: float,
    build_s: float,
) -> Strategy:
    """Create a search method.

    Args:
        method: One of `METHODS`.
        problem: Problem.
        threads: Maximum number of threads of a schedule.
        rng: Random generator.
        prior: Initial scores of a guided method; None for the shipped network.
        max_start_s: Time that the cost model may take to start, seconds. If boosted trees and the prior take
            longer, scores are computed from counts of steps and bytes.
        build_s: Longest time to build a baseline, seconds.
    """
    counts = {threads, *(1 << power for power in range(threads.bit_length()))}
    space = ScheduleSpace(problem.operator, problem.extents, threads=counts)
    strategy = STRATEGIES[method.removeprefix(GUIDED_PREFIX)](space, rng)
    if not method.startswith(GUIDED_PREFIX):
        return strategy
    features = ScheduleFeatures(problem, threads)
    num_imports = sum(module not in sys.modules for module in _MODEL_MODULES)
    if _IMPORT_S * num_imports + _MODEL_BUILDS * build_s > max_start_s:
        return GuidedSearch(strategy, CountModel(features))
    scorer = (prior or load_default_prior())(problem, threads)
    return GuidedSearch(strategy, BoostedTrees(features, prior=scorer))


def load_default_prior() -> Prior:
    """Load the shipped network as prior."""
    from sparseflow.tuning.model.net.pretrained import make_shipped_prior

    return make_shipped_prior
