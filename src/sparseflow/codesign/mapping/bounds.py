"""Lower bound of the mapping objective by Lagrangian relaxation; its multipliers also bound partial
mappings.

For u_s >= 0 with sum u_s <= p (weight of the period), v_s >= 0, and w = weight of the sum:

    objective >= sum_k min_s [(w + u_s) latency[k, s] + v_s memory[k, s]] - sum_s v_s limit_s
                 + (p - sum u_s) z0 + (w + min_s u_s) c0

The period is at least any weighted mean of busy times, and the memory of the segments is at most the limits,
because activations are at least 0. z0 = max_k min_s
latency[k, s] bounds the period. c0 bounds communication: if memory requires at least m slots and edges
connect the segments into c components, at least m - c edges are cut. The formula holds for any multipliers,
so their accuracy does not matter; the best ones are the dual solution of the linear relaxation with divisible
segments (min p z + w sum; assignment, busy and memory rows). The relaxation omits transfers, because divided
segments need none.

Pairs that alone exceed the objective of a known mapping are excluded first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from sparseflow.codesign.mapping.objective import MappingGoal
from sparseflow.codesign.mapping.problem import BYTES_PER_MB, MappingProblem
from sparseflow.core.extras import require

MAX_PAIRS = 100_000
"""Maximum number of (segment, slot) pairs for the linear program (about 1 s); beyond it, all u are equal."""

ROUNDING = 1e-12
"""Relative rounding error per summand by which bounds are lowered; with expensive memory a bound is a
small difference of large sums.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LowerBound:
    """A lower bound and its multipliers.

    Attributes:
        value_ms: Lower bound of the objective, ms; at most the objective of the known mapping.
        busy_weights: u_s, float64 [S].
        memory_weights: v_s, ms per MB, float64 [S].
    """

    value_ms: float
    busy_weights: np.ndarray
    memory_weights: np.ndarray


def compute_lower_bound(
    problem: MappingProblem, goal: MappingGoal, *, incumbent_ms: float = inf
) -> LowerBound:
    """Compute the bound of this module.

    Args:
        problem: The problem.
        goal: The objective.
        incumbent_ms: Objective of a feasible mapping, ms.

    Raises:
        MissingExtraError: SciPy is missing.
    """
    p, w = goal.period_weight, goal.serial_weight
    latency = np.where(problem.allowed, problem.latency_ms, inf)
    with np.errstate(invalid="ignore"):
        latency[(p + w) * latency > incumbent_ms * (1.0 + 1e-9)] = inf
    usable = np.isfinite(latency)
    if not usable.any(axis=1).all():
        # No mapping is better than the known one, or none is feasible.
        zero = np.zeros(problem.num_slots)
        return LowerBound(value_ms=incumbent_ms, busy_weights=zero, memory_weights=zero)
    z0 = float(latency.min(axis=1).max())
    u, v = _multipliers(problem, latency, z0, p, w)
    memory = problem.memory_bytes / BYTES_PER_MB
    limit = problem.limit_bytes / BYTES_PER_MB
    c0 = min_communication_ms(problem)
    rounding = ROUNDING * (problem.num_segments + problem.num_slots + problem.num_edges)

    def evaluate_bound(u: np.ndarray, v: np.ndarray) -> float:
        # Infinite latencies must stay infinite if their weight is 0.
        segment_costs = np.where(usable, (w + u) * np.where(usable, latency, 0.0) + v * memory, inf).min(
            axis=1
        )
        constant = max(p - float(u.sum()), 0.0) * z0 + (w + float(u.min())) * c0
        added, subtracted = float(segment_costs.sum()) + constant, float((v * limit).sum())
        return added - subtracted - rounding * (added + subtracted)

    none = np.zeros(problem.num_slots)
    even = np.full(problem.num_slots, p / problem.num_slots)
    choices = ((u, v), (even, none), (none, none))
    values = [evaluate_bound(*choice) for choice in choices]
    best = int(np.argmax(values))
    u, v = choices[best]
    return LowerBound(value_ms=min(max(values[best], 0.0), incumbent_ms), busy_weights=u, memory_weights=v)


def _multipliers(
    problem: MappingProblem, latency: np.ndarray, z0: float, p: float, w: float
) -> tuple[np.ndarray, np.ndarray]:
    """Dual solution of the linear relaxation, made feasible; uniform weights if it cannot be computed."""
    segments, slots = latency.shape
    limit = problem.limit_bytes
    at_k, at_s = np.nonzero(np.isfinite(latency))
    memory = problem.memory_bytes[at_k, at_s]
    binding = np.bincount(at_s, memory, slots) > limit
    even, none = np.full(slots, p / slots), np.zeros(slots)
    if slots == 1 or len(at_k) > MAX_PAIRS or (p == 0.0 and not binding.any()):
        return even, none
    optimize, sparse = require("scipy.optimize", "codesign"), require("scipy.sparse", "codesign")
    pairs = np.arange(len(at_k))
    times = latency[at_k, at_s]
    # Rows: busy time of each slot, then memory of each slot relative to its limit; the last column is z.
    share = memory / np.maximum(limit[at_s], 1)
    tight = binding[at_s]
    last = len(at_k)
    rows = np.concatenate([at_s, np.arange(slots), slots + at_s[tight]])
    columns = np.concatenate([pairs, np.full(slots, last), pairs[tight]])
    values = np.concatenate([times, np.full(slots, -1.0), share[tight]])
    upper = sparse.csr_matrix((values, (rows, columns)), shape=(2 * slots, last + 1))
    equal = sparse.csr_matrix((np.ones(last), (at_k, pairs)), shape=(segments, last + 1))
    solved = optimize.linprog(
        np.append(w * times, p),
        A_ub=upper,
        b_ub=np.concatenate([none, np.ones(slots)]),
        A_eq=equal,
        b_eq=np.ones(segments),
        bounds=np.column_stack([np.append(np.zeros(last), z0), np.full(last + 1, inf)]),
        method="highs",
    )
    if solved.status != 0:
        return even, none
    dual = np.maximum(-solved.ineqlin.marginals, 0.0)
    u = dual[:slots]
    if u.sum() > p:
        u = u * (p / u.sum())
    return u, dual[slots:] * BYTES_PER_MB / np.maximum(limit, 1)


def min_communication_ms(problem: MappingProblem) -> float:
    """Lower bound c0 of the communication time."""
    if problem.num_edges == 0 or problem.num_slots == 1:
        return 0.0
    needed = problem.min_total_bytes
    capacity = np.cumsum(np.sort(problem.limit_bytes)[::-1])
    min_slots = int(np.searchsorted(capacity, needed)) + 1
    pieces, parent = problem.num_segments, list(range(problem.num_segments))
    for a, b in zip(problem.src.tolist(), problem.dst.tolist(), strict=True):
        while parent[a] != a:
            parent[a] = a = parent[parent[a]]
        while parent[b] != b:
            parent[b] = b = parent[parent[b]]
        pieces, parent[a] = pieces - (a != b), b
    cut = min_slots - pieces
    if cut <= 0 or min_slots > problem.num_slots:
        return 0.0
    pairs = problem.connected & ~np.eye(problem.num_slots, dtype=bool)
    if not pairs.any():
        return 0.0
    fixed, per_byte = problem.fixed_ms[pairs], problem.ms_per_byte[pairs]
    min_ms = [float((fixed + size * per_byte).min()) for size in problem.traffic_bytes]
    return sum(sorted(min_ms)[:cut])
