"""The optimum by trying all mappings: slow, and plainly right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparseflow.codesign.mapping.objective import Goal
from sparseflow.codesign.mapping.problem import Problem
from sparseflow.codesign.mapping.tables import tables
from sparseflow.core.extras import require
from sparseflow.errors import InputError

MOST = 2**28
"""Mappings: some ten seconds."""


def exhaust(problem: Problem, goals: Sequence[Goal]) -> list[tuple[float, list[int] | None]]:
    """The least objective for each goal, ms, and a mapping that has it; inf and None where none can run.

    Raises:
        InputError: There are more than `MOST` mappings.
        MissingExtraError: Numba is missing.
    """
    if problem.slots**problem.segments > MOST:
        raise InputError(
            f"{problem.slots} slots and {problem.segments} segments have more than {MOST} mappings; "
            "use the strategy 'exact'"
        )
    require("numba", "codesign")
    from sparseflow.codesign.mapping.kernels import reference as kernel

    best = np.empty(len(goals))
    slot = np.full((len(goals), problem.segments), -1, dtype=np.int64)
    period = np.array([goal.period_weight for goal in goals])
    serial = np.array([goal.serial_weight for goal in goals])
    kernel.exhaust(tables(problem), period, serial, best, slot)
    return [
        (float(value), row.tolist() if np.isfinite(value) else None)
        for value, row in zip(best, slot, strict=True)
    ]
