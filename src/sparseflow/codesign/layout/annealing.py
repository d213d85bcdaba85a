"""Simulated annealing on one core (Kirkpatrick et al., Science 1983; swaps in turn as Connolly, EJOR 1990).

All swaps are tried one after the other, over and over; one that raises the cost by d is made with the
probability exp(-d/t). The temperature falls from t0 to t1 as t/(1 + beta t). When a whole pass has been
rejected, the search goes on at the temperature at which the best permutation was found (Connolly).

t0 and t1 come from the median change of swaps in the start: Connolly's own, from the least and the largest
change, fail where changes differ by orders of magnitude, as they do with real distances.

It is worth a try where few pairs make up most of the flow. Numba is imported when a search is made.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from sparseflow.codesign.layout.terms import Terms
from sparseflow.core.extras import require

DEFAULT_PASSES = 200
"""Times the number of places: passes of a restart by default. A trial costs about ten times what judging a
swap costs tabu search."""

WARMEST, COLDEST = 0.3, 0.06
"""t0 and t1, in median changes of a swap."""

_PROBES = 500
"""Swaps from which the median is taken."""

_WORK = 8_000_000
"""Trials times places between two looks at the clock: about a twentieth of a second."""


class Annealing:
    """Searches a problem; compiled when made.

    Args:
        terms: The problem, of at least two places.

    Raises:
        MissingExtraError: Numba is not installed.
    """

    def __init__(self, terms: Terms) -> None:
        require("numba", "codesign")
        from sparseflow.codesign.layout.kernels.annealing import cpu

        self._walk: Any = cpu.walk
        self._change_of: Any = cpu.change_of
        self._terms = terms
        self._working = terms.working()
        self.run(np.arange(terms.n), iterations=0, seed=0)

    def default_iterations(self) -> int:
        return DEFAULT_PASSES * self._terms.n

    def run(
        self, start: np.ndarray, *, iterations: int, seed: int, deadline: float | None = None
    ) -> tuple[np.ndarray, int]:
        """Search from one permutation.

        Args:
            start: Where each is at first, int64, [n].
            iterations: Passes over all swaps.
            seed: Of the acceptance, 32 bits.
            deadline: `time.perf_counter()` at which to stop; None for no limit.

        Returns:
            The best permutation, and how many passes were made, the last of them perhaps in part.
        """
        a, b, _ = self._working
        n = self._terms.n
        here = self._terms.inside(start)
        best = here.copy()
        ordered = self._terms.ordered(b, here)
        swaps = self._terms.swaps
        worth, counts = np.zeros(2, a.dtype), np.array([0, 0, 0, 1])
        heat = self._heat(a, ordered, swaps * iterations, seed)
        most = max(1, _WORK // n)
        while True:
            trials = min(most, swaps * iterations - int(counts[0]))
            self._walk(a, ordered, here, best, worth, heat, counts, self._terms.movers, trials, seed)
            done = int(counts[0])
            if done >= swaps * iterations or (deadline is not None and time.perf_counter() >= deadline):
                return self._terms.outside(best), -(-done // swaps)

    def _heat(self, a: np.ndarray, ordered: np.ndarray, trials: int, seed: int) -> np.ndarray:
        """Temperature now and at the best, and beta, float64, [3]."""
        rng = np.random.default_rng(seed)
        r = rng.integers(self._terms.movers, size=_PROBES)
        s = (r + rng.integers(1, self._terms.n, size=_PROBES)) % self._terms.n
        changes = np.abs([float(self._change_of(a, ordered, u, v)) for u, v in zip(r, s, strict=True)])
        # Swaps of two dummies change nothing, or next to nothing by rounding.
        changes = changes[changes > 1e-9 * changes.max()]
        usual = float(np.median(changes)) if len(changes) else 1.0
        first, last = WARMEST * usual, COLDEST * usual
        return np.array([first, first, (first - last) / (max(1, trials) * first * last)])
