"""Large neighbourhoods: the segments of a few slots are placed anew, as well as can be, the others staying.

Annealing balances slots roughly; what is left to gain takes several moves at once, all of them right. So
branch and bound takes some segments of four slots (the fullest one among them where the period counts,
as nothing else can shorten it), and finds the best for them, or gives up after some nodes.

    Shaw: Using constraint programming and local search methods to solve vehicle routing problems. CP 1998.
"""

from __future__ import annotations

import numpy as np

from sparseflow.codesign.mapping.exact import Branching
from sparseflow.codesign.mapping.objective import evaluate
from sparseflow.codesign.mapping.strategy import Request
from sparseflow.codesign.mapping.tables import tables

SLOTS, SEGMENTS = 4, 16
"""Of a neighbourhood."""

NODES = 2_000
"""In each: some milliseconds."""


def refine(request: Request, start: np.ndarray, *, tries: int, seed: int) -> np.ndarray:
    """A mapping that is no worse.

    Args:
        request: What is asked.
        start: A mapping that can run, int64 [K].
        tries: Neighbourhoods to look at, time permitting.
        seed: Beside that of the request.

    Raises:
        MissingExtraError: Numba is missing.
    """
    problem, goal = request.problem, request.goal
    if problem.slots == 1:
        return start
    arrays = tables(problem)
    branching, best, best_ms = Branching(arrays, goal), start, goal.objective_ms(evaluate(problem, start))
    rng = np.random.default_rng([request.seed, 2, seed])
    # The faster a slot, the more its time weighs, so that segments cost about the same everywhere.
    latency = np.where(np.isfinite(arrays.latency), arrays.latency, np.nan)
    speed = 1.0 / np.maximum(np.nanmean(latency, axis=0), np.finfo(np.float64).tiny)
    none = np.zeros(problem.slots)
    for _ in range(tries):
        if request.seconds_left <= 0.0:
            break
        order = rng.permutation(problem.slots)
        if goal.period_weight > 0.0:
            fullest = int(np.argmax(evaluate(problem, best).busy_ms))
            order = np.concatenate([[fullest], order[order != fullest]])
        allowed = np.zeros(problem.slots, dtype=bool)
        allowed[order[:SLOTS]] = True
        there = rng.permutation(np.flatnonzero(allowed[best]))[:SEGMENTS]
        if len(there) == 0:
            continue
        free = np.zeros(problem.segments, dtype=bool)
        free[there] = True
        weights = np.where(allowed, speed, 0.0)
        branching.begin(best_ms, best, free, goal.period_weight * weights / weights.sum(), none, allowed)
        branching.go_on(NODES)
        if branching.best_ms < best_ms and branching.best is not None:
            best = branching.best
            best_ms = goal.objective_ms(evaluate(problem, best))
    return best
