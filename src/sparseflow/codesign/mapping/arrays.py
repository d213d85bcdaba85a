"""Mapping problems as plain arrays for compiled kernels: edges sorted by segment, memory in bytes.

Numba stores compiled kernels by the types of their arguments and the time stamp of their own file. The entry
points therefore take plain tuples, and only they are cached: a cache that refers to a class of this package
could not be read after the class moves. Reordering the fields of `ProblemArrays` requires a change of every
kernel file.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparseflow.codesign.mapping.problem import MappingProblem


class ProblemArrays(NamedTuple):
    """Arrays of a problem; writable, so that one compiled signature fits all problems.

    Attributes:
        latency: ms, float64 [K, S]; inf where a segment is not allowed.
        memory: Bytes that a segment always occupies, int64 [K, S].
        activation: Bytes that it needs in addition while it runs, int64 [K, S].
        limit: Bytes, int64 [S].
        fixed: ms, float64 [S, S]; inf between unconnected slots.
        per_byte: ms, float64 [S, S]; 0 between unconnected slots, to avoid NaN products.
        in_start: Start of the incoming edges of each segment, int64 [K + 1].
        in_end: Source segment of each incoming edge, int64 [E].
        in_bytes: Bytes of each incoming edge, float64 [E].
        out_start: Start of the outgoing edges of each segment, int64 [K + 1].
        out_end: Target segment of each outgoing edge, int64 [E].
        out_bytes: Bytes of each outgoing edge, float64 [E].
        max_activation: Largest `activation` on each slot, int64 [S].
        equal_slot: Closest slot with a lower index that is interchangeable, or -1, int64 [S].
    """

    latency: np.ndarray
    memory: np.ndarray
    activation: np.ndarray
    limit: np.ndarray
    fixed: np.ndarray
    per_byte: np.ndarray
    in_start: np.ndarray
    in_end: np.ndarray
    in_bytes: np.ndarray
    out_start: np.ndarray
    out_end: np.ndarray
    out_bytes: np.ndarray
    max_activation: np.ndarray
    equal_slot: np.ndarray


def build_arrays(problem: MappingProblem) -> ProblemArrays:
    """Convert a problem to arrays."""
    connected = problem.connected
    fixed = np.where(connected, problem.fixed_ms, np.inf)
    per_byte = np.where(connected, problem.ms_per_byte, 0.0)
    latency = np.where(problem.allowed, problem.latency_ms, np.inf)
    memory = np.where(problem.allowed, problem.memory_bytes, 0)
    activation = np.where(problem.allowed, problem.activation_bytes, 0)
    limit = problem.limit_bytes.copy()
    return ProblemArrays(
        latency,
        memory,
        activation,
        limit,
        fixed,
        per_byte,
        *_group_edges(problem.dst, problem.src, problem),
        *_group_edges(problem.src, problem.dst, problem),
        activation.max(axis=0),
        _find_equal_slots(np.stack([latency, memory, activation]), limit, fixed, per_byte),
    )


def _group_edges(
    key: np.ndarray, other: np.ndarray, problem: MappingProblem
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.argsort(key, kind="stable")
    start = np.searchsorted(key[order], np.arange(problem.num_segments + 1)).astype(np.int64)
    return start, other[order].copy(), problem.traffic_bytes[order].copy()


def _find_equal_slots(
    costs: np.ndarray, limit: np.ndarray, fixed: np.ndarray, per_byte: np.ndarray
) -> np.ndarray:
    """Find interchangeable slots by costs [3, K, S] and links; the relation is an equivalence."""
    slots = len(limit)
    equal_slot = np.full(slots, -1, dtype=np.int64)
    for b in range(slots):
        for a in range(b - 1, -1, -1):
            if limit[a] == limit[b] and np.array_equal(costs[..., a], costs[..., b]):
                swapped = np.arange(slots)
                swapped[[a, b]] = b, a
                index = np.ix_(swapped, swapped)
                if np.array_equal(fixed[index], fixed) and np.array_equal(per_byte[index], per_byte):
                    equal_slot[b] = a
                    break
    return equal_slot
