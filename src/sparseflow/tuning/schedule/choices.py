"""What can be decided about a schedule, decision by decision, and how often a search should try it.

Every function lists what is legal after the decisions before it, each with a weight. The weights are
judgement, not measurement: they keep a search from wasting itself on what is known to be slow. None is zero.
Only canonical schedules come about: none runs the same as another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import Mode, plain_modes
from sparseflow.tuning.schedule.rules import CHUNKS, dangling_singletons, lanes_loop

Choice = TypeVar("Choice")
Weighted = Sequence[tuple[Choice, float]]
Parts = tuple[tuple[str, ...], ...]
"""The sub axes of each axis."""

UNROLL_FACTORS = (2, 4, 8, 16)
"""More copies of a loop's body than these fill the instruction cache and save nothing."""

_MODE_WEIGHTS = {Mode.DENSE: 1.0, Mode.COMPRESSED: 1.0, Mode.COMPRESSED_NONUNIQUE: 0.1, Mode.SINGLETON: 2.0}
_SMALL_BLOCK = 4
"""A dense level of so many coordinates costs about what the coordinates of a compressed one would."""


def pick(rng: np.random.Generator, weighted: Weighted[Choice]) -> Choice:
    """One choice, drawn by weight."""
    point = rng.random() * sum(weight for _, weight in weighted)
    for choice, weight in weighted:
        point -= weight
        if point < 0.0:
            return choice
    return weighted[-1][0]


@lru_cache
def inner_sizes(extent: int, largest: int, dense: bool) -> Weighted[int | None]:
    """Sizes of an axis' inner part, powers of two that leave at least two steps outside; None: not split.

    A sparse axis stays whole half of the time, and small blocks are likelier than large ones. A dense axis is
    split into what fits vector registers: 8 to 64.
    """
    sizes = [2**power for power in range(1, largest.bit_length()) if 2**power < extent]
    if dense:
        return [(None, 2.0), *((size, 8.0 if 8 <= size <= 64 else 1.0) for size in sizes)]
    weights = [1.0 / math.log2(size) for size in sizes]
    return [(None, sum(weights) or 1.0), *zip(sizes, weights, strict=True)]


@lru_cache
def storage_orders(parts: Parts) -> Weighted[tuple[str, ...]]:
    """Orders of the sparse sub axes, outer parts before inner ones; mostly rows outermost."""
    rows = parts[0][0]
    return [(order, 30.0 if order[0] == rows else 1.0) for order in _interleavings(parts)]


@lru_cache
def mode_sequences(levels: int) -> Sequence[tuple[Mode, ...]]:
    """Modes of so many levels, outermost first."""
    return [
        modes
        for modes in itertools.product(_MODE_WEIGHTS, repeat=levels)
        if not dangling_singletons(modes) and plain_modes(modes) == modes
    ]


def modes(owners: Sequence[str], sizes: Sequence[int]) -> Weighted[tuple[Mode, ...]]:
    """Modes of the levels, outermost first.

    A dense level is likely where it is small, and where only parts of the same axis are above: all rows.

    Args:
        owners: The axis that each level is a part of.
        sizes: Its extent.
    """
    weights = []
    for at, size in enumerate(sizes):
        outermost = all(owner == owners[0] for owner in owners[: at + 1])
        dense = 2.0 if outermost else max(min(1.0, _SMALL_BLOCK / size), 1e-4)
        weights.append({**_MODE_WEIGHTS, Mode.DENSE: dense})
    return [
        (modes, math.prod(weight[mode] for weight, mode in zip(weights, modes, strict=True)))
        for modes in mode_sequences(len(sizes))
    ]


@lru_cache
def loop_orders(order: tuple[str, ...], dense: Parts) -> Weighted[tuple[str, ...]]:
    """Where loops of dense axes stand among those that walk the storage; mostly the last one innermost."""
    innermost = {parts[-1] for parts in dense}
    return [
        (loops, (20.0 if loops[-1] in innermost else 1.0) * (10.0 if loops[0] == order[0] else 1.0))
        for loops in _interleavings((order, *dense))
    ]


def parallel_loops(
    operator: Operator, loops: Sequence[str], owner: dict[str, str], mode: dict[str, Mode]
) -> Weighted[str | None]:
    """Loops that threads may share; mostly the outermost one."""
    shared = operator.sparse_axes if operator.sparse_output else operator.output_axes
    found: list[tuple[str | None, float]] = [(None, 1.0)]
    for loop in loops:
        level = mode.get(loop, Mode.DENSE)
        if owner[loop] in shared and level.has_loop and (level.unique or operator.sparse_output):
            found.append((loop, 30.0 if loop == loops[0] else 2.0))
    return found


def vector_loops(
    operator: Operator,
    loops: Sequence[str],
    owner: dict[str, str],
    mode: dict[str, Mode],
    parallel: str | None,
) -> Weighted[str | None]:
    """The innermost loop, one whose results run side by side above it, or none; mostly one of the two."""
    found: list[tuple[str | None, float]] = [(None, 1.0)]
    last = loops[-1]
    if last != parallel and mode.get(last, Mode.DENSE).has_loop:
        found.append((last, 2.0 if last in mode else 8.0))
    inner = [loop for loop in loops if owner[loop] == operator.output_axes[-1]][-1]
    lanes = lanes_loop(operator, loops, inner, mode)
    if lanes is not None and lanes != parallel:
        found.append((lanes, 8.0))
    return found


def unrolled_loops(
    loops: Sequence[str], mode: dict[str, Mode], taken: tuple[str | None, str | None]
) -> Weighted[tuple[str | None, int]]:
    """Loops that are left and factors; mostly none."""
    left = [loop for loop in loops if loop not in taken and mode.get(loop, Mode.DENSE).has_loop]
    found = [(loop, factor) for loop in left for factor in UNROLL_FACTORS]
    return [((None, 0), max(len(found), 1.0)), *((each, 1.0) for each in found)]


def chunks() -> Weighted[int]:
    """Steps of the parallel loop that a thread takes at a time."""
    return [(chunk, 1.0) for chunk in CHUNKS]


def _interleavings(sequences: Parts) -> Sequence[tuple[str, ...]]:
    """All orders of all items that keep the order within each sequence."""
    left = tuple(each for each in sequences if each)
    if not left:
        return [()]
    return [
        (each[0], *rest)
        for at, each in enumerate(left)
        for rest in _interleavings((*left[:at], each[1:], *left[at + 1 :]))
    ]
