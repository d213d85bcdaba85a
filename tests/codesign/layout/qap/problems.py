"""Random assignment problems, and problems with a known optimum."""

from __future__ import annotations

from itertools import permutations

import numpy as np

KINDS = ("symmetric", "asymmetric flow", "asymmetric distance", "asymmetric", "stack", "dummies")


def random_problem(
    kind: str, n: int, seed: int = 0, *, floats: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Random flow and distance with arbitrary diagonals, [n, n], or [3, n, n] for a stack."""
    rng = np.random.default_rng([seed, n])
    count = 3 if kind == "stack" else 1
    flow, distance = rng.integers(-4, 10, (2, count, n, n))
    if kind in ("symmetric", "asymmetric distance", "dummies"):
        flow = flow + flow.transpose(0, 2, 1)
    if kind in ("symmetric", "asymmetric flow", "dummies"):
        distance = distance + distance.transpose(0, 2, 1)
    if kind == "stack":
        # One of each.
        flow[0] += flow[0].T
        distance[0] += distance[0].T
        distance[1] += distance[1].T
    if kind == "dummies":
        idle = rng.permutation(n)[: n // 2]
        flow[:, idle] = 0
        flow[:, :, idle] = 0
    if floats:
        flow, distance = flow * 0.37, distance / 7.0
    return (flow, distance) if kind == "stack" else (flow[0], distance[0])


def plain_cost(flow: np.ndarray, distance: np.ndarray, permutation: np.ndarray) -> float:
    """Compute the cost by plain summation."""
    f, d = (matrix if matrix.ndim == 3 else matrix[None] for matrix in (flow, distance))
    n = len(permutation)
    return sum(
        f[k, i, j].item() * d[k, permutation[i], permutation[j]].item()
        for k in range(len(f))
        for i in range(n)
        for j in range(n)
    )


def best_cost(flow: np.ndarray, distance: np.ndarray) -> float:
    """Find the lowest cost by trying all permutations."""
    f, d = (matrix if matrix.ndim == 3 else matrix[None] for matrix in (flow, distance))
    return min(
        (f * d[:, p[:, None], p[None, :]]).sum().item()
        for p in map(np.array, permutations(range(f.shape[1])))
    )


def chain(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """A shuffled chain of items and a line of places; the optimum is 2 (n - 1)."""
    order = np.random.default_rng(seed).permutation(n)
    flow = np.zeros((n, n), np.int64)
    flow[order[:-1], order[1:]] = flow[order[1:], order[:-1]] = 1
    return flow, np.abs(np.subtract.outer(np.arange(n), np.arange(n))), 2 * (n - 1)


def cliques(count: int, size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Shuffled cliques and rooms of the same size: a pair costs 1 in one room and 10 otherwise."""
    rng = np.random.default_rng(seed)
    member = rng.permutation(np.repeat(np.arange(count), size))
    capacity = rng.permutation(np.repeat(np.arange(count), size))
    flow = (member[:, None] == member[None, :]).astype(np.int64)
    distance = np.where(capacity[:, None] == capacity[None, :], 1, 10)
    np.fill_diagonal(flow, 0)
    np.fill_diagonal(distance, 0)
    return flow, distance, count * size * (size - 1)
