"""Schedules for other extents than those that they were tuned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import AxisSplit
from sparseflow.tuning.schedule.schedule import Schedule


def adapt_schedule(schedule: Schedule, operator: Operator, shape: Mapping[str, int]) -> Schedule | None:
    """Adapt a schedule to other extents: blocks and tiles keep their sizes, their number changes.

    Args:
        schedule: A schedule of the operator.
        operator: The operator.
        shape: Extent of every axis.

    Returns:
        The schedule; None if it cannot run with these extents.
    """
    lsplit = tuple(_limit_tile(split, shape[split.axis]) for split in schedule.lsplit)
    try:
        return replace(schedule, lsplit=lsplit).canonicalize(operator, shape)
    except InputError:
        return None


def _limit_tile(split: AxisSplit, extent: int) -> AxisSplit:
    """Shrink the tile of a dense axis to a power of two that the axis fills."""
    if len(split.parts) != 2 or split.inner_size <= extent:
        return split
    (outer, _), (inner, _) = split.parts
    return replace(split, parts=((outer, 1), (inner, 1 << (extent.bit_length() - 1))))
