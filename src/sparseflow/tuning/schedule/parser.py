"""Reads the tokens of a schedule's line one by one, and says where one is not what it should be.

Numbers are plain decimals without sign or leading zeros and tokens stand one space apart, so that a line that
is read and written again keeps every byte.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

from sparseflow.errors import FileFormatError


class Mode(IntEnum):
    """How the coordinates of one level are stored."""

    DENSE = 0
    """All of them; nothing is stored."""
    COMPRESSED = 1
    """Those that occur, once under each parent."""
    COMPRESSED_NONUNIQUE = 2
    """One for every element below, repeated where elements share it."""
    SINGLETON = 3
    """The one that its parent has."""
    SINGLETON_NONUNIQUE = 4
    """The one that its parent has; siblings may repeat it."""

    @property
    def unique(self) -> bool:
        """Whether siblings differ."""
        return self not in (Mode.COMPRESSED_NONUNIQUE, Mode.SINGLETON_NONUNIQUE)

    @property
    def singleton(self) -> bool:
        """Whether it holds one coordinate a parent."""
        return self >= Mode.SINGLETON

    @property
    def has_loop(self) -> bool:
        """Whether there is anything to loop over."""
        return not self.singleton


MODES = tuple(Mode)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """An axis and the parts it is split into: (sub axis, size), outermost first."""

    axis: str
    parts: tuple[tuple[str, int], ...]

    @classmethod
    def in_two(cls, axis: str, extent: int, inner: int) -> Split:
        """An axis in blocks of `inner`, as many as cover it."""
        return cls(axis=axis, parts=((f"{axis}0", -(-extent // inner)), (f"{axis}1", inner)))

    @property
    def inner(self) -> int:
        """How much of the axis one step of the outermost part covers: the product of the other sizes."""
        return math.prod(size for _, size in self.parts[1:])


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """One level of a sparse tensor's storage."""

    axis: str
    mode: Mode


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseFormat:
    """How a sparse tensor is stored.

    Attributes:
        tensor: Its name.
        order: Its sub axes, outermost level first.
        modes: Their modes, in the order in which the line lists them.
    """

    tensor: str
    order: tuple[str, ...]
    modes: tuple[Level, ...]

    def levels(self) -> tuple[Level, ...]:
        """The levels, outermost first."""
        by_axis = {level.axis: level for level in self.modes}
        return tuple(by_axis[axis] for axis in self.order)


