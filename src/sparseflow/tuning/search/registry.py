"""Search strategies by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sparseflow.errors import InputError
from sparseflow.tuning.search.annealing import SimulatedAnnealing
from sparseflow.tuning.search.base import Strategy
from sparseflow.tuning.search.evolutionary import EvolutionarySearch
from sparseflow.tuning.search.guided import (
    GuidedAnnealing,
    GuidedEvolutionary,
    GuidedQLearning,
    GuidedRandom,
)
from sparseflow.tuning.search.qlearning import QLearningSearch
from sparseflow.tuning.search.random import RandomSearch

STRATEGIES: Mapping[str, type[Strategy]] = MappingProxyType(
    {
        strategy_class.name: strategy_class
        for strategy_class in (
            RandomSearch,
            EvolutionarySearch,
            SimulatedAnnealing,
            QLearningSearch,
            GuidedRandom,
            GuidedEvolutionary,
            GuidedAnnealing,
            GuidedQLearning,
        )
    }
)
"""Name -> class; subclasses of `GuidedSearch` also take a cost model."""


def get_strategy(name: str) -> type[Strategy]:
    """Return the class of a search method. Raises InputError if it is unknown."""
    if name not in STRATEGIES:
        raise InputError(f"unknown method {name!r}; choose one of: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
