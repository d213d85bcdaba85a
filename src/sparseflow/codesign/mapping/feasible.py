"""Why nothing can run: by how much memory is short, and where slots are not connected."""

from __future__ import annotations

import numpy as np

from sparseflow.codesign.mapping.problem import Problem
from sparseflow.errors import InputError


def check_possible(problem: Problem) -> None:
    """Raise InputError where it is plain that no mapping can run; says by how much."""
    usable = problem.limit_mb > 0.0
    if not usable.any():
        raise InputError(f"none of the {problem.slots} slots holds a chip: every `limit_mb` is 0")
    runs = np.isfinite(problem.latency_ms) & usable
    for k in np.flatnonzero(~problem.allowed.any(axis=1)).tolist():
        if not runs[k].any():
            raise InputError(
                f"segment {k} can run on none of the {int(usable.sum())} slots with a chip: its `latency_ms` "
                "is infinite on all of them"
            )
        needed, room = problem.memory_mb[k, runs[k]].min(), problem.limit_mb[runs[k]].max()
        raise InputError(
            f"segment {k} needs {needed:g} MB and the largest slot that can run it has {room:g} MB: split "
            "the segment, or choose a larger chip"
        )
    needed, room = _least_mb(problem).sum(), problem.limit_mb[usable].sum()
    least_bytes = np.where(problem.allowed, problem.memory_bytes, np.iinfo(np.int64).max).min(axis=1)
    if least_bytes.sum() > problem.limit_bytes[usable].sum():
        raise InputError(
            f"{problem.segments} segments need {needed:g} MB and all {int(usable.sum())} slots with a chip "
            f"have {room:g} MB: choose more or larger chips"
        )


def impossible(problem: Problem) -> InputError:
    """What to raise where the proof that there is no mapping has no plainer reason."""
    needed, apart = _least_mb(problem), ~problem.connected
    network = ""
    if apart.any():
        a, b = np.argwhere(apart)[0].tolist()
        network = f", and {int(apart.sum())} pairs of slots are not connected (such as {a} to {b})"
    return InputError(
        f"no mapping can run: {problem.segments} segments of {needed.sum():g} MB in all, the largest of "
        f"{needed.max():g} MB, cannot be shared out among {problem.slots} slots of "
        f"{problem.limit_mb.sum():g} MB in all, the largest of {problem.limit_mb.max():g} MB{network}; cut "
        "segments smaller, or choose larger chips"
    )


def _least_mb(problem: Problem) -> np.ndarray:
    return np.where(problem.allowed, problem.memory_mb, np.inf).min(axis=1)
