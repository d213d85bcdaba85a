"""`assign`: the best place for each of n, by tabu search, by annealing or by both."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.codesign.layout.qap.kernels.tabu.rule import ALWAYS
from sparseflow.codesign.layout.qap.problem import checked_permutation, cost, lower_bound, stacked
from sparseflow.codesign.layout.qap.search import Annealing, Tabu
from sparseflow.codesign.layout.qap.terms import Terms
from sparseflow.errors import InputError

METHODS = ("auto", "tabu", "annealing")


@dataclass(frozen=True, kw_only=True, eq=False)
class Assignment:
    """The best permutation that was found, and how.

    Attributes:
        permutation: Place of each, int64, [n].
        cost: What it costs; an int for integer matrices.
        lower_bound: No permutation costs less (Gilmore–Lawler).
        gap: Share of the cost by which a better permutation could at most be cheaper,
            (cost - lower_bound) / |cost|; 0 where the permutation is proven to be the best.
        evaluations: Swaps whose change was known or computed, in all restarts.
        costs: The best of each restart that was begun.
        permutations: Likewise, int64, [restarts begun, n].
        seconds: Wall clock of the restarts, without compiling.
        finished: Whether every restart made all of its iterations; False where time ran out.
    """

    permutation: np.ndarray
    cost: int | float
    lower_bound: int | float
    gap: float
    evaluations: int
    costs: tuple[int | float, ...]
    permutations: np.ndarray
    seconds: float
    finished: bool


def assign(
    flow: Any,
    distance: Any,
    *,
    method: str = "auto",
    restarts: int = 4,
    iterations: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    start: Any = None,
) -> Assignment:
    """Search for the permutation p with the least sum of flow[i, j] · distance[p[i], p[j]].

    The same arguments give the same answer, unless time runs out.

    Args:
        flow: [n, n], or a stack [K, n, n] whose costs are summed; pad it where places stay empty.
        distance: Of the same shape.
        method: `"tabu"`, `"annealing"`, or `"auto"`, whose restarts are the one and the other in turn.
        restarts: Number of searches, each from a random permutation.
        iterations: Passes over all swaps in a restart. One is one move of tabu search; annealing tries
            each swap once, which takes about ten times as long. By default 2000·n for tabu search and 200·n
            for annealing.
        seconds: Time for all restarts together; each has an equal share of it. The best so far is the answer
            when it is over.
        seed: Of the first permutations and of what the searches draw.
        start: Permutation that the first restart (of `"auto"`: the first two) begins with.

    Raises:
        InputError: The matrices cannot be used (see `qap.stacked`), or an argument is out of range.
        MissingExtraError: Numba or scipy is not installed.
    """
    f, d = stacked(flow, distance)
    n = f.shape[1]
    check_budget(restarts, iterations, seconds, seed)
    if method not in METHODS:
        raise InputError(f"`method` (={method!r}) must be one of {', '.join(map(repr, METHODS))}")
    first = None if start is None else checked_permutation(start, n)
    terms = Terms.of(f, d)
    if not terms.swaps:
        stay = np.arange(n) if first is None else first
        return judged(f, d, np.tile(stay, (restarts, 1)), evaluations=0, seconds=0.0, finished=True)
    kinds = {"auto": (Tabu, Annealing), "tabu": (Tabu,), "annealing": (Annealing,)}[method]
    searches = [kind(terms) for kind in kinds[:restarts]]
    found, passes, finished = [], 0, True
    begin = time.perf_counter()
    for restart in range(restarts):
        search = searches[restart % len(searches)]
        wanted = search.default_iterations() if iterations is None else iterations
        permutation, own_seed = beginning(seed, restart, n)
        if first is not None and restart < len(searches):
            permutation = first
        deadline = None if seconds is None else begin + seconds * (restart + 1) / restarts
        best, done = search.run(permutation, iterations=wanted, seed=own_seed, deadline=deadline)
        found.append(best)
        passes += done
        finished &= done == wanted
        if seconds is not None and time.perf_counter() >= begin + seconds:
            finished &= restart + 1 == restarts
            break
    elapsed = time.perf_counter() - begin
    evaluations = passes * terms.swaps
    return judged(f, d, np.stack(found), evaluations=evaluations, seconds=elapsed, finished=finished)


def judged(
    flow: np.ndarray,
    distance: np.ndarray,
    permutations: np.ndarray,
    *,
    evaluations: int,
    seconds: float,
    finished: bool,
) -> Assignment:
    """What restarts found: costs computed from the permutations, and how far below them the best can lie.

    Args:
        flow: [K, n, n].
        distance: [K, n, n].
        permutations: int64, [restarts, n].
        evaluations: Swaps that were judged.
        seconds: Wall clock.
        finished: Whether every restart ran to its end.
    """
    costs = tuple(cost(flow, distance, p) for p in permutations)
    best = min(range(len(costs)), key=costs.__getitem__)
    # In floating point a bound that is reached may come out a rounding above the cost.
    bound = min(lower_bound(flow, distance), costs[best])
    slack = float(costs[best] - bound)
    return Assignment(
        permutation=permutations[best],
        cost=costs[best],
        lower_bound=bound,
        gap=0.0 if slack == 0.0 else slack / abs(costs[best]) if costs[best] else math.inf,
        evaluations=evaluations,
        costs=costs,
        permutations=permutations,
        seconds=seconds,
        finished=finished,
    )


def beginning(seed: int, restart: int, n: int) -> tuple[np.ndarray, int]:
    """The permutation that a restart begins with, int64 [n], and the 32 bits that its search draws from."""
    rng = np.random.default_rng([seed, restart])
    return rng.permutation(n), int(rng.integers(2**32))


def check_budget(restarts: int, iterations: int | None, seconds: float | None, seed: int) -> None:
    """Raise InputError where one of them is out of range."""
    if restarts < 1:
        raise InputError(f"`restarts` (={restarts}) must be at least 1")
    if iterations is not None and not 1 <= iterations < ALWAYS:
        raise InputError(
            f"`iterations` (={iterations}) must be from 1 to {ALWAYS - 1}, or None for the default"
        )
    if seconds is not None and not 0.0 < seconds < math.inf:
        raise InputError(f"`seconds` (={seconds}) must be above 0 and finite, or None for no limit")
    if seed < 0:
        raise InputError(f"`seed` (={seed}) must not be negative")
