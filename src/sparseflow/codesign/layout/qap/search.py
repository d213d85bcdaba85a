"""What searches on one core have in common: compiled when made, and restarts that end when time is over."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from sparseflow.codesign.layout.qap.kernels.tabu.rule import Rule, untouched
from sparseflow.codesign.layout.qap.terms import Terms
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


DEFAULT_PASSES = 200
"""Times the number of places: passes of a restart by default. A trial costs about ten times what judging a
swap costs tabu search."""

WARMEST, COLDEST = 0.3, 0.06
"""t0 and t1, in median changes of a swap."""

_NUM_PROBES = 500
"""Swaps from which the median is taken."""

_ANNEALING_CHUNK = 8_000_000
"""Trials times places between two looks at the clock: about a twentieth of a second."""


class Annealing(Search):
    """Simulated annealing; a pass tries every swap once."""

    default_passes = DEFAULT_PASSES

    def _passes(self, here: np.ndarray, best: np.ndarray, iterations: int, seed: int) -> Iterator[int]:
        from sparseflow.codesign.layout.qap.kernels.annealing import cpu

        a, b, _ = self._working
        movers, swaps = self._terms.movers, self._terms.swaps
        ordered = self._terms.ordered(b, here)
        worth, counts = np.zeros(2, a.dtype), np.array([0, 0, 0, 1])
        heat = self._heat(a, ordered, swaps * iterations, seed)
        done, most = 0, max(1, _ANNEALING_CHUNK // self._terms.n)
        while True:
            trials = min(most, swaps * iterations - done)
            cpu.walk(a, ordered, here, best, worth, heat, counts, movers, trials, seed)
            done = int(counts[cpu.TRIED])
            yield -(-done // swaps)
            if done >= swaps * iterations:
                return

    def _heat(self, a: np.ndarray, ordered: np.ndarray, trials: int, seed: int) -> np.ndarray:
        """Temperature now and at the best, and beta, float64, [3]."""
        from sparseflow.codesign.layout.qap.kernels.annealing import cpu

        rng = np.random.default_rng(seed)
        r = rng.integers(self._terms.movers, size=_NUM_PROBES)
        s = (r + rng.integers(1, self._terms.n, size=_NUM_PROBES)) % self._terms.n
        changes = np.abs([float(cpu.change_of(a, ordered, u, v)) for u, v in zip(r, s, strict=True)])
        # Swaps of two dummies change nothing, or next to nothing by rounding.
        changes = changes[changes > 1e-9 * changes.max()]
        usual = float(np.median(changes)) if len(changes) else 1.0
        first, last = WARMEST * usual, COLDEST * usual
        return np.array([first, first, (first - last) / (max(1, trials) * first * last)])


DEFAULT_MOVES = 2000
"""Times the number of places: moves of a restart by default."""

_TABU_CHUNK = 4_000_000
"""Swaps, both ways, that are looked at between two looks at the clock: a few hundredths of a second."""

_REFRESH_INTERVAL = 50
"""Times the number of places: moves after which all changes are computed from scratch, which costs about as
much as n moves, so that rounding cannot pile up."""


class Tabu(Search):
    """Tabu search; a pass is one move."""

    default_passes = DEFAULT_MOVES

    def _passes(self, here: np.ndarray, best: np.ndarray, iterations: int, seed: int) -> Iterator[int]:
        from sparseflow.codesign.layout.qap.kernels.tabu import cpu

        a, b, wall = self._working
        n, movers, rule = self._terms.n, self._terms.movers, Rule.of(self._terms.n)
        worth, until = np.zeros(2, a.dtype), untouched(n, movers)
        ordered = self._terms.ordered(b, here)
        delta, gate = np.empty((n, n), a.dtype), np.empty((n, n), np.int64)
        done, most, fresh = 0, max(1, _TABU_CHUNK // n**2), 0
        while True:
            if done >= fresh:
                cpu.fill(a, ordered, here, until, delta, gate)
                fresh = done + _REFRESH_INTERVAL * n
            moves = min(most, iterations - done)
            cpu.advance(
                a, ordered, here, best, worth, until, delta, gate, movers, done + 1, moves,
                rule.low, rule.span, rule.patience, wall, seed,
            )  # fmt: skip
            done += moves
            yield done
            if done >= iterations:
                return
