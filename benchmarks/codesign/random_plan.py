"""Random plans for tests and benchmarks of the executors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparseflow.codesign.workload.splits import LayerSplit, RewritePlan
from sparseflow.core.layers import LayerNode
from sparseflow.errors import InputError


def random_plan(
    layers: Sequence[LayerNode], slots: int, *, seed: int, share: float = 0.5, back: bool = False
) -> tuple[list[int], RewritePlan]:
    """Choose a slot for each layer, and splits into uneven groups with units in any order.

    Args:
        layers: Of a model, in order.
        slots: How many slots there are.
        seed: What is drawn from.
        share: Of layers that can be split, how many are, on average.
        back: Whether a batch may come back to a slot where it was; otherwise each slot has layers that follow
            each other.

    Returns:
        Slots of layers, and what is split.

    Raises:
        InputError: There are more slots than layers, or none.
    """
    if not 1 <= slots <= len(layers):
        raise InputError(f"`slots` (={slots}) must be from 1 to the number of layers (={len(layers)})")
    random = np.random.default_rng(seed)
    if back:
        assignment = random.integers(slots, size=len(layers)).tolist()
    else:
        starts = np.sort(random.choice(np.arange(1, len(layers)), slots - 1, replace=False))
        order = random.permutation(slots).tolist()
        assignment = [order[index] for index in np.searchsorted(starts, np.arange(len(layers)), side="right")]
    splits = []
    for layer, home in zip(layers, assignment, strict=True):
        if slots == 1 or not layer.splittable or layer.units < 2 or random.random() >= share:
            continue
        groups = int(random.integers(2, min(slots, layer.units) + 1))
        cuts = np.sort(random.choice(np.arange(1, layer.units), groups - 1, replace=False))
        overrides = random.permutation([slot for slot in range(slots) if slot != home])[: groups - 1]
        splits.append(
            LayerSplit(
                layer=layer.id,
                permutation=tuple(random.permutation(layer.units).tolist()),
                sizes=tuple(np.diff([0, *cuts, layer.units]).tolist()),
                slots=(home, *overrides.tolist()),
            )
        )
    return assignment, RewritePlan(splits=tuple(splits))
