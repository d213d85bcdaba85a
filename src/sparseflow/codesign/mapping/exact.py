"""Branch and bound over all mappings: the optimum, with proof, for a dozen segments or so.

Segments are placed one at a time, the one first for which a wrong slot costs most, on the slot of the least
bound. Two bounds cut: the one of `bounds`, with multipliers from the linear program at the root, where costs
of segments not yet placed grow by transfers from and to those placed; and that each of them must run
somewhere after what is there already. Slots that are alike are tried once as long as they are empty.
"""

from __future__ import annotations

import numpy as np

from sparseflow.codesign.mapping.bounds import lower_bound
from sparseflow.codesign.mapping.objective import evaluate
from sparseflow.codesign.mapping.problem import BYTES_PER_MB
from sparseflow.codesign.mapping.strategy import Answer, Request
from sparseflow.codesign.mapping.tables import tables
from sparseflow.core.extras import require

WORK = 3e7
"""Nodes times K S^2 between two looks at the clock: some ten milliseconds."""

PRECISION = 1e-10
"""A mapping that is better by a smaller share may be missed."""


def exact(request: Request, *, most_nodes: float = float("inf")) -> Answer:
    """The best of all mappings, or the best by the end of the time.

    Args:
        request: What is asked.
        most_nodes: Nodes after which to stop as if time were up.

    Raises:
        MissingExtraError: Numba or SciPy is missing.
    """
    require("numba", "codesign")
    from sparseflow.codesign.mapping.kernels import exact as kernel

    problem, goal, start = request.problem, request.goal, request.start
    known = float("inf") if start is None else goal.objective_ms(evaluate(problem, start))
    root = lower_bound(problem, goal, known_ms=known)
    floor = max(root.value_ms, request.lower_bound_ms)
    arrays = tables(problem)
    segments, slots = problem.segments, problem.slots
    weights = np.concatenate(
        [
            root.busy_weights,
            root.memory_weights / BYTES_PER_MB,
            [goal.period_weight, goal.serial_weight],
        ]
    )
    depths = segments + 1
    search = kernel.Search(
        busy=np.zeros((depths, slots)),
        left=np.repeat(arrays.limit[None], depths, axis=0),
        own=np.repeat(arrays.latency[None], depths, axis=0),
        cost=np.zeros((depths, segments, slots)),
        slot=np.full(segments, -1, dtype=np.int64),
        chosen=np.zeros(depths, dtype=np.int64),
        kids=np.zeros((depths, slots), dtype=np.int64),
        bounds=np.zeros((depths, slots)),
        number=np.full((depths, 2), -1, dtype=np.int64),
        best=np.array([known]),
        best_slot=np.full(segments, -1, dtype=np.int64) if start is None else start.copy(),
        depth=np.zeros(1, dtype=np.int64),
        weights=weights,
    )
    allowed = np.isfinite(arrays.latency)
    latency = np.where(allowed, arrays.latency, 0.0)
    charge = (
        root.busy_weights + goal.serial_weight
    ) * latency + root.memory_weights * arrays.memory / BYTES_PER_MB
    search.cost[0] = np.where(allowed, charge, np.inf)
    nodes, chunk = 0, max(int(WORK / (segments * slots**2)), 1)
    while search.depth[0] >= 0 and request.seconds_left > 0.0 and nodes < most_nodes:
        nodes += kernel.go_on(arrays, search, int(min(chunk, most_nodes - nodes)), PRECISION)
        request.tell("exact", float(search.best[0]), floor)
    found = search.best_slot if search.best_slot[0] >= 0 else None
    finished = bool(search.depth[0] < 0)
    if found is None:
        return Answer(mapping=None, lower_bound_ms=floor, finished=finished, none_exists=finished)
    value = goal.objective_ms(evaluate(problem, found))
    return Answer(mapping=found, lower_bound_ms=value if finished else min(floor, value), finished=finished)
