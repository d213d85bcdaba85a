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
"""In each: a millisecond or two."""


def refine(request: Request, start: np.ndarray, *, tries: int, seed: int, nodes: int = NODES) -> np.ndarray:
    """A mapping that is no worse.

    Args:
        request: What is asked.
        start: A mapping that can run, int64 [K].
        tries: Neighbourhoods to look at, time permitting.
        seed: Beside that of the request.
        nodes: To expand in each, at most.

    Raises:
        MissingExtraError: Numba is missing.
    """
    problem, goal = request.problem, request.goal
    if problem.slots == 1:
        return start
    arrays = tables(problem)
    branching, best = Branching(arrays, goal), start
    now = evaluate(problem, best)
    rng = np.random.default_rng([request.seed, 2, seed])
    speed = _speeds(arrays.latency)
    none = np.zeros(problem.slots)
    # Neighbourhoods of the mapping as it is: to look at one again would find nothing again.
    seen: set[bytes] = set()
    for _ in range(tries):
        if request.seconds_left <= 0.0:
            break
        order = rng.permutation(problem.slots)
        if goal.period_weight > 0.0:
            fullest = int(np.argmax(now.busy_ms))
            order = np.concatenate([[fullest], order[order != fullest]])
        allowed = np.zeros(problem.slots, dtype=bool)
        allowed[order[:SLOTS]] = True
        there = rng.permutation(np.flatnonzero(allowed[best]))[:SEGMENTS]
        free = np.zeros(problem.segments, dtype=bool)
        free[there] = True
        name = allowed.tobytes() + free.tobytes()
        if len(there) == 0 or name in seen:
            continue
        seen.add(name)
        weights, best_ms = np.where(allowed, speed, 0.0), goal.objective_ms(now)
        branching.begin(best_ms, best, free, goal.period_weight * weights / weights.sum(), none, allowed)
        branching.go_on(nodes)
        if branching.best_ms < best_ms and branching.best is not None:
            best, seen = branching.best, set()
            now = evaluate(problem, best)
    return best


def _speeds(latency: np.ndarray) -> np.ndarray:
    """How fast each slot is, float64 [S], from times [K, S]; inf where a segment cannot run.

    The faster a slot, the more its time weighs, so that segments cost about the same everywhere.
    """
    usable = np.isfinite(latency)
    mean = np.where(usable, latency, 0.0).sum(axis=0) / np.maximum(usable.sum(axis=0), 1)
    # A slot that takes no time at all is taken as fast, not as all that counts.
    return 1.0 / np.maximum(mean, 1e-3 * mean.max() or 1.0)
