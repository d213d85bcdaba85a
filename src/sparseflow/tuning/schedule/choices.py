"""Options of each scheduling decision and their sampling weights.

Each function lists the options that are legal after the previous decisions, with a weight each. The weights
are set by judgment, not by measurement: they make options that are known to be slow rare. No weight is zero.
All resulting schedules are canonical.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import FormatLevel, LevelMode, normalize_modes
from sparseflow.tuning.schedule.rules import (
    BALANCED,
    CHUNK_SIZES,
    DIAGONAL_MODES,
    allows_balance,
    allows_diagonals,
    find_dangling_singletons,
    select_lane_loop,
)

Choice = TypeVar("Choice")
WeightedOptions = Sequence[tuple[Choice, float]]
SubAxes = tuple[tuple[str, ...], ...]
"""Sub axes of each axis."""

UNROLL_FACTORS = (2, 4, 8, 16)
"""Larger factors fill the instruction cache without a benefit."""


_MODE_WEIGHTS = {
    LevelMode.DENSE: 1.0,
    LevelMode.COMPRESSED: 1.0,
    LevelMode.COMPRESSED_NONUNIQUE: 0.1,
    LevelMode.SINGLETON: 2.0,
}
_SMALL_BLOCK = 4
"""A dense level of this extent costs about as much as the coordinates of a compressed level."""


def sample_option(rng: np.random.Generator, options: WeightedOptions[Choice]) -> Choice:
    """Sample an option by weight."""
    point = rng.random() * sum(weight for _, weight in options)
    for choice, weight in options:
        point -= weight
        if point < 0.0:
            return choice
    return options[-1][0]


@lru_cache
def list_inner_sizes(extent: int, max_size: int, dense: bool) -> WeightedOptions[int | None]:
    """List the sizes of the inner part of an axis; None leaves the axis unsplit.

    Sizes are powers of two that leave at least two outer steps. A sparse axis is left unsplit in half of the
    samples and prefers small blocks. A dense axis prefers sizes that fit vector registers, 8 to 64.
    """
    sizes = [2**power for power in range(1, max_size.bit_length()) if 2**power < extent]
    if dense:
        return [(None, 2.0), *((size, 8.0 if 8 <= size <= 64 else 1.0) for size in sizes)]
    weights = [1.0 / math.log2(size) for size in sizes]
    return [(None, sum(weights) or 1.0), *zip(sizes, weights, strict=True)]


@lru_cache
def list_storage_orders(parts: SubAxes) -> WeightedOptions[tuple[str, ...]]:
    """List orders of the sparse sub axes, outer before inner parts, with a preference for row-major order."""
    rows = parts[0][0]
    return [(order, 30.0 if order[0] == rows else 1.0) for order in _list_interleavings(parts)]


@lru_cache
def list_mode_sequences(operator: Operator, order: tuple[str, ...]) -> Sequence[tuple[LevelMode, ...]]:
    """List the valid modes of levels in this order, outermost first."""
    sequences = [
        modes
        for modes in itertools.product(_MODE_WEIGHTS, repeat=len(order))
        if not find_dangling_singletons(modes) and normalize_modes(modes) == modes
    ]
    return [*sequences, *([DIAGONAL_MODES] if allows_diagonals(operator, order) else [])]


def list_weighted_modes(
    operator: Operator, order: tuple[str, ...], owners: Sequence[str], sizes: Sequence[int]
) -> WeightedOptions[tuple[LevelMode, ...]]:
    """List the valid modes of the levels, outermost first.

    A dense level is preferred if it is small or if all levels above belong to the same axis (all rows).

    Args:
        operator: Operator.
        order: Levels, outermost first.
        owners: Axis of each level.
        sizes: Extent of each level.
    """
    weights = []
    for index, size in enumerate(sizes):
        rows_only = all(owner == owners[0] for owner in owners[: index + 1])
        dense = 2.0 if rows_only else max(min(1.0, _SMALL_BLOCK / size), 1e-4)
        weights.append({**_MODE_WEIGHTS, LevelMode.DENSE: dense, LevelMode.DIAGONAL: 1.0})
    return [
        (modes, math.prod(weight[mode] for weight, mode in zip(weights, modes, strict=True)))
        for modes in list_mode_sequences(operator, order)
    ]


@lru_cache
def list_loop_orders(order: tuple[str, ...], dense: SubAxes) -> WeightedOptions[tuple[str, ...]]:
    """List loop orders that keep the storage order, with a preference for an innermost dense loop."""
    innermost = {parts[-1] for parts in dense}
    return [
        (loops, (20.0 if loops[-1] in innermost else 1.0) * (10.0 if loops[0] == order[0] else 1.0))
        for loops in _list_interleavings((order, *dense))
    ]


def list_parallel_loops(
    operator: Operator, loops: Sequence[str], owner: dict[str, str], mode: dict[str, LevelMode]
) -> WeightedOptions[str | None]:
    """List the loops that can be parallel, with a preference for the outermost loop."""
    parallel_axes = operator.sparse_axes if operator.sparse_output else operator.output_axes
    options: list[tuple[str | None, float]] = [(None, 1.0)]
    for loop in loops:
        level_mode = mode.get(loop, LevelMode.DENSE)
        if (
            owner[loop] in parallel_axes
            and level_mode.has_loop
            and (level_mode.unique or operator.sparse_output)
        ):
            options.append((loop, 30.0 if loop == loops[0] else 2.0))
    return options


def list_chunks(
    loops: Sequence[str], parallel: str, order: Sequence[str], mode: Mapping[str, LevelMode]
) -> WeightedOptions[int]:
    """List the chunks of a parallel loop, with equal weights, and a preference for balanced elements."""
    levels = [FormatLevel(axis=axis, mode=mode[axis]) for axis in order]
    sizes = [(size, 1.0) for size in CHUNK_SIZES]
    return [*sizes, (BALANCED, 4.0)] if allows_balance(loops, parallel, levels) else sizes


def list_vector_loops(
    operator: Operator,
    loops: Sequence[str],
    owner: dict[str, str],
    mode: dict[str, LevelMode],
    parallel: str | None,
) -> WeightedOptions[str | None]:
    """List the loops that can be vectorized: the innermost loop and the lane loop above it."""
    options: list[tuple[str | None, float]] = [(None, 1.0)]
    last = loops[-1]
    if last != parallel and mode.get(last, LevelMode.DENSE).has_loop:
        options.append((last, 2.0 if last in mode else 8.0))
    inner = [loop for loop in loops if owner[loop] == operator.output_axes[-1]][-1]
    lanes = select_lane_loop(operator, loops, inner, mode)
    if lanes is not None and lanes != parallel:
        options.append((lanes, 8.0))
    return options


def list_unroll_options(
    loops: Sequence[str], mode: dict[str, LevelMode], used_loops: tuple[str | None, str | None]
) -> WeightedOptions[tuple[str | None, int]]:
    """List loops without another role and unroll factors, with a preference for no unrolling."""
    free_loops = [
        loop for loop in loops if loop not in used_loops and mode.get(loop, LevelMode.DENSE).has_loop
    ]
    options = [(loop, factor) for loop in free_loops for factor in UNROLL_FACTORS]
    return [((None, 0), max(len(options), 1.0)), *((option, 1.0) for option in options)]


def _list_interleavings(sequences: SubAxes) -> Sequence[tuple[str, ...]]:
    """List all orders of all items that keep the order within each sequence."""
    nonempty = tuple(sequence for sequence in sequences if sequence)
    if not nonempty:
        return [()]
    return [
        (sequence[0], *tail)
        for index, sequence in enumerate(nonempty)
        for tail in _list_interleavings((*nonempty[:index], sequence[1:], *nonempty[index + 1 :]))
    ]
