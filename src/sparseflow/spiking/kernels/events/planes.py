"""How events share time steps.

A neuron that is driven steadily fires at several steps of a short sequence, and a weight row that is needed at two
steps need only be summed once. So the events of a tensor are kept in *planes*, each of which belongs to a span of
time steps: an event of plane (lo, hi) fires at every step of lo .. hi-1. Spikes at step t are the sum of all planes
whose span holds t.

Time is cut into blocks of at most four steps. The planes of a block form a tree in pre-order: the whole block first,
then its parts, single steps last. A convolution walks the tree: the sum of a plane starts from the sum of its parent,
and the sum of a single step is complete. Wide layers halve their spans (7 planes for 4 steps), narrow ones go from the
block to single steps at once (5 planes), for every plane costs a loop over all pixels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

BLOCK_STEPS = 4
"""Time steps that may share events."""
MOST_DEPTH = 3
"""Levels of the deepest tree."""
_WIDE = 128
"""Channels from which on spans are halved."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """The events that fire at every step of a span, but not at every step of its parent's span.

    Attributes:
        depth: Planes above it.
        lo: First time step.
        hi: One past the last.
        parent: (lo, hi) of the plane above; (0, 0) when there is none.
    """

    depth: int
    lo: int
    hi: int
    parent: tuple[int, int] = (0, 0)

    @property
    def leaf(self) -> bool:
        """Whether it is a single time step."""
        return self.hi - self.lo == 1


def _tree(lo: int, hi: int, depth: int, parent: tuple[int, int], halve: bool) -> list[Plane]:
    top = Plane(depth=depth, lo=lo, hi=hi, parent=parent)
    if hi - lo == 1:
        return [top]
    if halve:
        middle = (lo + hi + 1) // 2
        parts = [(lo, middle), (middle, hi)]
    else:
        parts = [(t, t + 1) for t in range(lo, hi)]
    return [top] + [p for part in parts for p in _tree(*part, depth + 1, (lo, hi), halve)]


@functools.cache
def planes_of(time_steps: int, channels: int) -> tuple[Plane, ...]:
    """The planes of a tensor with `time_steps` steps and `channels` channels, blocks in order, each in pre-order."""
    blocks = range(0, time_steps, BLOCK_STEPS)
    halve = channels >= _WIDE
    return tuple(
        p for lo in blocks for p in _tree(lo, min(lo + BLOCK_STEPS, time_steps), 0, (0, 0), halve)
    )


PLANE_BYTES = 24
"""One row of `plane_table`."""


@functools.cache
def plane_table(time_steps: int, channels: int) -> np.ndarray:
    """`planes_of` for kernels: int32 [planes, 6] of depth, leaf, lo, hi, parent's lo, parent's hi."""
    rows = [(p.depth, p.leaf, p.lo, p.hi, *p.parent) for p in planes_of(time_steps, channels)]
    table = np.array(rows, dtype=np.int32)
    table.flags.writeable = False
    return table
