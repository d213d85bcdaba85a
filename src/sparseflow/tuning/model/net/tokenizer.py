"""Schedules as typed tokens, cheaply: a distinct token is stored once, and a schedule is a row of numbers.

One token for each thing that a primitive says:

==========  ==========================  ========  =====================  ==================
primitive   one token for each          place     number                 second
==========  ==========================  ========  =====================  ==================
fsplit      part of a split sparse axis           its size               what a step covers
freorder    level of the storage        level     size of its axis
fmode       level of the storage        level     size of its axis
lsplit      part of a split dense axis            its size               what a step covers
lreorder    loop                        loop      its size               what a step covers
parallel    shared loop, if any         loop      its size
vectorize   vector loop, if any         loop      its size
unroll      unrolled loop, if any       loop      its size               unroll factor
run         schedule                              threads                chunk
==========  ==========================  ========  =====================  ==================

Axes are named by role, so that operators share them: rows and columns of the sparse matrix, and the dense
axis. A place is told twice, counted from the outermost and from the innermost. Of the sparse tensors only the
input's storage is read: others have its pattern. Sizes are those that run, whatever the outermost nominal one
says. Numbers are log2, divided by `LOG2_SCALE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import MODES
from sparseflow.tuning.schedule.schedule import Schedule

PRIMITIVES = (
    "padding", "fsplit", "freorder", "fmode", "lsplit", "lreorder", "parallel", "vectorize", "unroll", "run",
)  # fmt: skip
_FSPLIT, _FREORDER, _FMODE, _LSPLIT, _LREORDER, _PARALLEL, _VECTORIZE, _UNROLL, _RUN = range(1, 10)

ROLES = ("none", "rows", "columns", "dense")
PARTS = ("none", "whole", "outer", "inner", "third", "further")

MOST_PLACES = 15
"""Places beyond this share one symbol."""

FIELDS = (len(PRIMITIVES), len(ROLES), len(PARTS), 1 + len(MODES), 2 + MOST_PLACES, 2 + MOST_PLACES)
"""Number of symbols of each field: primitive, role, part, mode, place from outside, place from inside.

In all but the first, 0 says that the token has none.
"""

NUMBERS = 2
_MOST = 2**62
"""Numbers fit 64 bits."""

LOG2_SCALE = 16.0

_Key = tuple[int, int, int, int, int, int, int, int]
"""A token: its fields, then its two numbers as they are."""


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Distinct tokens; the first is padding.

    Attributes:
        fields: Symbols, uint8, (tokens, 6); `FIELDS` tells their ranges.
        numbers: float32, (tokens, 2).
    """

    fields: np.ndarray
    numbers: np.ndarray