def plain_modes(modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
    """The modes, outermost level first, without the non-unique ones that make no difference.

    Below a non-unique level every position has one element at most, and so has every position of the last
    level: there, a level is stored alike whether it is unique or not. One stays non-unique if a singleton
    further down needs it (rule `singleton-parent`).
    """
    plain = list(modes)
    below = single = False  # a non-unique level is above; and nothing dense lies in between
    for at, mode in enumerate(plain):
        if mode.singleton:
            plain[at] = Mode.SINGLETON
        elif mode is Mode.COMPRESSED_NONUNIQUE:
            if single or at == len(plain) - 1 or (below and not _carries_singleton(plain[at + 1 :])):
                plain[at] = Mode.COMPRESSED
            else:
                below = single = True
        elif mode is Mode.DENSE:
            single = False
    return tuple(plain)


def _carries_singleton(modes: list[Mode]) -> bool:
    """Whether a singleton comes before the next dense level."""
    for mode in modes:
        if mode is Mode.DENSE or mode.singleton:
            return mode.singleton
    return False


MAX_DIGITS = 18
"""Longest number: what 64 bits can hold."""

NOTHING = "None"
"""Stands where a loop could be named and none is."""

_DECIMAL = re.compile(r"[0-9]{1,40}(\.[0-9]{1,40})?(e[+-]?[0-9]{1,4})?", re.ASCII | re.IGNORECASE)


class Tokens:
    """A cursor over the tokens of one line.

    Every method that takes a token raises `FileFormatError` when it is not what `expected` describes.
    """

    __slots__ = ("_at", "_tokens")

    def __init__(self, line: str) -> None:
        self._tokens = line.split(" ")
        self._at = 0

    def integer(self, expected: str, least: int = 0) -> int:
        """The next token, a number of at least `least`."""
        token = self._next(expected)
        if token.isdigit() and token.isascii() and len(token) <= MAX_DIGITS:
            value = int(token)
            if value >= least and (token[0] != "0" or token == "0"):
                return value
        bound = f" (a whole number of at least {least})" if least else " (a whole number)"
        self.refuse(expected + bound)

    def name(self, expected: str) -> str:
        """The next token, a name: letters, digits and underscores, and no digit first."""
        token = self._next(expected)
        if token.isidentifier() and token.isascii() and token != NOTHING:
            return token
        self.refuse(expected)

    def name_or_nothing(self, expected: str) -> str | None:
        """The next token, a name; None where it reads `None`."""
        if self._at < len(self._tokens) and self._tokens[self._at] == NOTHING:
            self._at += 1
            return None
        return self.name(f"{expected} or {NOTHING}")

    def decimal(self, expected: str) -> float:
        """The next token, a finite number above 0."""
        token = self._next(expected)
        if _DECIMAL.fullmatch(token) and 0.0 < (value := float(token)) < math.inf:
            return value
        self.refuse(f"{expected} (a finite number above 0)")

    def more(self) -> bool:
        """Whether a token is left."""
        return self._at < len(self._tokens)

    def end(self) -> None:
        """Refuses whatever is left."""
        if self.more():
            self._at += 1
            self.refuse("the end of the line")

    def refuse(self, expected: str) -> NoReturn:
        """Raises `FileFormatError` about the token that was taken last."""
        index = self._at - 1
        found = "the end of the line"
        if index < len(self._tokens):
            found = (
                repr(self._tokens[index]) if self._tokens[index] else "nothing (one space parts two tokens)"
            )
        column = 1 + sum(len(token) + 1 for token in self._tokens[:index])
        raise FileFormatError(
            f"schedule, column {column} (token {index + 1}): expected {expected}, found {found}"
        )

    def _next(self, expected: str) -> str:
        self._at += 1
        if self._at > len(self._tokens):
            self.refuse(expected)
        return self._tokens[self._at - 1]


def read_splits(tokens: Tokens, kind: str, seen: set[str]) -> tuple[Split, ...]:
    """A counted list of splits; `seen` are the axes split so far, and gains these."""
    splits = []
    for _ in range(tokens.integer(f"the number of {kind} axes that are split")):
        axis = tokens.name(f"a {kind} axis that is split")
        if axis in seen or axis[-1].isdigit():
            tokens.refuse("an axis that is not split yet, its name not ending in a digit")
        seen.add(axis)
        parts = []
        for number in range(tokens.integer(f"the number of parts of `{axis}`", 2)):
            part = f"{axis}{number}"
            if tokens.name(f"`{part}`") != part:
                tokens.refuse(f"`{part}`")
            parts.append((part, tokens.integer("the size of the part")))
        splits.append(Split(axis=axis, parts=tuple(parts)))
    return tuple(splits)


def read_formats(tokens: Tokens) -> tuple[SparseFormat, ...]:
    """The number of sparse tensors, the storage order of each and then the modes of each."""
    count = tokens.integer("the number of sparse tensors", 1)
    orders: dict[str, tuple[str, ...]] = {}
    for _ in range(count):
        tensor = tokens.name("a sparse tensor")
        if tensor in orders:
            tokens.refuse("a sparse tensor that is not named yet")
        ndim = tokens.integer("the number of its levels", 1)
        orders[tensor] = read_names(tokens, ndim, "an axis of its storage")
    formats = []
    for tensor, order in orders.items():
        if tokens.name(f"`{tensor}`") != tensor:
            tokens.refuse(f"`{tensor}`, as in the list of storage orders")
        if tokens.integer("the number of its levels") != len(order):
            tokens.refuse(f"{len(order)}, the number of levels in its storage order")
        left, modes = set(order), []
        for _ in order:
            axis = tokens.name("an axis of its storage")
            if axis not in left:
                tokens.refuse(f"one of {', '.join(sorted(left))}, the levels that have no mode yet")
            left.remove(axis)
            mode = tokens.integer("a mode")
            if mode >= len(MODES):
                tokens.refuse(f"a mode from 0 to {len(MODES) - 1}")
            modes.append(Level(axis=axis, mode=MODES[mode]))
        formats.append(SparseFormat(tensor=tensor, order=order, modes=tuple(modes)))
    return tuple(formats)


def read_names(tokens: Tokens, count: int, expected: str) -> tuple[str, ...]:
    """So many names that differ."""
    names: list[str] = []
    for _ in range(count):
        name = tokens.name(expected)
        if name in names:
            tokens.refuse(f"{expected} that is not named yet")
        names.append(name)
    return tuple(names)
