"""Simulated annealing on one core (Kirkpatrick et al., Science 1983; swaps in turn as Connolly, EJOR 1990).

All swaps are tried one after the other, over and over; one that raises the cost by d is made with the
probability exp(-d/t). The temperature falls from t0 to t1 as t/(1 + beta t). When a whole pass has been
rejected, the search goes on at the temperature at which the best permutation was found (Connolly).

t0 and t1 come from the median change of swaps in the start: Connolly's own, from the least and the largest
change, fail where changes differ by orders of magnitude, as they do with real distances.

It is worth a try where few pairs make up most of the flow. Numba is imported when a search is made.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sparseflow.codesign.layout.search import Search

DEFAULT_PASSES = 200
"""Times the number of places: passes of a restart by default. A trial costs about ten times what judging a
swap costs tabu search."""

WARMEST, COLDEST = 0.3, 0.06
"""t0 and t1, in median changes of a swap."""

_PROBES = 500
"""Swaps from which the median is taken."""

_WORK = 8_000_000
"""Trials times places between two looks at the clock: about a twentieth of a second."""


class Annealing(Search):
    """Simulated annealing; a pass tries every swap once."""

    default_passes = DEFAULT_PASSES

    def _passes(self, here: np.ndarray, best: np.ndarray, iterations: int, seed: int) -> Iterator[int]:
        from sparseflow.codesign.layout.kernels.annealing import cpu

        a, b, _ = self._working
        movers, swaps = self._terms.movers, self._terms.swaps
        ordered = self._terms.ordered(b, here)
        worth, counts = np.zeros(2, a.dtype), np.array([0, 0, 0, 1])
        heat = self._heat(a, ordered, swaps * iterations, seed)
        done, most = 0, max(1, _WORK // self._terms.n)
        while True:
            trials = min(most, swaps * iterations - done)
            cpu.walk(a, ordered, here, best, worth, heat, counts, movers, trials, seed)
            done = int(counts[cpu.TRIED])
            yield -(-done // swaps)
            if done >= swaps * iterations:
                return

    def _heat(self, a: np.ndarray, ordered: np.ndarray, trials: int, seed: int) -> np.ndarray:
        """Temperature now and at the best, and beta, float64, [3]."""
        from sparseflow.codesign.layout.kernels.annealing import cpu

        rng = np.random.default_rng(seed)
        r = rng.integers(self._terms.movers, size=_PROBES)
        s = (r + rng.integers(1, self._terms.n, size=_PROBES)) % self._terms.n
        changes = np.abs([float(cpu.change_of(a, ordered, u, v)) for u, v in zip(r, s, strict=True)])
        # Swaps of two dummies change nothing, or next to nothing by rounding.
        changes = changes[changes > 1e-9 * changes.max()]
        usual = float(np.median(changes)) if len(changes) else 1.0
        first, last = WARMEST * usual, COLDEST * usual
        return np.array([first, first, (first - last) / (max(1, trials) * first * last)])
