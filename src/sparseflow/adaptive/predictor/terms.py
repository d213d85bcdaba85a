"""What of a plan takes time: blocks, and how many experts each of their tokens goes to.

A block costs what a block costs: with u(k) the time of one that runs with top-k k, a plan's time is ::

    overhead + p u(K) + (blocks - p) u(k)

for insertion position p and the model's own top-k K. Written by increments of u, which are not negative, that
is a row of terms for each plan ::

    [1, blocks, blocks with top-k of at least k_1, blocks with top-k of at least k_2, ...]

Every term grows with blocks and with top-k, and so does every sum of them with coefficients that are not
negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparseflow.adaptive.plan import Geometry, Plan


def width(geometry: Geometry) -> int:
    """How many terms a plan has."""
    return 1 + len(geometry.top_ks)


def terms(plans: Sequence[Plan], geometry: Geometry, *, inserted: bool = False) -> np.ndarray:
    """The terms of plans: float64, [plans, `width`].

    Args:
        plans: What to describe.
        geometry: The model's.
        inserted: Leave out the blocks before the insertion: they have run.

    Raises:
        PlanError: The model cannot run a plan.
    """
    found = np.empty((len(plans), width(geometry)))
    for row, plan in zip(found, plans, strict=True):
        geometry.check(plan)
        first = 0 if inserted else plan.insertion_position
        after = len(plan.blocks) - plan.insertion_position
        row[0], row[1] = 1.0, first + after
        row[2:] = [first + after * (plan.top_k >= top_k) for top_k in geometry.top_ks[1:]]
    return found
