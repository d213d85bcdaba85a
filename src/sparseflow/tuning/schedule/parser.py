"""Grammar of schedule lines: the parts of a schedule and the reader of their tokens.

Numbers are plain decimals without a sign or leading zeros, and tokens are separated by one space. A line that
is parsed and written again is therefore unchanged, byte for byte. `schedule` describes the full line.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from sparseflow.errors import FileFormatError


class LevelMode(IntEnum):
    """Storage of the coordinates of one level."""

    DENSE = 0
    """All coordinates; nothing is stored."""
    COMPRESSED = 1
    """The coordinates that occur, once under each parent."""
    COMPRESSED_NONUNIQUE = 2
    """One coordinate for each element below, with repetitions."""
    SINGLETON = 3
    """One coordinate for each parent."""
    SINGLETON_NONUNIQUE = 4
    """One coordinate for each parent; siblings may have equal coordinates."""
    DIAGONAL = 5
    """The diagonals of a block of rows that have elements; an addition to AutoSparse's modes."""
    SYMMETRIC = 6
    """The columns up to the diagonal that occur, of a symmetric matrix; an addition to AutoSparse's modes."""

    @property
    def unique(self) -> bool:
        """Whether siblings have distinct coordinates."""
        return self not in (LevelMode.COMPRESSED_NONUNIQUE, LevelMode.SINGLETON_NONUNIQUE)

    @property
    def singleton(self) -> bool:
        """Whether each parent has exactly one coordinate."""
        return self in (LevelMode.SINGLETON, LevelMode.SINGLETON_NONUNIQUE)

    @property
    def has_loop(self) -> bool:
        """Whether the level is traversed by a loop."""
        return not self.singleton


