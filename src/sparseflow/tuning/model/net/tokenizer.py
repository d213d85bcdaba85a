"""Tokenizer of schedules: distinct tokens are stored in a table, and a schedule is a row of token ids.

Each primitive gives one token for each of its parts:

==========  ==========================  ========  =====================  ======================
primitive   one token for each          position  first number           second number
==========  ==========================  ========  =====================  ======================
fsplit      part of a split sparse axis           size                   coordinates per step
freorder    storage level               level     size of its axis
fmode       storage level               level     size of its axis
lsplit      part of a split dense axis            size                   coordinates per step
lreorder    loop                        loop      size                   coordinates per step
parallel    parallel loop, if any       loop      size
vectorize   vectorized loop, if any     loop      size
unroll      unrolled loop, if any       loop      size                   unroll factor
run         schedule                              threads                chunk
==========  ==========================  ========  =====================  ======================

Axes are named by role (rows, columns, dense axis), so operators share tokens. A position is given twice, from
the outermost and from the innermost. Only the storage of the sparse input is encoded, because other sparse
tensors have the same pattern. Sizes are those that run, not the nominal outermost sizes. Numbers are log2,
divided by `LOG2_SCALE`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import LevelMode
from sparseflow.tuning.schedule.schedule import Schedule

PRIMITIVES = (
    "padding", "fsplit", "freorder", "fmode", "lsplit", "lreorder", "parallel", "vectorize", "unroll", "run",
)  # fmt: skip
_FSPLIT, _FREORDER, _FMODE, _LSPLIT, _LREORDER, _PARALLEL, _VECTORIZE, _UNROLL, _RUN = range(1, 10)

ROLES = ("none", "rows", "columns", "dense")
PARTS = ("none", "whole", "outer", "inner", "third", "further")

MAX_POSITIONS = 15
"""Larger positions share one symbol."""

FIELD_SIZES = (
    len(PRIMITIVES),
    len(ROLES),
    len(PARTS),
    1 + LevelMode.DIAGONAL,
    2 + MAX_POSITIONS,
    2 + MAX_POSITIONS,
)
"""Number of symbols of each field: primitive, role, part, mode, position from outside, position from inside.

