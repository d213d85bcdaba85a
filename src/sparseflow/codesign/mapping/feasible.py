"""Why nothing can run: by how much memory is short, and where slots are not connected."""

from __future__ import annotations

import numpy as np

from sparseflow.codesign.mapping.problem import BYTES_PER_MB, NEVER, Problem
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
        sizes = np.where(np.isfinite(problem.memory_mb[k]), problem.memory_bytes[k], NEVER)[runs[k]]
        if sizes.min() == NEVER:
            raise InputError(
                f"segment {k} fits on none of the {int(runs[k].sum())} slots that can run it: its "
                "`memory_mb` is infinite on all of them"
            )
        short = sizes - problem.limit_bytes[runs[k]]
        at = int(short.argmin())
        needed, room = problem.memory_mb[k, runs[k]][at], problem.limit_mb[runs[k]][at]
        raise InputError(
            f"segment {k} needs {needed:g} MB and the largest slot that can run it has {room:g} MB: "
            f"{_mb(int(short[at]))} too little; split the segment, or choose a larger chip"
        )
    short = int(problem.least_bytes.sum() - problem.limit_bytes[usable].sum())
    if short > 0:
        needed, room = _least_mb(problem).sum(), problem.limit_mb[usable].sum()
        raise InputError(
            f"{problem.segments} segments need {needed:g} MB and all {int(usable.sum())} slots with a chip "
            f"have {room:g} MB: {_mb(short)} too little; choose more or larger chips"
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


def _mb(lacking_bytes: int) -> str:
    return f"{lacking_bytes / BYTES_PER_MB:.6g} MB"


def _least_mb(problem: Problem) -> np.ndarray:
    return np.where(problem.allowed, problem.memory_mb, np.inf).min(axis=1)
