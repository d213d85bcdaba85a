"""Robust tabu search on one core (Taillard, Parallel Computing 17, 1991).

`kernels/tabu/reference.py` says which move is made; the changes of all swaps are kept up to date, so that a
move costs a few operations for each of them. Numba is imported when a search is made.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from sparseflow.codesign.layout.kernels.tabu.rule import Rule, untouched
from sparseflow.codesign.layout.terms import Terms
from sparseflow.core.extras import require

DEFAULT_MOVES = 2000
"""Times the number of places: moves of a restart by default."""

_WORK = 4_000_000
"""Swaps, both ways, that are looked at between two looks at the clock: a few hundredths of a second."""

_FRESH = 50
"""Times the number of places: moves after which all changes are computed from scratch, which costs about as
much as n moves, so that rounding cannot pile up."""


class Tabu:
    """Searches a problem; compiled when made.

    Args:
        terms: The problem, of at least two places.

    Raises:
        MissingExtraError: Numba is not installed.
    """

    def __init__(self, terms: Terms) -> None:
        require("numba", "codesign")
        from sparseflow.codesign.layout.kernels.tabu import cpu

        self._fill: Any = cpu.fill
        self._advance: Any = cpu.advance
        self._terms = terms
        self._rule = Rule.of(terms.n)
        self._working = terms.working()
        self.run(np.arange(terms.n), iterations=0, seed=0)

    def default_iterations(self) -> int:
        return DEFAULT_MOVES * self._terms.n

    def run(
        self, start: np.ndarray, *, iterations: int, seed: int, deadline: float | None = None
    ) -> tuple[np.ndarray, int]:
        """Search from one permutation.

        Args:
            start: Where each is at first, int64, [n].
            iterations: Moves to make.
            seed: Of the tenures, 32 bits.
            deadline: `time.perf_counter()` at which to stop; None for no limit.

        Returns:
            The best permutation, and how many moves were made.
        """
        a, b, wall = self._working
        n, rule = self._terms.n, self._rule
        here = self._terms.inside(start)
        best = here.copy()
        worth, until = np.zeros(2, a.dtype), untouched(n, self._terms.movers)
        ordered = self._terms.ordered(b, here)
        delta, gate = np.empty((n, n), a.dtype), np.empty((n, n), np.int64)
        done, most, fresh = 0, max(1, _WORK // n**2), 0
        while True:
            if done >= fresh:
                self._fill(a, ordered, here, until, delta, gate)
                fresh = done + _FRESH * n
            moves = min(most, iterations - done)
            self._advance(
                a, ordered, here, best, worth, until, delta, gate, self._terms.movers, done + 1, moves,
                rule.low, rule.span, rule.patience, wall, seed,
            )  # fmt: skip
            done += moves
            if done >= iterations or (deadline is not None and time.perf_counter() >= deadline):
                return self._terms.outside(best), done
