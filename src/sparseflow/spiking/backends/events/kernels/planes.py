"""Sharing of events between time steps.

A steadily driven neuron fires again and again, often at every step or every other step, and a weight row
needed at two steps needs to be summed only once. The events of a tensor are therefore stored in *planes*,
each of which stands for a set of time steps: an event of plane {1, 3} fires at steps 1 and 3. The spikes of
step t are the sum of all planes whose set contains t.

Time is cut into blocks of at most four steps. The planes of a block form a tree: all its steps, then every
other step, then single steps; an event is stored in the highest plane all of whose steps it fires at. A
convolution walks the tree: the sum of a plane starts from the sum of its parent, and the sum of a single
step is complete. Narrow layers go from the block directly to single steps, since each plane costs a loop
over all pixels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

BLOCK_STEPS = 4
"""Time steps that may share events."""
MAX_SHARED = 3
"""Planes of a block that stand for more than one step."""
_MIN_TREE_CHANNELS = 64
"""Minimum channels for planes of every other step."""

Steps = tuple[int, ...]
"""Time steps, evenly spaced, in order."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """The events that fire at all of some steps, but not at all of the parent's steps.

    Attributes:
        steps: Time steps of the plane.
        parent: Time steps of the plane above; empty if there is none.
    """

    steps: Steps
    parent: Steps = ()

    def extract(self, spikes: np.ndarray) -> np.ndarray:
        """Extract the plane's events [...] from spikes [T, ...] of zeros and ones."""
        events = spikes[list(self.steps)].min(axis=0)
        return events * (1 - spikes[list(self.parent)].min(axis=0)) if self.parent else events


def _build_tree(steps: Steps, parent: Steps, wide: bool) -> list[Plane]:
    planes = [Plane(steps=steps, parent=parent)]
    if len(steps) > 1:
        parts = (steps[::2], steps[1::2]) if wide else tuple((t,) for t in steps)
        for part in parts:
            planes += _build_tree(part, steps, wide)
    return planes


@functools.cache
def list_planes(time_steps: int, channels: int) -> tuple[Plane, ...]:
    """List the planes of a tensor with `time_steps` steps and `channels` channels.

    They are ordered by their first step, larger sets first: the single-step plane of a step comes after all
    planes that share the step.
    """
    blocks = [range(lo, min(lo + BLOCK_STEPS, time_steps)) for lo in range(0, time_steps, BLOCK_STEPS)]
    planes = [p for block in blocks for p in _build_tree(tuple(block), (), channels >= _MIN_TREE_CHANNELS)]
    return tuple(sorted(planes, key=lambda p: (p.steps[0], -len(p.steps))))


PLANE_PARENT_SLOT, PLANE_SLOT, PLANE_STEPS, PLANE_PARENT_STEPS, PLANE_BYTES = 0, 4, 8, 20, 32
"""Where a row of `plane_table` holds what, and its size; bytes."""


def _describe_progression(steps: Steps) -> tuple[int, int, int]:
    """Return the first step, one past the last, and the spacing."""
    if not steps:
        return 0, 0, 1
    return steps[0], steps[-1] + 1, steps[1] - steps[0] if len(steps) > 1 else 1


@functools.cache
def build_plane_table(time_steps: int, channels: int) -> np.ndarray:
    """Build `list_planes` for kernels: int32 [planes, 8].

    A row holds the slot of the parent's sum (-1 without a parent), the slot of its own sum (-1 for a single
    step), then first step, one past the last and spacing of its own steps and of its parent's. Slots are
    numbered from 0 to MAX_SHARED - 1 in each block.
    """
    slots: dict[Steps, int] = {(): -1}
    rows = []
    for plane in list_planes(time_steps, channels):
        if len(plane.steps) > 1:
            slots[plane.steps] = sum(s[0] // BLOCK_STEPS == plane.steps[0] // BLOCK_STEPS for s in slots if s)
        ranges = _describe_progression(plane.steps), _describe_progression(plane.parent)
        rows.append((slots[plane.parent], slots.get(plane.steps, -1), *ranges[0], *ranges[1]))
    table = np.array(rows, dtype=np.int32)
    table.flags.writeable = False
    return table
