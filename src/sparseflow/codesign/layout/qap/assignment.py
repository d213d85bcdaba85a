"""`assign`: solves quadratic assignments by tabu search, annealing or both."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.codesign.layout.qap.kernels.tabu.rule import ALWAYS
from sparseflow.codesign.layout.qap.problem import (
    check_permutation,
    compute_cost,
    gilmore_lawler_bound,
    stack_matrices,
)
from sparseflow.codesign.layout.qap.search import AnnealingSearch, QapSearch, TabuSearch
from sparseflow.codesign.layout.qap.terms import QapTerms
from sparseflow.core.checks import check_at_least, check_between, check_one_of, check_positive

_METHODS: dict[str, tuple[type[QapSearch], ...]] = {
    "auto": (TabuSearch, AnnealingSearch), "tabu": (TabuSearch,), "annealing": (AnnealingSearch,),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class QapAssignment:
    """The best permutation of a search.

    Attributes:
        permutation: Place of each item, int64, [n].
        cost: Cost of the permutation; an int for integer matrices.
        lower_bound: Gilmore-Lawler bound of the cost.
        gap: (cost - lower_bound) / |cost|; 0 if the permutation is proven optimal.
        evaluations: Number of evaluated swaps in all restarts.
        costs: Best cost of each started restart.
        permutations: Best permutations, int64, [restarts started, n].
        elapsed_s: Time of the restarts, s, without compilation.
        finished: Whether all restarts completed their iterations.
    """

    permutation: np.ndarray
    cost: int | float
    lower_bound: int | float
    gap: float
    evaluations: int
    costs: tuple[int | float, ...]
    permutations: np.ndarray
    elapsed_s: float
    finished: bool


def assign(
    flow: Any,
    distance: Any,
    *,
    method: str = "auto",
    restarts: int = 4,
    iterations: int | None = None,
    budget_s: float | None = None,
    seed: int = 0,
    start: Any = None,
) -> QapAssignment:
    """Search for the permutation p that minimizes the sum of flow[i, j] · distance[p[i], p[j]].

    Results are deterministic unless the time budget is reached.

    Args:
        flow: [n, n], or a stack [K, n, n] whose costs are summed; pad it if places stay empty.
        distance: Of the same shape.
        method: `"tabu"`, `"annealing"`, or `"auto"`, which alternates between both.
        restarts: Number of searches, each from a random permutation.
        iterations: Passes over all swaps per restart: one tabu move, or one annealing trial of each swap,
            which takes about ten times as long. By default 2000·n for tabu search and 200·n for annealing.
        budget_s: Time budget of all restarts, s, in equal shares; the best permutation so far is returned.
        seed: Random seed of starts and searches.
        start: Initial permutation of the first restart (for `"auto"`: of the first two).

    Raises:
        InputError: See `stack_matrices`; or an argument is out of range.
        MissingExtraError: Numba or SciPy is missing.
    """
    f, d = stack_matrices(flow, distance)
    n = f.shape[1]
    check_budget(restarts, iterations, budget_s, seed)
    check_one_of(_METHODS, method=method)
    initial = None if start is None else check_permutation(start, n)
    terms = QapTerms.from_matrices(f, d)
    if not terms.num_swaps:
        stay = np.arange(n) if initial is None else initial
        return make_assignment(
            f, d, np.tile(stay, (restarts, 1)), evaluations=0, elapsed_s=0.0, finished=True
        )
    searches = [kind(terms) for kind in _METHODS[method][:restarts]]
    permutations, passes, finished = [], 0, True
    start_s = time.perf_counter()
    for restart in range(restarts):
        search = searches[restart % len(searches)]
        num_iterations = search.default_iterations() if iterations is None else iterations
        permutation, own_seed = draw_start(seed, restart, n)
        if initial is not None and restart < len(searches):
            permutation = initial
        deadline = None if budget_s is None else start_s + budget_s * (restart + 1) / restarts
        best, completed = search.run(permutation, iterations=num_iterations, seed=own_seed, deadline=deadline)
        permutations.append(best)
        passes += completed
        finished &= completed == num_iterations
        if budget_s is not None and time.perf_counter() >= start_s + budget_s:
            finished &= restart + 1 == restarts
            break
    elapsed = time.perf_counter() - start_s
    evaluations = passes * terms.num_swaps
    return make_assignment(
        f, d, np.stack(permutations), evaluations=evaluations, elapsed_s=elapsed, finished=finished
    )


def make_assignment(
    flow: np.ndarray,
    distance: np.ndarray,
    permutations: np.ndarray,
    *,
    evaluations: int,
    elapsed_s: float,
    finished: bool,
) -> QapAssignment:
    """Build the result of several restarts: exact costs and the lower bound.

    Args:
        flow: [K, n, n].
        distance: [K, n, n].
        permutations: int64, [restarts, n].
        evaluations: Number of evaluated swaps.
        elapsed_s: Time of the search, s.
        finished: Whether all restarts completed their iterations.
    """
    costs = tuple(compute_cost(flow, distance, p) for p in permutations)
    best = min(range(len(costs)), key=costs.__getitem__)
    # With floats, a tight bound may exceed the cost by rounding.
    bound = min(gilmore_lawler_bound(flow, distance), costs[best])
    slack = float(costs[best] - bound)
    return QapAssignment(
        permutation=permutations[best],
        cost=costs[best],
        lower_bound=bound,
        gap=0.0 if slack == 0.0 else slack / abs(costs[best]) if costs[best] else math.inf,
        evaluations=evaluations,
        costs=costs,
        permutations=permutations,
        elapsed_s=elapsed_s,
        finished=finished,
    )


def draw_start(seed: int, restart: int, n: int) -> tuple[np.ndarray, int]:
    """Initial permutation of a restart, int64 [n], and the 32-bit seed of its search."""
    rng = np.random.default_rng([seed, restart])
    return rng.permutation(n), int(rng.integers(2**32))


def check_budget(restarts: int, iterations: int | None, budget_s: float | None, seed: int) -> None:
    """Raise InputError if an argument is out of range."""
    check_at_least(1, restarts=restarts)
    check_at_least(0, seed=seed)
    if iterations is not None:
        check_at_least(1, iterations=iterations)
        check_between(1, ALWAYS - 1, iterations=iterations)
    if budget_s is not None:
        check_positive(budget_s=budget_s)
