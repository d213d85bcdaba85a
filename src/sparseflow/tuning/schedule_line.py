"""Reads the parts of a schedule's line, and refuses what breaks its grammar; `schedule` shows the line."""

from __future__ import annotations

from sparseflow.tuning.parts import MODES, Level, SparseFormat, Split
from sparseflow.tuning.tokens import Tokens


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
