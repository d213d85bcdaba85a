"""Searches for quadratic assignments on one core: robust tabu search and simulated annealing.

Tabu search (Taillard, Parallel Computing 17, 1991) is defined in `kernels/tabu/reference.py`; the changes of
all swaps are kept up to date, so a move costs a few operations per swap.

Annealing (Kirkpatrick et al., Science 1983; sequential swaps as in Connolly, EJOR 1990) tries all swaps in
turn and accepts an increase d with probability exp(-d/t). The temperature decreases from t0 to t1 as t/(1 +
beta t). After a full pass of rejections the search continues at the temperature of the best permutation
(Connolly). t0 and t1 are derived from the median change of swaps in the start; Connolly's choice from the
smallest and largest change fails if changes differ by orders of magnitude, as with real distances. Annealing
is useful if few pairs have most of the flow.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np

from sparseflow.codesign.layout.qap.kernels.tabu.rule import TabuRule, init_tabu
from sparseflow.codesign.layout.qap.terms import QapTerms
from sparseflow.core.extras import require


class QapSearch(ABC):
    """A search for one problem; compiles its kernel on creation.

    Args:
        terms: The problem, with at least two places.

    Attributes:
        default_passes: Default number of passes per restart and place.

    Raises:
        MissingExtraError: Numba is missing.
    """

    default_passes: int

    def __init__(self, terms: QapTerms) -> None:
        require("numba", "codesign")
        self._terms = terms
        self._working = terms.to_working_dtype()
        self.run(np.arange(terms.n), iterations=0, seed=0)

    def default_iterations(self) -> int:
        return self.default_passes * self._terms.n

    def run(
        self, start: np.ndarray, *, iterations: int, seed: int, deadline: float | None = None
    ) -> tuple[np.ndarray, int]:
        """Search from one permutation.

        Args:
            start: Initial places, int64, [n].
            iterations: Passes over all swaps: a move of tabu search, or a trial of each swap in annealing.
            seed: Random seed, 32 bits.
            deadline: `time.perf_counter()` at which to stop; None for no limit.

        Returns:
            The best permutation and the number of passes, the last possibly incomplete.
        """
        current = self._terms.to_rows(start)
        best, completed = current.copy(), 0
        for passes in self._run_passes(current, best, iterations, seed):
            completed = passes
            if deadline is not None and time.perf_counter() >= deadline:
                break
        return self._terms.from_rows(best), completed

    @abstractmethod
    def _run_passes(self, current: np.ndarray, best: np.ndarray, iterations: int, seed: int) -> Iterator[int]:
        """Search, yielding the number of completed passes from time to time, and once for zero iterations
        (to compile).

        Args:
            current: Places of the rows, int64, [n]; updated.
            best: Best places so far, int64, [n]; updated.
            iterations: See `run`.
            seed: See `run`.
        """


DEFAULT_PASSES = 200
"""Default passes of annealing per restart and place. A trial costs about ten times a swap evaluation of
tabu search.
"""

INITIAL_TEMPERATURE, FINAL_TEMPERATURE = 0.3, 0.06
"""t0 and t1, in median changes of a swap."""

_NUM_PROBES = 500
"""Number of swaps that determine the median."""

_ANNEALING_CHUNK = 8_000_000
"""Trials times places between two time checks, about 50 ms."""


class AnnealingSearch(QapSearch):
    """Simulated annealing; a pass tries every swap once."""

    default_passes = DEFAULT_PASSES

    def _run_passes(self, current: np.ndarray, best: np.ndarray, iterations: int, seed: int) -> Iterator[int]:
        from sparseflow.codesign.layout.qap.kernels import annealing as kernel

        a, b, _ = self._working
        movers, swaps = self._terms.num_movers, self._terms.num_swaps
        ordered = self._terms.order_distances(b, current)
        cost_change, counts = np.zeros(2, a.dtype), np.array([0, 0, 0, 1])
        schedule = self._init_schedule(a, ordered, swaps * iterations, seed)
        completed, max_trials = 0, max(1, _ANNEALING_CHUNK // self._terms.n)
        while True:
            trials = min(max_trials, swaps * iterations - completed)
            kernel.anneal(a, ordered, current, best, cost_change, schedule, counts, movers, trials, seed)
            completed = int(counts[kernel.NUM_TRIALS])
            yield -(-completed // swaps)
            if completed >= swaps * iterations:
                return

    def _init_schedule(self, a: np.ndarray, ordered: np.ndarray, trials: int, seed: int) -> np.ndarray:
        """Current temperature, temperature at the best, and beta, float64, [3]."""
        from sparseflow.codesign.layout.qap.kernels import annealing as kernel

        rng = np.random.default_rng(seed)
        r = rng.integers(self._terms.num_movers, size=_NUM_PROBES)
        s = (r + rng.integers(1, self._terms.n, size=_NUM_PROBES)) % self._terms.n
        changes = np.abs([float(kernel.swap_change(a, ordered, u, v)) for u, v in zip(r, s, strict=True)])
        # Swaps of two dummies change nothing except for rounding.
        changes = changes[changes > 1e-9 * changes.max()]
        median_change = float(np.median(changes)) if len(changes) else 1.0
        initial, final = INITIAL_TEMPERATURE * median_change, FINAL_TEMPERATURE * median_change
        return np.array([initial, initial, (initial - final) / (max(1, trials) * initial * final)])


DEFAULT_MOVES = 2000
"""Default moves of tabu search per restart and place."""

_TABU_CHUNK = 4_000_000
"""Evaluated swaps (both directions) between two time checks, a few hundredths of a second."""

_REFRESH_INTERVAL = 50
"""Moves per place after which all changes are recomputed against rounding drift, at the cost of about n
moves.
"""


class TabuSearch(QapSearch):
    """Robust tabu search; a pass is one move."""

    default_passes = DEFAULT_MOVES

    def _run_passes(self, current: np.ndarray, best: np.ndarray, iterations: int, seed: int) -> Iterator[int]:
        from sparseflow.codesign.layout.qap.kernels.tabu import cpu

        a, b, big_m = self._working
        n, movers, rule = self._terms.n, self._terms.num_movers, TabuRule.for_size(self._terms.n)
        cost_change, until = np.zeros(2, a.dtype), init_tabu(n, movers)
        ordered = self._terms.order_distances(b, current)
        delta, swap_until = np.empty((n, n), a.dtype), np.empty((n, n), np.int64)
        completed, max_moves, next_refresh = 0, max(1, _TABU_CHUNK // n**2), 0
        while True:
            if completed >= next_refresh:
                cpu.initialize(a, ordered, current, until, delta, swap_until)
                next_refresh = completed + _REFRESH_INTERVAL * n
            moves = min(max_moves, iterations - completed)
            cpu.advance(
                a,
                ordered,
                current,
                best,
                cost_change,
                until,
                delta,
                swap_until,
                movers,
                completed + 1,
                moves,
                rule.low,
                rule.span,
                rule.patience,
                big_m,
                seed,
            )
            completed += moves
            yield completed
            if completed >= iterations:
                return
