"""The schedules that a search may visit, and how it moves among them.

A space holds canonical schedules (`Schedule.canonical`), so that no two in it run the same: every axis whole
or split in two with an inner part that is a power of two, and then every storage order, level format, loop
order, parallel loop, vectorised loop and unrolled loop that `Schedule.problems` allows. `choices` lists them.

Sampling makes one decision after the other, each drawn by weight from what the earlier ones leave legal:
mostly rows outermost and shared by threads, 8 to 64 columns innermost and in vectors, few dense levels and
small ones; otherwise most samples would be far slower than the best. Whatever is legal is drawn in the end.

Mutation and crossover make the same decisions in the same order, but keep what a parent decided as long as it
is still legal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from sparseflow.errors import InputError
from sparseflow.tuning.schedule import choices
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import Level, Mode, SparseFormat, Split
from sparseflow.tuning.schedule.schedule import Schedule

MAX_SPLIT = 1024
"""Largest inner part by default."""

_TILE = 64
"""Columns whose sums fit vector registers: four vectors of 16 floats."""

_CHUNK = 16
"""Rows that a thread takes at a time in the default schedule."""

_TRIES = 8
"""Draws of one decision that may fall on what it was."""

_Parents = Mapping[str, Schedule]
"""Decision -> the schedule that it is kept from; what is not in here is drawn."""


class Space:
    """The schedules of one operator for one shape.

    Args:
        operator: What is scheduled.
        shape: Extent of every axis.
        threads: Numbers of threads that may be used. A schedule without a parallel loop uses one, whether or
            not 1 is among them; with a parallel loop only those above 1 are.
        max_split: The largest inner part of an axis.

    Raises:
        InputError: `shape` does not fit the operator, there are no `threads`, or a number is below 1.
    """

    def __init__(
        self,
        operator: Operator,
        shape: Mapping[str, int],
        threads: Iterable[int] = (1, 2),
        max_split: int = MAX_SPLIT,
    ) -> None:
        self.operator = operator
        self.shape = operator.extents(shape)
        self.threads = tuple(sorted(set(threads)))
        if not self.threads or self.threads[0] < 1:
            raise InputError(f"`threads` (={self.threads}) must be one number or more, each at least 1")
        if max_split < 1:
            raise InputError(f"`max_split` (={max_split}) must be at least 1; 1 leaves every axis whole")
        self._inner = {
            axis: choices.inner_sizes(extent, max_split, axis in operator.dense_axes)
            for axis, extent in self.shape.items()
        }
        self._shared = tuple((each, 1.0) for each in self.threads if each > 1)
        self._decisions = (
            *(f"split {axis}" for axis in operator.axes),
            *("order", "modes", "loops", "parallel", "vectorize", "unroll", "threads", "chunk"),
        )

    def sample(self, rng: np.random.Generator) -> Schedule:
        """A schedule that can run, drawn by weight."""
        return self._compose(rng, {})

    def mutate(self, schedule: Schedule, rng: np.random.Generator) -> Schedule:
        """A schedule that differs in one decision, and in what must follow from it.

        Args:
            schedule: Any that can run; what it has from outside of this space stays until it is drawn anew.
            rng: What is drawn from.

        Returns:
            Another schedule; `schedule` itself, canonical, if the space has no other.

        Raises:
            InputError: `schedule` cannot run.
        """
        parent = schedule.canonical(self.operator, self.shape)
        for at in rng.permutation(len(self._decisions)):
            parents = dict.fromkeys(self._decisions, parent)
            del parents[self._decisions[at]]
            for _ in range(_TRIES):
                child = self._compose(rng, parents)
                if child != parent:
                    return child
        return parent

    def crossover(self, a: Schedule, b: Schedule, rng: np.random.Generator) -> Schedule:
        """A schedule that keeps each decision from one of two parents, and draws what no longer fits.

        Raises:
            InputError: A parent cannot run.
        """
        pair = tuple(parent.canonical(self.operator, self.shape) for parent in (a, b))
        sides = rng.integers(2, size=len(self._decisions))
        return self._compose(
            rng, {name: pair[side] for name, side in zip(self._decisions, sides, strict=True)}
        )

    def size(self) -> int:
        """How many schedules there are, exactly."""
        total = 0
        for whole in itertools.product((True, False), repeat=len(self.operator.axes)):
            sizes = 1
            parts = {}
            for axis, unsplit in zip(self.operator.axes, whole, strict=True):
                sizes *= 1 if unsplit else len(self._inner[axis]) - 1
                parts[axis] = (axis,) if unsplit else (f"{axis}0", f"{axis}1")
            if sizes:
                total += sizes * self._structures(parts)
        return total

    def default(self) -> Schedule:
        """CSR, rows shared by threads, the innermost loop vectorised, the output's columns in tiles."""
        op = self.operator
        rows, cols = op.sparse_axes
        modes = (Level(axis=rows, mode=Mode.DENSE), Level(axis=cols, mode=Mode.COMPRESSED))
        lsplit, loops = (), (rows, cols)
        for axis in op.dense_axes:
            tiles = [size for size, _ in self._inner[axis] if size is not None and size <= _TILE]
            if axis in op.output_axes and self.shape[axis] > _TILE and tiles:
                lsplit = (self._split(axis, max(tiles)),)
                loops = (rows, f"{axis}0", cols, f"{axis}1")
            else:
                loops = (rows, cols, axis)
        shared = bool(self._shared)
        return Schedule(
            fsplit=(),
            formats=tuple(SparseFormat(tensor=name, order=(rows, cols), modes=modes) for name in op.tensors),
            lsplit=lsplit,
            lreorder=loops,
            parallel=rows if shared else None,
            vectorize=loops[-1],
            unroll=None,
            unroll_factor=0,
            threads=self.threads[-1],
            chunk=_CHUNK if shared else 1,
        ).checked(op, self.shape)

    def _compose(self, rng: np.random.Generator, parents: _Parents) -> Schedule:
        op = self.operator
        splits = {axis: self._split_of(rng, axis, parents.get(f"split {axis}")) for axis in op.axes}
        parts = {
            axis: tuple(name for name, _ in split.parts) if split else (axis,)
            for axis, split in splits.items()
        }
        owner = {name: axis for axis, names in parts.items() for name in names}
        order = self._order(rng, parts, parents.get("order"))
        mode = self._modes(rng, order, owner, splits, parents.get("modes"))
        loops = self._loops(rng, order, parts, parents.get("loops"))

        parallel = None
        if self._shared:
            legal = choices.parallel_loops(op, loops, owner, mode)
            parallel = _kept_or_drawn(rng, legal, _role(parents.get("parallel"), "parallel", owner))
        legal = choices.vector_loops(op, loops, owner, mode, parallel)
        vectorize = _kept_or_drawn(rng, legal, _role(parents.get("vectorize"), "vectorize", owner))
        legal = choices.unrolled_loops(loops, mode, (parallel, vectorize))
        unroll, factor = self._unroll(rng, legal, owner, parents.get("unroll"))
        threads = chunk = 1
        if parallel is not None:
            keep = parents.get("threads")
            threads = keep.threads if keep and keep.threads > 1 else choices.pick(rng, self._shared)
            keep = parents.get("chunk")
            chunk = keep.chunk if keep and keep.threads > 1 else choices.pick(rng, choices.chunks())

        modes = tuple(Level(axis=axis, mode=mode[axis]) for axis in order)
        return Schedule(
            fsplit=_present(splits, op.sparse_axes),
            formats=tuple(SparseFormat(tensor=name, order=order, modes=modes) for name in op.tensors),
            lsplit=_present(splits, op.dense_axes),
            lreorder=loops,
            parallel=parallel,
            vectorize=vectorize,
            unroll=unroll,
            unroll_factor=factor,
            threads=threads,
            chunk=chunk,
        )

    def _split(self, axis: str, inner: int) -> Split:
        return Split.in_two(axis, self.shape[axis], inner)

    def _split_of(self, rng: np.random.Generator, axis: str, keep: Schedule | None) -> Split | None:
        if keep is not None:
            return next((split for split in keep.fsplit + keep.lsplit if split.axis == axis), None)
        inner = choices.pick(rng, self._inner[axis])
        return None if inner is None else self._split(axis, inner)

    def _order(
        self, rng: np.random.Generator, parts: Mapping[str, tuple[str, ...]], keep: Schedule | None
    ) -> tuple[str, ...]:
        if keep is not None:
            return _renamed(keep.formats[0].order, keep, parts)
        return choices.pick(
            rng, choices.storage_orders(tuple(parts[axis] for axis in self.operator.sparse_axes))
        )

    def _modes(
        self,
        rng: np.random.Generator,
        order: tuple[str, ...],
        owner: Mapping[str, str],
        splits: Mapping[str, Split | None],
        keep: Schedule | None,
    ) -> dict[str, Mode]:
        if keep is not None:
            had = {level.axis: level.mode for level in keep.formats[0].modes}
            kept = tuple(had.get(name, had[keep.sub_axes(owner[name])[0][0]]) for name in order)
            if kept in choices.mode_sequences(len(order)):
                return dict(zip(order, kept, strict=True))
        size = {axis: self.shape[axis] for axis in self.operator.sparse_axes}
        size |= {name: size for split in splits.values() if split for name, size in split.parts}
        legal = choices.modes([owner[name] for name in order], [size[name] for name in order])
        return dict(zip(order, choices.pick(rng, legal), strict=True))

    def _loops(
        self,
        rng: np.random.Generator,
        order: tuple[str, ...],
        parts: Mapping[str, tuple[str, ...]],
        keep: Schedule | None,
    ) -> tuple[str, ...]:
        if keep is not None:
            walk = iter(order)
            return tuple(
                next(walk) if name in order else name for name in _renamed(keep.lreorder, keep, parts)
            )
        return choices.pick(
            rng, choices.loop_orders(order, tuple(parts[axis] for axis in self.operator.dense_axes))
        )

    def _unroll(
        self,
        rng: np.random.Generator,
        legal: choices.Weighted[tuple[str | None, int]],
        owner: Mapping[str, str],
        keep: Schedule | None,
    ) -> tuple[str | None, int]:
        if keep is not None:
            (loop,) = _role(keep, "unroll", owner) or (None,)
            if any(loop == each for (each, _), _ in legal):
                return loop, keep.unroll_factor if loop is not None else 0
        return choices.pick(rng, legal)

    def _structures(self, parts: Mapping[str, tuple[str, ...]]) -> int:
        """Schedules with given parts, whatever their sizes."""
        op = self.operator
        owner = {name: axis for axis, names in parts.items() for name in names}
        dense = tuple(parts[axis] for axis in op.dense_axes)
        shared = len(self._shared) * len(choices.chunks())
        total = 0
        for order, _ in choices.storage_orders(tuple(parts[axis] for axis in op.sparse_axes)):
            for modes in choices.mode_sequences(len(order)):
                mode = dict(zip(order, modes, strict=True))
                for loops, _ in choices.loop_orders(order, dense):
                    for parallel, _ in choices.parallel_loops(op, loops, owner, mode):
                        ways = 1 if parallel is None else shared
                        for vectorize, _ in (
                            choices.vector_loops(op, loops, owner, mode, parallel) if ways else ()
                        ):
                            total += ways * len(choices.unrolled_loops(loops, mode, (parallel, vectorize)))
        return total


