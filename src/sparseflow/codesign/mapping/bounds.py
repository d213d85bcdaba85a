r"""A lower bound on the objective of every mapping, with multipliers that make it hold on branches, too.

With u_s >= 0, sum u_s <= p (weight of the period) and v_s >= 0, w = weight of the sum:

    objective >= sum_k min_s [(w + u_s) latency[k, s] + v_s memory[k, s]] - sum_s v_s limit_s
                 + (p - sum u_s) z0 + (w + min_s u_s) c0

as the period is no less than any weighted mean of busy times, and memory no more than its limits. z0 =
max_k min_s latency[k, s] is a bound on the period. c0 is communication that cannot be avoided: where memory
needs m slots at least and edges tie the segments together into c pieces, m - c edges at least are cut. The
formula holds for any multipliers, so nothing depends on how exactly they were computed; the best are the
dual solution of the linear relaxation, in which segments can be divided (min p z + w sum; assignment, busy
and memory rows). Transfers are left out of it: divided segments need none.

What cannot be in a mapping better than a known one, as it alone would take longer, is left out first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from sparseflow.codesign.mapping.objective import Goal
from sparseflow.codesign.mapping.problem import BYTES_PER_MB, Problem
from sparseflow.core.extras import require

MOST_PAIRS = 100_000
"""(Segment, slot) pairs, for which the linear program takes a second or so; with more, all u are the same."""

ROUNDING = 1e-12
"""Bounds are lowered by what sums of floats may be off by: this share of all that was added and taken off,
for each of the things that were; where memory is dear a bound is a small difference of large sums."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Bound:
    """A lower bound and what it comes from.

    Attributes:
        value_ms: No mapping has a lower objective than this, or than the known one if that is lower.
        busy_weights: u_s, float64 [S].
        memory_weights: v_s, ms for each MB, float64 [S].
    """

    value_ms: float
    busy_weights: np.ndarray
    memory_weights: np.ndarray


def lower_bound(problem: Problem, goal: Goal, *, known_ms: float = inf) -> Bound:
    """The bound of this module.

    Args:
        problem: What is mapped.
        goal: What is made small.
        known_ms: Objective of a mapping that can run.

    Raises:
        MissingExtraError: SciPy is missing.
    """
    p, w = goal.period_weight, goal.serial_weight
    latency = np.where(problem.allowed, problem.latency_ms, inf)
    with np.errstate(invalid="ignore"):
        latency[(p + w) * latency > known_ms * (1.0 + 1e-9)] = inf
    usable = np.isfinite(latency)
    if not usable.any(axis=1).all():
        # Nothing is better than what is known; or nothing can run at all.
        zero = np.zeros(problem.slots)
        return Bound(value_ms=known_ms, busy_weights=zero, memory_weights=zero)
    z0 = float(latency.min(axis=1).max())
    u, v = _multipliers(problem, latency, z0, p, w)
    memory = problem.memory_bytes / BYTES_PER_MB
    limit = problem.limit_bytes / BYTES_PER_MB
    c0 = unavoidable_ms(problem)
    rounding = ROUNDING * (problem.segments + problem.slots + problem.edges)

    def value(u: np.ndarray, v: np.ndarray) -> float:
        # An infinite latency must stay so where its weight is 0.
        each = np.where(usable, (w + u) * np.where(usable, latency, 0.0) + v * memory, inf).min(axis=1)
        rest = max(p - float(u.sum()), 0.0) * z0 + (w + float(u.min())) * c0
        added, taken = float(each.sum()) + rest, float((v * limit).sum())
        return added - taken - rounding * (added + taken)

    none = np.zeros(problem.slots)
    even = np.full(problem.slots, p / problem.slots)
    choices = ((u, v), (even, none), (none, none))
    values = [value(*choice) for choice in choices]
    best = int(np.argmax(values))
    u, v = choices[best]
    return Bound(value_ms=min(max(values[best], 0.0), known_ms), busy_weights=u, memory_weights=v)


def _multipliers(
    problem: Problem, latency: np.ndarray, z0: float, p: float, w: float
) -> tuple[np.ndarray, np.ndarray]:
    """Dual solution of the linear relaxation, cleaned so that the formula holds; even weights without one."""
    segments, slots = latency.shape
    limit = problem.limit_bytes
    at_k, at_s = np.nonzero(np.isfinite(latency))
    memory = problem.memory_bytes[at_k, at_s]
    binding = np.bincount(at_s, memory, slots) > limit
    even, none = np.full(slots, p / slots), np.zeros(slots)
    if slots == 1 or len(at_k) > MOST_PAIRS or (p == 0.0 and not binding.any()):
        return even, none
    optimize, sparse = require("scipy.optimize", "codesign"), require("scipy.sparse", "codesign")
    pairs = np.arange(len(at_k))
    times = latency[at_k, at_s]
    # Rows: busy of each slot, then memory of each slot as a share of its limit; the last column is z.
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


def unavoidable_ms(problem: Problem) -> float:
    """Communication that no mapping avoids: c0 above."""
    if problem.edges == 0 or problem.slots == 1:
        return 0.0
    needed = problem.least_bytes.sum()
    room = np.cumsum(np.sort(problem.limit_bytes)[::-1])
    least_slots = int(np.searchsorted(room, needed)) + 1
    pieces, find = problem.segments, list(range(problem.segments))
    for a, b in zip(problem.src.tolist(), problem.dst.tolist(), strict=True):
        while find[a] != a:
            find[a] = a = find[find[a]]
        while find[b] != b:
            find[b] = b = find[find[b]]
        pieces, find[a] = pieces - (a != b), b
    cut = least_slots - pieces
    if cut <= 0 or least_slots > problem.slots:
        return 0.0
    apart = problem.connected & ~np.eye(problem.slots, dtype=bool)
    if not apart.any():
        return 0.0
    fixed, per_byte = problem.fixed_ms[apart], problem.ms_per_byte[apart]
    least = [float((fixed + size * per_byte).min()) for size in problem.traffic_bytes]
    return sum(sorted(least)[:cut])
