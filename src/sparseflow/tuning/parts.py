"""The parts of a schedule: splits of axes, and how sparse tensors are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum


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
