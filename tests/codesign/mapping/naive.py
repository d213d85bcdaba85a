"""Independent plain-Python definitions of the objective, and small random problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby, product
from typing import Any

import numpy as np

from benchmarks.codesign.random_problem import random_problem
from sparseflow.codesign.mapping import MappingGoal, MappingProblem, evaluate_mapping

GOALS = (MappingGoal(), MappingGoal(mode="serial"), MappingGoal(tie_weight=0.0), MappingGoal(tie_weight=0.4))


def busy(problem: MappingProblem, mapping: Sequence[int]) -> list[float]:
    """Busy time of each slot, ms."""
    result = [0.0] * problem.num_slots
    for k, s in enumerate(mapping):
        result[s] += float(problem.latency_ms[k, s])
    for u, v, size in zip(problem.src, problem.dst, problem.traffic_bytes, strict=True):
        a, b = mapping[u], mapping[v]
        if a != b:
            fixed, per_byte = float(problem.fixed_ms[a, b]), float(problem.ms_per_byte[a, b])
            cut = math.isinf(fixed) or math.isinf(per_byte)
            result[b] += math.inf if cut else fixed + float(size) * per_byte
    return result


def fits(problem: MappingProblem, mapping: Sequence[int]) -> bool:
    """Whether memory limits hold and every segment can run on its slot."""
    for s in range(problem.num_slots):
        current = [k for k, slot in enumerate(mapping) if slot == s]
        if current and not problem.limit_mb[s] > 0.0:
            return False
        peak = max((problem.activation_mb[k, s] for k in current), default=0.0)
        if math.fsum(problem.memory_mb[k, s] for k in current) + peak > problem.limit_mb[s]:
            return False
    return all(
        math.isfinite(problem.latency_ms[k, s])
        and math.isfinite(problem.memory_mb[k, s] + problem.activation_mb[k, s])
        for k, s in enumerate(mapping)
    )


def objective(problem: MappingProblem, goal: MappingGoal, mapping: Sequence[int]) -> float:
    """Objective of a mapping, ms; inf if it is infeasible."""
    if not fits(problem, mapping):
        return math.inf
    times = busy(problem, mapping)
    if math.isinf(sum(times)):
        return math.inf
    if goal.mode == "serial":
        return sum(times)
    return max(times) + goal.tie_weight * sum(times)


def best_contiguous(problem: MappingProblem, goal: MappingGoal) -> float:
    """Lowest objective of the contiguous mappings."""
    best = math.inf
    for mapping in product(range(problem.num_slots), repeat=problem.num_segments):
        runs = [slot for slot, _ in groupby(mapping)]
        if len(set(runs)) == len(runs):
            best = min(best, objective(problem, goal, mapping))
    return best


def changed(problem: MappingProblem, **values: Any) -> MappingProblem:
    """Replace some arrays of a problem."""
    names = [field.name for field in fields(MappingProblem)]
    return MappingProblem(**{name: values.get(name, getattr(problem, name)) for name in names})


def varied(seed: int, *, most_segments: int = 8, most_slots: int = 4) -> MappingProblem:
    """A small random problem: chain or not, with tight memory or not, with all links or some."""
    rng = np.random.default_rng([seed, 7])
    segments, slots = int(rng.integers(1, most_segments + 1)), int(rng.integers(1, most_slots + 1))
    problem = random_problem(
        segments,
        slots,
        seed=seed,
        skips=float(rng.choice([0.0, 0.5, 1.0])),
        slack=float(rng.choice([1.0, 1.1, 1.5, 5.0])),
        traffic=float(rng.choice([0.0, 0.1, 0.5, 2.0])),
        types=int(rng.integers(1, 4)),
        refused=float(rng.choice([0.0, 0.2])),
        activations=float(rng.choice([0.0, 0.5, 3.0])),
    )
    kind = rng.integers(5)
    if kind == 0:
        # Slots that are exactly alike.
        latency, memory, activation = problem.latency_ms.min(axis=1), problem.memory_mb, problem.activation_mb
        distances = 1.0 - np.eye(slots)
        return changed(
            problem,
            latency_ms=np.repeat(latency[:, None], slots, axis=1),
            memory_mb=memory,
            activation_mb=activation,
            limit_mb=np.full(slots, problem.limit_mb.max()),
            fixed_ms=0.05 * distances,
            ms_per_byte=1e-6 * distances,
        )
    if kind == 1:
        fixed = problem.fixed_ms.copy()
        fixed[(rng.random(fixed.shape) < 0.3) & ~np.eye(slots, dtype=bool)] = np.inf
        return changed(problem, fixed_ms=fixed)
    if kind == 2:
        # Memory that differs from slot to slot, and links that differ from one way to the other.
        return changed(
            problem,
            memory_mb=problem.memory_mb * rng.integers(1, 3, problem.memory_mb.shape) / 2.0,
            activation_mb=problem.activation_mb * rng.integers(1, 3, problem.memory_mb.shape) / 2.0,
            fixed_ms=problem.fixed_ms * rng.uniform(0.5, 2.0, problem.fixed_ms.shape),
        )
    return problem


def wild(seed: int) -> MappingProblem:
    """A tiny random problem, possibly infeasible.

    Times of any magnitude, or none; more slots than segments; segments that run in few places; limits that
    nothing meets, or none; edges twice; links that cost nothing, lead one way only or are not there.
    """
    rng = np.random.default_rng([seed, 99])
    segments, slots = ((1, 4), (4, 4), (2, 5))[seed % 3]
    segments, slots = int(rng.integers(1, segments + 1)), int(rng.integers(1, slots + 1))
    scale = 10.0 ** rng.integers(-6, 7)
    latency = rng.lognormal(0.0, rng.choice([0.1, 1.0, 4.0]), (segments, slots)) * scale
    if rng.random() < 0.4:
        latency = rng.integers(0, 3, latency.shape) * scale
    latency[rng.random(latency.shape) < rng.choice([0.0, 0.3])] = np.inf
    # Eighths: sums of them are exact.
    memory = rng.integers(0, 10, latency.shape if rng.random() < 0.3 else segments) / 8.0
    memory[rng.random(memory.shape) < rng.choice([0.0, 0.1])] = np.inf
    activation = rng.integers(0, 20, memory.shape) / 8.0 * rng.choice([0.0, 1.0], p=[0.3, 0.7])
    activation[rng.random(memory.shape) < rng.choice([0.0, 0.1])] *= 4.0
    needed = float(memory[np.isfinite(memory)].sum()) / (memory.size / segments) + activation.mean()
    limit = np.round(rng.uniform(0.2, 1.5, slots) * needed * 8.0) / 8.0
    limit[rng.random(slots) < rng.choice([0.0, 0.3, 1.0])] = rng.choice([0.0, np.inf])
    src = np.sort(rng.integers(0, segments - 1, segments)) if segments > 1 else np.array([], dtype=np.int64)
    dst = src + 1 + (rng.random(len(src)) * (segments - src - 1)).astype(np.int64)
    fixed, item = (rng.random((slots, slots)) * rng.choice([0.0, top]) * scale for top in (1.0, 1e-5))
    fixed[rng.random(fixed.shape) < rng.choice([0.0, 0.3, 1.0], p=[0.5, 0.4, 0.1])] = np.inf
    for costs in (fixed, item):
        np.fill_diagonal(costs, 0.0)
    return MappingProblem(
        latency_ms=latency,
        memory_mb=memory,
        activation_mb=activation,
        limit_mb=limit,
        src=src,
        dst=dst,
        traffic_bytes=rng.lognormal(11.0, 1.0, len(src)) * rng.choice([0.0, 1.0], p=[0.2, 0.8]),
        fixed_ms=fixed,
        ms_per_byte=item,
    )


def value(problem: MappingProblem, goal: MappingGoal, mapping: np.ndarray | None) -> float:
    """Objective by the package's definition; inf without a mapping."""
    return math.inf if mapping is None else goal.objective_ms(evaluate_mapping(problem, mapping))