LEVEL_MODES = tuple(LevelMode)


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisSplit:
    """An axis and its parts: (sub axis, size), outermost first."""

    axis: str
    parts: tuple[tuple[str, int], ...]

    @classmethod
    def from_inner_size(cls, axis: str, extent: int, inner: int) -> AxisSplit:
        """Split an axis into blocks of `inner`, as many as cover `extent`."""
        return cls(axis=axis, parts=((f"{axis}0", -(-extent // inner)), (f"{axis}1", inner)))

    @property
    def inner_size(self) -> int:
        """Steps of the axis that one step of the outermost part covers: the product of the other sizes."""
        return math.prod(size for _, size in self.parts[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatLevel:
    """One storage level of a sparse tensor."""

    axis: str
    mode: LevelMode


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseFormat:
    """Storage format of a sparse tensor.

    Attributes:
        tensor: Tensor name.
        order: Sub axes, outermost level first.
        modes: Modes of the levels, in the order of the schedule line.
    """

    tensor: str
    order: tuple[str, ...]
    modes: tuple[FormatLevel, ...]

    def levels(self) -> tuple[FormatLevel, ...]:
        """Return the levels, outermost first."""
        by_axis = {level.axis: level for level in self.modes}
        return tuple(by_axis[axis] for axis in self.order)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleFields:
    """Parts of a schedule; `schedule.Schedule` adds the text form and the rules.

    Attributes:
        fsplit: Splits of sparse axes, in the order of the line.
        formats: Storage format of each sparse tensor.
        lsplit: Splits of dense axes.
        lreorder: Loops, outermost first.
        parallel: Loop that is distributed over threads.
        vectorize: Loop that is vectorized.
        unroll: Loop that is unrolled.
        unroll_factor: Unroll factor; 0 without `unroll`.
        threads: Number of threads.
        chunk: Iterations of the parallel loop that a thread takes at a time; see `rules.BALANCED` for 0.
    """

    fsplit: tuple[AxisSplit, ...]
    formats: tuple[SparseFormat, ...]
    lsplit: tuple[AxisSplit, ...]
    lreorder: tuple[str, ...]
    parallel: str | None
    vectorize: str | None
    unroll: str | None
    unroll_factor: int
    threads: int
    chunk: int

    @property
    def has_diagonals(self) -> bool:
        """Whether the storage has a level of diagonals."""
        return any(level.mode is LevelMode.DIAGONAL for level in self.formats[0].modes)

    @property
    def is_symmetric(self) -> bool:
        """Whether only the elements up to the diagonal are stored."""
        return any(level.mode is LevelMode.SYMMETRIC for level in self.formats[0].modes)

    def sub_axes(self, axis: str) -> tuple[tuple[str, int | None], ...]:
        """Return the parts of an axis and their sizes, outermost first.

        An axis that is not split is returned as its only part, with size None.
        """
        for split in self.fsplit + self.lsplit:
            if split.axis == axis:
                return split.parts
        return ((axis, None),)


def normalize_modes(modes: tuple[LevelMode, ...]) -> tuple[LevelMode, ...]:
    """Replace non-unique modes that make no difference by unique ones.

    Below a non-unique level every position has at most one element, and so has every position of the last
    level. There, a unique and a non-unique level are stored identically. A level stays non-unique if a
    singleton further down requires it (rule `singleton-parent`).

    Args:
        modes: Modes of the levels, outermost first.
    """
    normalized = list(modes)
    below_nonunique = single_element = False  # a non-unique level is above; without a dense level between
    for level, mode in enumerate(normalized):
        if mode.singleton:
            normalized[level] = LevelMode.SINGLETON
        elif mode is LevelMode.COMPRESSED_NONUNIQUE:
            if (
                single_element
                or level == len(normalized) - 1
                or (below_nonunique and not _singleton_follows(normalized[level + 1 :]))
            ):
                normalized[level] = LevelMode.COMPRESSED
            else:
                below_nonunique = single_element = True
        elif mode is LevelMode.DENSE:
            single_element = False
    return tuple(normalized)


def _singleton_follows(modes: list[LevelMode]) -> bool:
    """Whether a singleton comes before the next dense level."""
    for mode in modes:
        if mode is LevelMode.DENSE or mode.singleton:
            return mode.singleton
    return False


MAX_DIGITS = 18
"""Longest number that fits 64 bits."""

MAX_LINE_LENGTH = 10_000
"""Longest line; the time to check names grows with the square of their number."""

NONE_TOKEN = "None"
"""Token of an optional loop that is not set."""

_DECIMAL = re.compile(r"[0-9]{1,40}(\.[0-9]{1,40})?(e[+-]?[0-9]{1,4})?", re.ASCII | re.IGNORECASE)


class TokenReader:
    """Cursor over the tokens of one line.

    Every reading method raises `FileFormatError` if the next token is not what `expected` describes.
    """

    __slots__ = ("_position", "_tokens")

    def __init__(self, line: str) -> None:
        if len(line) > MAX_LINE_LENGTH:
            raise FileFormatError(
                f"schedule: the line has {len(line)} characters; expected at most {MAX_LINE_LENGTH}"
            )
        self._tokens = line.split(" ")
        self._position = 0

    def read_integer(self, expected: str, minimum: int = 0) -> int:
        """Read an integer of at least `minimum`."""
        token = self._advance(expected)
        if token.isdigit() and token.isascii() and len(token) <= MAX_DIGITS:
            value = int(token)
            if value >= minimum and (token[0] != "0" or token == "0"):
                return value
        bound = f" (a whole number of at least {minimum})" if minimum else " (a whole number)"
        self.fail(expected + bound)

    def read_name(self, expected: str) -> str:
        """Read an ASCII identifier."""
        token = self._advance(expected)
        if token.isidentifier() and token.isascii() and token != NONE_TOKEN:
            return token
        self.fail(expected)

    def read_optional_name(self, expected: str) -> str | None:
        """Read an identifier, or None for the token `None`."""
        if self._position < len(self._tokens) and self._tokens[self._position] == NONE_TOKEN:
            self._position += 1
            return None
        return self.read_name(f"{expected} or {NONE_TOKEN}")

    def read_decimal(self, expected: str) -> float:
        """Read a finite number above 0."""
        token = self._advance(expected)
        if _DECIMAL.fullmatch(token) and 0.0 < (value := float(token)) < math.inf:
            return value
        self.fail(f"{expected} (a finite number above 0)")

    def has_more(self) -> bool:
        """Whether tokens remain."""
        return self._position < len(self._tokens)

    def expect_end(self) -> None:
        """Fail if tokens remain."""
        if self.has_more():
            self._position += 1
            self.fail("the end of the line")

    def fail(self, expected: str) -> NoReturn:
        """Raise `FileFormatError` for the last token read."""
        index = self._position - 1
        received = "the end of the line"
        if index < len(self._tokens):
            received = (
                repr(self._tokens[index])
                if self._tokens[index]
                else "nothing (tokens are separated by one space)"
            )
        column = 1 + sum(len(token) + 1 for token in self._tokens[:index])
        raise FileFormatError(
            f"schedule, column {column} (token {index + 1}): expected {expected}, got {received}"
        )

    def _advance(self, expected: str) -> str:
        self._position += 1
        if self._position > len(self._tokens):
            self.fail(expected)
        return self._tokens[self._position - 1]


def read_splits(tokens: TokenReader, kind: str, split_axes: set[str]) -> tuple[AxisSplit, ...]:
    """Read a counted list of splits and add their axes to `split_axes`."""
    splits = []
    for _ in range(tokens.read_integer(f"the number of {kind} axes that are split")):
        axis = tokens.read_name(f"a {kind} axis that is split")
        if axis in split_axes or axis[-1].isdigit():
            tokens.fail("an axis that is not split yet, its name not ending in a digit")
        split_axes.add(axis)
        parts = []
        for number in range(tokens.read_integer(f"the number of parts of `{axis}`", 2)):
            part = f"{axis}{number}"
            if tokens.read_name(f"`{part}`") != part:
                tokens.fail(f"`{part}`")
            parts.append((part, tokens.read_integer("the size of the part")))
        splits.append(AxisSplit(axis=axis, parts=tuple(parts)))
    return tuple(splits)


def read_formats(tokens: TokenReader) -> tuple[SparseFormat, ...]:
    """Read the number of sparse tensors, their storage orders, then their modes."""
    count = tokens.read_integer("the number of sparse tensors", 1)
    orders: dict[str, tuple[str, ...]] = {}
    for _ in range(count):
        tensor = tokens.read_name("a sparse tensor")
        if tensor in orders:
            tokens.fail("a sparse tensor that is not listed yet")
        ndim = tokens.read_integer("the number of its levels", 1)
        orders[tensor] = read_names(tokens, ndim, "an axis of its storage")
    formats = []
    for tensor, order in orders.items():
        if tokens.read_name(f"`{tensor}`") != tensor:
            tokens.fail(f"`{tensor}`, the order of the storage orders")
        if tokens.read_integer("the number of its levels") != len(order):
            tokens.fail(f"{len(order)}, the number of levels in its storage order")
        remaining, modes = set(order), []
        for _ in order:
            axis = tokens.read_name("an axis of its storage")
            if axis not in remaining:
                tokens.fail(f"one of {', '.join(sorted(remaining))}, the levels without a mode")
            remaining.remove(axis)
            mode = tokens.read_integer("a mode")
            if mode >= len(LEVEL_MODES):
                tokens.fail(f"a mode from 0 to {len(LEVEL_MODES) - 1}")
            modes.append(FormatLevel(axis=axis, mode=LEVEL_MODES[mode]))
        formats.append(SparseFormat(tensor=tensor, order=order, modes=tuple(modes)))
    return tuple(formats)


def read_names(tokens: TokenReader, count: int, expected: str) -> tuple[str, ...]:
    """Read `count` distinct names."""
    names: list[str] = []
    for _ in range(count):
        name = tokens.read_name(expected)
        if name in names:
            tokens.fail(f"{expected} that is not listed yet")
        names.append(name)
    return tuple(names)
