"""Random mapping problems for tests and benchmarks: segments of a network on chips of a few types."""

from __future__ import annotations

import numpy as np

from sparseflow.codesign.mapping.problem import MappingProblem
from sparseflow.errors import InputError


def random_problem(
    segments: int,
    slots: int,
    *,
    seed: int,
    skips: float = 0.0,
    slack: float = 1.5,
    traffic: float = 0.3,
    types: int = 3,
    refused: float = 0.0,
    activations: float = 0.0,
) -> MappingProblem:
    """Create a feasible problem.

    Limits are set around a hidden mapping, so that one exists however tight they are. Memory is in whole MB:
    sums are exact.

    Args:
        segments: K.
        slots: S.
        seed: Of everything random.
        skips: Edges beside the chain, as a share of K.
        slack: Limit of each slot over what the hidden mapping has on it; 1 is as tight as can be.
        traffic: Mean time of an edge over the mean latency of a segment.
        types: How many kinds of chips there are; each is faster or slower as a whole.
        refused: Share of (segment, slot) pairs that cannot run.
        activations: Mean memory of the activations of a segment over that of its weights.

    Raises:
        InputError: A size or share is out of range.
    """
    if segments < 1 or slots < 1 or types < 1 or slack < 1.0 or min(skips, traffic, activations) < 0.0:
        raise InputError(
            f"`segments` (={segments}), `slots` (={slots}), `types` (={types}) and `slack` (={slack}) must "
            f"be at least 1, `skips` (={skips}), `traffic` (={traffic}) and `activations` (={activations}) "
            "at least 0"
        )
    if not 0.0 <= refused < 1.0:
        raise InputError(f"`refused` (={refused}) must be from 0 to below 1")
    rng = np.random.default_rng(seed)
    work = rng.lognormal(0.0, 0.6, segments)
    kind = rng.integers(types, size=slots)
    speed = rng.uniform(0.5, 2.0, types)[kind]
    taste = rng.lognormal(0.0, 0.15, (segments, types))[:, kind]
    latency = work[:, None] / speed * taste
    memory = rng.integers(10, 200, segments).astype(np.float64)
    hidden = rng.integers(slots, size=segments)
    contents = np.bincount(hidden, memory, slots)
    # From a generator of its own, so that other numbers do not depend on it.
    activation = np.round(memory * activations * np.random.default_rng([seed, 1]).uniform(0.2, 1.8, segments))
    peak = np.zeros(slots)
    np.maximum.at(peak, hidden, activation)
    limit = np.ceil(np.maximum(contents + peak, (memory + activation).mean()) * slack)
    lost = rng.random((segments, slots)) < refused
    lost[np.arange(segments), hidden] = False
    latency[lost] = np.inf

    chain = np.arange(1, segments)
    extra = round(skips * segments) if segments > 2 else 0
    a = rng.integers(0, max(segments - 2, 1), extra)
    b = a + 2 + (rng.random(extra) * (segments - a - 2)).astype(np.int64)
    src, dst = np.concatenate([chain - 1, a]), np.concatenate([chain, b])
    sent = rng.lognormal(0.0, 0.5, len(src)) * 1e5

    side = int(np.ceil(np.sqrt(slots)))
    index = np.stack(np.divmod(rng.permutation(side * side)[:slots], side), axis=1)
    hops = np.abs(index[:, None] - index[None]).sum(-1).astype(np.float64)
    mean = float(latency[np.isfinite(latency)].mean()) * traffic
    distances = hops[hops > 0.0].mean() if slots > 1 else 1.0
    return MappingProblem(
        latency_ms=latency,
        memory_mb=memory,
        activation_mb=activation,
        limit_mb=limit,
        src=src,
        dst=dst,
        traffic_bytes=sent,
        fixed_ms=0.1 * mean / distances * hops,
        ms_per_byte=0.9 * mean / distances / 1e5 * hops,
    )
