"""A problem as compiled kernels read it: plain arrays, edges sorted by segment, memory in bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparseflow.codesign.mapping.problem import Problem


class Tables(NamedTuple):
    """Arrays of a problem; writable, so that one compiled kernel fits all.

    Attributes:
        latency: float64 [K, S]; inf where a segment is not allowed on a slot, for whatever reason.
        memory: Bytes, int64 [K, S].
        limit: Bytes, int64 [S].
        fixed: ms, float64 [S, S]; inf where slots are not connected.
        per_byte: ms, float64 [S, S]; 0 where slots are not connected, so that no product is NaN.
        in_start: Where the edges into each segment begin, int64 [K + 1].
        in_end: The segment at the other end of each, int64 [E].
        in_bytes: float64 [E].
        out_start: Where the edges out of each segment begin, int64 [K + 1].
        out_end: int64 [E].
        out_bytes: float64 [E].
        twin: The slot just before in number that is exactly alike, or -1, int64 [S].
    """

    latency: np.ndarray
    memory: np.ndarray
    limit: np.ndarray
    fixed: np.ndarray
    per_byte: np.ndarray
    in_start: np.ndarray
    in_end: np.ndarray
    in_bytes: np.ndarray
    out_start: np.ndarray
    out_end: np.ndarray
    out_bytes: np.ndarray
    twin: np.ndarray


def tables(problem: Problem) -> Tables:
    """The tables of a problem."""
    connected = problem.connected
    fixed = np.where(connected, problem.fixed_ms, np.inf)
    per_byte = np.where(connected, problem.ms_per_byte, 0.0)
    latency = np.where(problem.allowed, problem.latency_ms, np.inf)
    memory = np.where(problem.allowed, problem.memory_bytes, 0)
    limit = problem.limit_bytes.copy()
    return Tables(
        latency,
        memory,
        limit,
        fixed,
        per_byte,
        *_by(problem.dst, problem.src, problem),
        *_by(problem.src, problem.dst, problem),
        _twins(latency, memory, limit, fixed, per_byte),
    )


def _by(key: np.ndarray, other: np.ndarray, problem: Problem) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.argsort(key, kind="stable")
    start = np.searchsorted(key[order], np.arange(problem.segments + 1)).astype(np.int64)
    return start, other[order].copy(), problem.traffic_bytes[order].copy()


def _twins(
    latency: np.ndarray, memory: np.ndarray, limit: np.ndarray, fixed: np.ndarray, per_byte: np.ndarray
) -> np.ndarray:
    """Slots that can change places without anything else changing: alike is an equivalence."""
    slots = len(limit)
    twin = np.full(slots, -1, dtype=np.int64)
    for b in range(slots):
        for a in range(b - 1, -1, -1):
            same = limit[a] == limit[b] and np.array_equal(latency[:, a], latency[:, b])
            if same and np.array_equal(memory[:, a], memory[:, b]):
                swapped = np.arange(slots)
                swapped[[a, b]] = b, a
                at = np.ix_(swapped, swapped)
                if np.array_equal(fixed[at], fixed) and np.array_equal(per_byte[at], per_byte):
                    twin[b] = a
                    break
    return twin