def _renamed(
    names: tuple[str, ...], parent: Schedule, parts: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Names of a parent's loops after other splits: new parts go where the outermost old one was."""
    for axis, new in parts.items():
        old = tuple(name for name, _ in parent.sub_axes(axis))
        if old != new:
            names = tuple(
                each for name in names for each in (new if name == old[0] else () if name in old else (name,))
            )
    return names


def _role(parent: Schedule | None, role: str, owner: Mapping[str, str]) -> tuple[str | None] | None:
    """The loop a parent gives a role, under the name it has now; None where there is nothing to keep."""
    if parent is None:
        return None
    loop: str | None = getattr(parent, role)
    if loop is None or loop in owner:
        return (loop,)
    for axis in owner.values():
        names = [name for name, _ in parent.sub_axes(axis)]
        if loop in names:
            return (next(name for name, of in owner.items() if of == axis),)
    return None


def _kept_or_drawn(
    rng: np.random.Generator, legal: choices.Weighted[str | None], keep: tuple[str | None] | None
) -> str | None:
    if keep is not None and any(keep[0] == choice for choice, _ in legal):
        return keep[0]
    return choices.pick(rng, legal)


def _present(splits: Mapping[str, Split | None], axes: tuple[str, ...]) -> tuple[Split, ...]:
    return tuple(split for axis in sorted(axes) if (split := splits[axis]) is not None)