class Encoder:
    """Turns schedules into sequences of numbers, each of a token in its table.

    The table grows as schedules come, and numbers that were given stay valid. Use one encoder for whatever is
    to be scored or learnt from together.
    """

    def __init__(self) -> None:
        self._known: dict[_Key, int] = {(0, 0, 0, 0, 0, 0, 0, 0): 0}
        self._table = TokenTable(fields=np.zeros((0, 6), np.uint8), numbers=np.zeros((0, 2), np.float32))

    def encode(
        self, schedules: Sequence[Schedule], operator: Operator, extents: Mapping[str, int] | None = None
    ) -> np.ndarray:
        """Tokens of each schedule.

        Args:
            schedules: Of `operator`; they need not be able to run.
            operator: What they compute.
            extents: Axis -> extent, where known; without one, the outermost size of a split is taken as it is
                told, and an axis that is not split has no size.

        Returns:
            int32, (schedules, longest), 0 where a schedule has ended.

        Raises:
                InputError: A schedule names axes or tensors that are not the operator's, or a size is 0.
        """
        axes = _Axes(operator, extents or {})
        rows = [self._tokens(schedule, axes) for schedule in schedules]
        found = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
        for at, row in enumerate(rows):
            found[at, : len(row)] = row
        return found

    @property
    def table(self) -> TokenTable:
        """Every token met so far."""
        have = len(self._table.fields)
        if have < len(self._known):
            fresh = list(self._known)[have:]
            keys = np.array(fresh, np.int64)
            numbers = np.log2(np.maximum(keys[:, 6:], 1)) / LOG2_SCALE
            self._table = TokenTable(
                fields=np.concatenate([self._table.fields, keys[:, :6].astype(np.uint8)]),
                numbers=np.concatenate([self._table.numbers, numbers.astype(np.float32)]),
            )
        return self._table

    def _tokens(self, schedule: Schedule, axes: _Axes) -> list[int]:
        known = self._known
        found: list[int] = []

        def add(key: _Key) -> None:
            token = known.get(key)
            if token is None:
                token = known[key] = len(known)
            found.append(token)

        try:
            parts = axes.parts(schedule)
            for primitive, splits in ((_FSPLIT, schedule.fsplit), (_LSPLIT, schedule.lsplit)):
                for split in splits:
                    for name, _ in split.parts:
                        role, part, size, step = parts[name]
                        add((primitive, role, part, 0, 0, 0, size, step))
            stored = next(each for each in schedule.formats if each.tensor == axes.tensor)
            modes = {level.axis: level.mode + 1 for level in stored.modes}
            for outside, inside, name in _places(stored.order):
                role, part, size, _ = parts[name]
                add((_FREORDER, role, part, 0, outside, inside, size, 0))
                add((_FMODE, role, part, modes[name], outside, inside, size, 0))
            place = {}
            for outside, inside, name in _places(schedule.lreorder):
                role, part, size, step = parts[name]
                place[name] = outside, inside
                add((_LREORDER, role, part, 0, outside, inside, size, step))
            for primitive, name, number in (
                (_PARALLEL, schedule.parallel, 0),
                (_VECTORIZE, schedule.vectorize, 0),
                (_UNROLL, schedule.unroll, schedule.unroll_factor),
            ):
                if name is not None:
                    role, part, size, _ = parts[name]
                    add((primitive, role, part, 0, *place[name], size, number))
        except (KeyError, StopIteration, ZeroDivisionError):
            raise InputError(
                f"the schedule {schedule} cannot be encoded as one of {axes.operator.name}, which has the "
                f"axes {', '.join(axes.operator.axes)}, stores {axes.tensor} and has no part of size 0"
            ) from None
        add((_RUN, 0, 0, 0, 0, 0, schedule.threads, schedule.chunk))
        return found


class _Axes:
    """The roles of an operator's axes, and the parts of a schedule: name -> (role, part, size, step)."""

    def __init__(self, operator: Operator, extents: Mapping[str, int]) -> None:
        self.operator = operator
        self.tensor = operator.tensors[0]
        rows, cols = operator.sparse_axes
        self._role = {rows: 1, cols: 2} | dict.fromkeys(operator.dense_axes, 3)
        self._extents = extents
        self._whole = {name: (role, 1, extents.get(name, 0), 1) for name, role in self._role.items()}

    def parts(self, schedule: Schedule) -> dict[str, tuple[int, int, int, int]]:
        found = self._whole.copy()
        for split in schedule.fsplit + schedule.lsplit:
            role = self._role[split.axis]
            del found[split.axis]
            step = min(split.inner, _MOST)
            extent = self._extents.get(split.axis)
            (outermost, nominal), *inner = split.parts
            found[outermost] = (role, 2, nominal if extent is None else -(-extent // step), step)
            for number, (name, size) in enumerate(inner, start=3):
                step //= size
                found[name] = (role, min(number, len(PARTS) - 1), size, step)
        return found


def _places(names: Sequence[str]) -> list[tuple[int, int, str]]:
    """Names with their places from outside and from inside, both from 1."""
    most, count = MOST_PLACES + 1, len(names) + 1
    return [(min(at, most), min(count - at, most), name) for at, name in enumerate(names, 1)]