In all fields but the first, 0 means that the token has none.
"""

NUM_NUMBERS = 2
_MAX_NUMBER = 2**62
"""Limit that fits 64 bits."""

LOG2_SCALE = 16.0

_TokenKey = tuple[int, int, int, int, int, int, int, int]
"""Fields of a token and its two numbers before scaling."""


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """Distinct tokens; the first is padding.

    Attributes:
        fields: Symbols, uint8, shape [tokens, 6]; `FIELD_SIZES` has their ranges.
        numbers: float32, shape [tokens, 2].
    """

    fields: np.ndarray
    numbers: np.ndarray


class ScheduleTokenizer:
    """Converts schedules to token ids and collects the distinct tokens.

    The table grows with new schedules; existing ids stay valid. Schedules that are scored or trained together
    must share a tokenizer.
    """

    def __init__(self) -> None:
        self._vocabulary: dict[_TokenKey, int] = {(0, 0, 0, 0, 0, 0, 0, 0): 0}
        self._table = TokenTable(fields=np.zeros((0, 6), np.uint8), numbers=np.zeros((0, 2), np.float32))

    def encode(
        self, schedules: Sequence[Schedule], operator: Operator, extents: Mapping[str, int] | None = None
    ) -> np.ndarray:
        """Tokenize schedules.

        Args:
            schedules: Schedules of `operator`; they need not be valid.
            operator: Operator.
            extents: Axis name -> extent. Without extents the nominal outermost sizes are used, and unsplit
                axes have no size.

        Returns:
            Token ids, int32, shape [schedules, longest], padded with 0.

        Raises:
            InputError: A schedule has axes or tensors of another operator, or a size is 0.
        """
        axes = _AxisRoles(operator, extents or {})
        rows = [self._tokenize(schedule, axes) for schedule in schedules]
        ids = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
        for index, row in enumerate(rows):
            ids[index, : len(row)] = row
        return ids

    @property
    def table(self) -> TokenTable:
        """Table of all tokens so far."""
        num_encoded = len(self._table.fields)
        if num_encoded < len(self._vocabulary):
            new_keys = list(self._vocabulary)[num_encoded:]
            keys = np.array(new_keys, np.int64)
            numbers = np.log2(np.maximum(keys[:, 6:], 1)) / LOG2_SCALE
            self._table = TokenTable(
                fields=np.concatenate([self._table.fields, keys[:, :6].astype(np.uint8)]),
                numbers=np.concatenate([self._table.numbers, numbers.astype(np.float32)]),
            )
        return self._table

    def _tokenize(self, schedule: Schedule, axes: _AxisRoles) -> list[int]:
        vocabulary = self._vocabulary
        tokens: list[int] = []

        def add(key: _TokenKey) -> None:
            token = vocabulary.get(key)
            if token is None:
                token = vocabulary[key] = len(vocabulary)
            tokens.append(token)

        try:
            parts = axes.list_parts(schedule)
            for primitive, splits in ((_FSPLIT, schedule.fsplit), (_LSPLIT, schedule.lsplit)):
                for split in splits:
                    for name, _ in split.parts:
                        role, part, size, step = parts[name]
                        add((primitive, role, part, 0, 0, 0, size, step))
            storage = next(
                sparse_format for sparse_format in schedule.formats if sparse_format.tensor == axes.tensor
            )
            # Networks know AutoSparse's modes; other levels are compressed for them.
            modes = {
                level.axis: 1 + (level.mode if level.mode < LevelMode.DIAGONAL else LevelMode.COMPRESSED)
                for level in storage.modes
            }
            for outside, inside, name in _list_positions(storage.order):
                role, part, size, _ = parts[name]
                add((_FREORDER, role, part, 0, outside, inside, size, 0))
                add((_FMODE, role, part, modes[name], outside, inside, size, 0))
            loop_positions = {}
            for outside, inside, name in _list_positions(schedule.lreorder):
                role, part, size, step = parts[name]
                loop_positions[name] = outside, inside
                add((_LREORDER, role, part, 0, outside, inside, size, step))
            for primitive, name, number in (
                (_PARALLEL, schedule.parallel, 0),
                (_VECTORIZE, schedule.vectorize, 0),
                (_UNROLL, schedule.unroll, schedule.unroll_factor),
            ):
                if name is not None:
                    role, part, size, _ = parts[name]
                    add((primitive, role, part, 0, *loop_positions[name], size, number))
        except (KeyError, StopIteration, ZeroDivisionError):
            raise InputError(
                f"schedule {schedule} cannot be encoded for {axes.operator.name}, which has the "
                f"axes {', '.join(axes.operator.axes)}, the tensor {axes.tensor} and no part of size 0"
            ) from None
        add((_RUN, 0, 0, 0, 0, 0, schedule.threads, schedule.chunk))
        return tokens


class _AxisRoles:
    """Roles of an operator's axes, and the parts of a schedule: name -> (role, part, size, step)."""

    def __init__(self, operator: Operator, extents: Mapping[str, int]) -> None:
        self.operator = operator
        self.tensor = operator.tensors[0]
        rows, cols = operator.sparse_axes
        self._roles = {rows: 1, cols: 2} | dict.fromkeys(operator.dense_axes, 3)
        self._extents = extents
        self._unsplit_parts = {name: (role, 1, extents.get(name, 0), 1) for name, role in self._roles.items()}

    def list_parts(self, schedule: Schedule) -> dict[str, tuple[int, int, int, int]]:
        parts = self._unsplit_parts.copy()
        for split in schedule.fsplit + schedule.lsplit:
            role = self._roles[split.axis]
            del parts[split.axis]
            step = min(split.inner_size, _MAX_NUMBER)
            extent = self._extents.get(split.axis)
            (outermost, nominal), *inner = split.parts
            parts[outermost] = (role, 2, nominal if extent is None else -(-extent // step), step)
            for number, (name, size) in enumerate(inner, start=3):
                step //= size
                parts[name] = (role, min(number, len(PARTS) - 1), size, step)
        return parts


def _list_positions(names: Sequence[str]) -> list[tuple[int, int, str]]:
    """List names with their positions from outside and from inside, both from 1."""
    maximum, count = MAX_POSITIONS + 1, len(names) + 1
    return [(min(index, maximum), min(count - index, maximum), name) for index, name in enumerate(names, 1)]
