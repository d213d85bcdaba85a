"""Search strategies by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from sparseflow.errors import InputError
from sparseflow.tuning.search.annealing import Annealing
from sparseflow.tuning.search.base import Strategy
from sparseflow.tuning.search.evolutionary import Evolutionary
from sparseflow.tuning.search.guided import (
    GuidedAnnealing,
    GuidedEvolutionary,
    GuidedQLearning,
    GuidedRandom,
)
from sparseflow.tuning.search.qlearning import QLearning
from sparseflow.tuning.search.random import Random

STRATEGIES: Mapping[str, type[Strategy]] = MappingProxyType(
    {
        one.name: one
        for one in (
            Random,
            Evolutionary,
            Annealing,
            QLearning,
            GuidedRandom,
            GuidedEvolutionary,
            GuidedAnnealing,
            GuidedQLearning,
        )
    }
)
"""Name -> class; subclasses of `Guided` take a cost model besides."""


def strategy(name: str) -> type[Strategy]:
    """The class of a way to search. Raises InputError where there is none of that name."""
    if name not in STRATEGIES:
        raise InputError(f"the method {name!r} is not known; choose one of: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]
