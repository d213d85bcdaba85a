"""Robust tabu search on one core (Taillard, Parallel Computing 17, 1991).

`kernels/tabu/reference.py` says which move is made; the changes of all swaps are kept up to date, so that a
move costs a few operations for each of them. Numba is imported when a search is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sparseflow.codesign.layout.kernels.tabu.rule import Rule, untouched
from sparseflow.codesign.layout.search import Search

DEFAULT_MOVES = 2000
"""Times the number of places: moves of a restart by default."""

_WORK = 4_000_000
"""Swaps, both ways, that are looked at between two looks at the clock: a few hundredths of a second."""

_FRESH = 50
"""Times the number of places: moves after which all changes are computed from scratch, which costs about as
much as n moves, so that rounding cannot pile up."""


class Tabu(Search):
    """Tabu search; a pass is one move."""

    default_passes = DEFAULT_MOVES

    def _passes(self, here: np.ndarray, best: np.ndarray, iterations: int, seed: int) -> Iterator[int]:
        from sparseflow.codesign.layout.kernels.tabu import cpu

        a, b, wall = self._working
        n, movers, rule = self._terms.n, self._terms.movers, Rule.of(self._terms.n)
        worth, until = np.zeros(2, a.dtype), untouched(n, movers)
        ordered = self._terms.ordered(b, here)
        delta, gate = np.empty((n, n), a.dtype), np.empty((n, n), np.int64)
        done, most, fresh = 0, max(1, _WORK // n**2), 0
        while True:
            if done >= fresh:
                cpu.fill(a, ordered, here, until, delta, gate)
                fresh = done + _FRESH * n
            moves = min(most, iterations - done)
            cpu.advance(
                a, ordered, here, best, worth, until, delta, gate, movers, done + 1, moves,
                rule.low, rule.span, rule.patience, wall, seed,
            )  # fmt: skip
            done += moves
            yield done
            if done >= iterations:
                return
