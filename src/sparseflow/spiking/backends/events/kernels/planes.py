"""How events share time steps.

A neuron that is driven steadily fires again and again, mostly at every step or at every other one, and a
weight row that is needed at two steps need only be summed once. So the events of a tensor are kept in
*planes*, each of which stands for a set of time steps: an event of plane {1, 3} fires at step 1 and at step
3. The spikes of step t are the sum of all planes whose set holds t.

Time is cut into blocks of at most four steps. The planes of a block form a tree: all its steps, then every
other one, at last each step alone; an event lies in the highest plane all of whose steps it fires at. A
convolution walks the tree: the sum of a plane starts from the sum of its parent, and the sum of a single step
is complete. Narrow layers go from the block to single steps at once, for every plane costs a loop over all
pixels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

BLOCK_STEPS = 4
"""Time steps that may share events."""
MOST_SHARED = 3
"""Planes of a block that stand for more than one step."""
_WIDE = 64
"""Channels from which on every other step of a block has a plane."""

Steps = tuple[int, ...]
"""Time steps, evenly spaced, in order."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """The events that fire at every one of some steps, but not at every one of its parent's steps.

    Attributes:
        steps: Its time steps.
        parent: Time steps of the plane above; empty when there is none.
    """

    steps: Steps
    parent: Steps = ()

    def of(self, spikes: np.ndarray) -> np.ndarray:
        """Its events, given spikes [T, ...] of zeros and ones: [...]."""
        own = spikes[list(self.steps)].min(axis=0)
        return own * (1 - spikes[list(self.parent)].min(axis=0)) if self.parent else own


def _tree(steps: Steps, parent: Steps, wide: bool) -> list[Plane]:
    found = [Plane(steps=steps, parent=parent)]
    if len(steps) > 1:
        parts = (steps[::2], steps[1::2]) if wide else tuple((t,) for t in steps)
        for part in parts:
            found += _tree(part, steps, wide)
    return found


@functools.cache
def planes_of(time_steps: int, channels: int) -> tuple[Plane, ...]:
    """The planes of a tensor with `time_steps` steps and `channels` channels.

    They are ordered by their first step, larger sets first: when a step's own plane comes, all planes that
    share the step have come.
    """
    blocks = [range(lo, min(lo + BLOCK_STEPS, time_steps)) for lo in range(0, time_steps, BLOCK_STEPS)]
    found = [p for block in blocks for p in _tree(tuple(block), (), channels >= _WIDE)]
    return tuple(sorted(found, key=lambda p: (p.steps[0], -len(p.steps))))


PLANE_FROM, PLANE_TO, PLANE_STEPS, PLANE_ABOVE, PLANE_BYTES = 0, 4, 8, 20, 32
"""Where a row of `plane_table` holds what, and its size; bytes."""


def _progression(steps: Steps) -> tuple[int, int, int]:
    """First, one past the last and spacing."""
    if not steps:
        return 0, 0, 1
    return steps[0], steps[-1] + 1, steps[1] - steps[0] if len(steps) > 1 else 1


@functools.cache
def plane_table(time_steps: int, channels: int) -> np.ndarray:
    """`planes_of` for kernels: int32 [planes, 8].

    A row holds: the place of the parent's sum (-1 without a parent), the place of its own (-1 for a single
    step), then first step, one past the last and spacing of its own steps and of its parent's. Places are
    numbered from 0 to MOST_SHARED - 1 in each block.
    """
    places: dict[Steps, int] = {(): -1}
    rows = []
    for plane in planes_of(time_steps, channels):
        if len(plane.steps) > 1:
            places[plane.steps] = sum(
                s[0] // BLOCK_STEPS == plane.steps[0] // BLOCK_STEPS for s in places if s
            )
        own = _progression(plane.steps), _progression(plane.parent)
        rows.append((places[plane.parent], places.get(plane.steps, -1), *own[0], *own[1]))
    table = np.array(rows, dtype=np.int32)
    table.flags.writeable = False
    return table
