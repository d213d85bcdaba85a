"""What searches on one core have in common: compiled when made, and restarts that end when time is over."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from sparseflow.codesign.layout.terms import Terms
from sparseflow.core.extras import require


class Search(ABC):
    """Searches a problem; compiled when made.

    Args:
        terms: The problem, of at least two places.

    Attributes:
        default_passes: Times the number of places: passes of a restart by default.

    Raises:
        MissingExtraError: Numba is not installed.
    """

    default_passes: int

    def __init__(self, terms: Terms) -> None:
        require("numba", "codesign")
        self._terms = terms
        self._working = terms.working()
        self.run(np.arange(terms.n), iterations=0, seed=0)

    def default_iterations(self) -> int:
        return self.default_passes * self._terms.n

    def run(
        self, start: np.ndarray, *, iterations: int, seed: int, deadline: float | None = None
    ) -> tuple[np.ndarray, int]:
        """Search from one permutation.

        Args:
            start: Where each is at first, int64, [n].
            iterations: Passes over all swaps: a move of tabu search, a trial of each swap in annealing.
            seed: Of what the search draws, 32 bits.
            deadline: `time.perf_counter()` at which to stop; None for no limit.

        Returns:
            The best permutation, and how many passes were made, the last of them perhaps in part.
        """
        here = self._terms.inside(start)
        best, done = here.copy(), 0
        for passes in self._passes(here, best, iterations, seed):
            done = passes
            if deadline is not None and time.perf_counter() >= deadline:
                break
        return self._terms.outside(best), done

    @abstractmethod
    def _passes(self, here: np.ndarray, best: np.ndarray, iterations: int, seed: int) -> Iterator[int]:
        """Search, and tell now and then how many passes have been made, for no passes once: that compiles.

        Args:
            here: Places of the rows, int64, [n]; changed.
            best: The best so far, int64, [n]; changed.
            iterations: As in `run`.
            seed: As in `run`.
        """
