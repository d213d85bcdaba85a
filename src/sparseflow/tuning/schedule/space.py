"""Search space of schedules: sampling, mutation and crossover.

A space contains canonical schedules (`Schedule.canonicalize`), so no two of its schedules run identically.
Every axis is unsplit or split in two with a power of two as inner size. The space contains every combination
of storage order, level modes, loop order, parallel loop, vectorized loop and unrolled loop that
`Schedule.find_violations` accepts, without symmetric storage, which few matrices allow. `choices` lists the
options.

Sampling makes one decision after the other. Each decision is sampled by weight from the options that the
previous decisions leave. The weights prefer parallel outermost rows, vectorized inner columns of 8 to 64, and
few and small dense levels, because most uniform samples are far slower than the best schedule. Every legal
schedule has a positive probability.

Mutation and crossover make the same decisions in the same order, but keep a parent's decision as long as it
is legal.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from sparseflow.core.checks import check_at_least
from sparseflow.tuning.schedule import choices
from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import AxisSplit, FormatLevel, LevelMode, SparseFormat
from sparseflow.tuning.schedule.rules import BALANCED
from sparseflow.tuning.schedule.schedule import Schedule

MAX_SPLIT = 1024
"""Default limit of inner sizes."""

_MAX_DRAWS = 8
"""Samples of one decision that may equal the parent's."""

_DecisionParents = Mapping[str, Schedule]
"""Decision -> schedule to keep it from; other decisions are sampled."""


class ScheduleSpace:
    """All schedules of one operator for one shape.

    Args:
        operator: Operator.
        shape: Extent of every axis.
        threads: Allowed numbers of threads. A schedule without a parallel loop uses one thread even if 1 is
            not listed; a parallel loop uses more than one.
        max_split: Largest inner size.

    Raises:
        InputError: `shape` does not fit the operator, `threads` is empty, or a number is below 1.
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
        check_at_least(1, threads=min(self.threads, default=0), max_split=max_split)
        self._inner_sizes = {
            axis: choices.list_inner_sizes(extent, max_split, axis in operator.dense_axes)
            for axis, extent in self.shape.items()
        }
        self._thread_options = tuple((count, 1.0) for count in self.threads if count > 1)
        self._decisions = (
            *(f"split {axis}" for axis in operator.axes),
            *("order", "modes", "loops", "parallel", "vectorize", "unroll", "threads", "chunk"),
        )

    def sample(self, rng: np.random.Generator) -> Schedule:
        """Sample a valid schedule by weight."""
        return self._build_schedule(rng, {})

    def mutate(self, schedule: Schedule, rng: np.random.Generator) -> Schedule:
        """Change one decision and what depends on it.

        Args:
            schedule: A valid schedule. Decisions from outside this space are kept until they are resampled.
            rng: Random generator.

        Returns:
            A different schedule; `schedule` in canonical form if the space has no other.

        Raises:
            InputError: `schedule` cannot run.
        """
        parent = schedule.canonicalize(self.operator, self.shape)
        for index in rng.permutation(len(self._decisions)):
            parents = dict.fromkeys(self._decisions, parent)
            del parents[self._decisions[index]]
            for _ in range(_MAX_DRAWS):
                child = self._build_schedule(rng, parents)
                if child != parent:
                    return child
        return parent

    def crossover(self, a: Schedule, b: Schedule, rng: np.random.Generator) -> Schedule:
        """Take each decision from one of two parents and sample the decisions that no longer fit.

        Raises:
            InputError: A parent cannot run.
        """
        pair = tuple(parent.canonicalize(self.operator, self.shape) for parent in (a, b))
        sides = rng.integers(2, size=len(self._decisions))
        return self._build_schedule(
            rng, {name: pair[side] for name, side in zip(self._decisions, sides, strict=True)}
        )

    def count_schedules(self) -> int:
        """Count the schedules exactly."""
        total = 0
        for unsplit_axes in itertools.product((True, False), repeat=len(self.operator.axes)):
            num_sizes = 1
            sub_axes = {}
            for axis, unsplit in zip(self.operator.axes, unsplit_axes, strict=True):
                num_sizes *= 1 if unsplit else len(self._inner_sizes[axis]) - 1
                sub_axes[axis] = (axis,) if unsplit else (f"{axis}0", f"{axis}1")
            if num_sizes:
                total += num_sizes * self._count_structures(sub_axes)
        return total

    def _build_schedule(self, rng: np.random.Generator, parents: _DecisionParents) -> Schedule:
        op = self.operator
        splits = {axis: self._choose_split(rng, axis, parents.get(f"split {axis}")) for axis in op.axes}
        parts = {
            axis: tuple(name for name, _ in split.parts) if split else (axis,)
            for axis, split in splits.items()
        }
        owner = {name: axis for axis, names in parts.items() for name in names}
        order = self._choose_order(rng, parts, parents.get("order"))
        mode = self._choose_modes(rng, order, owner, splits, parents.get("modes"))
        loops = self._choose_loops(rng, order, parts, parents.get("loops"))

        parallel = None
        if self._thread_options:
            legal = choices.list_parallel_loops(op, loops, owner, mode)
            parallel = _keep_or_sample(rng, legal, _inherit_role(parents.get("parallel"), "parallel", owner))
        legal = choices.list_vector_loops(op, loops, owner, mode, parallel)
        vectorize = _keep_or_sample(rng, legal, _inherit_role(parents.get("vectorize"), "vectorize", owner))
        legal = choices.list_unroll_options(loops, mode, (parallel, vectorize))
        unroll, factor = self._choose_unroll(rng, legal, owner, parents.get("unroll"))
        threads = chunk = 1
        if parallel is not None:
            threads = _keep_number(rng, parents.get("threads"), "threads", self._thread_options)
            options = choices.list_chunks(loops, parallel, order, mode)
            keep = parents.get("chunk")
            if keep is not None and keep.chunk == BALANCED and BALANCED not in dict(options):
                keep = None
            chunk = _keep_number(rng, keep, "chunk", options)

        modes = tuple(FormatLevel(axis=axis, mode=mode[axis]) for axis in order)
        return Schedule(
            fsplit=_collect_splits(splits, op.sparse_axes),
            formats=tuple(SparseFormat(tensor=name, order=order, modes=modes) for name in op.tensors),
            lsplit=_collect_splits(splits, op.dense_axes),
            lreorder=loops,
            parallel=parallel,
            vectorize=vectorize,
            unroll=unroll,
            unroll_factor=factor,
            threads=threads,
            chunk=chunk,
        )

    def _choose_split(self, rng: np.random.Generator, axis: str, keep: Schedule | None) -> AxisSplit | None:
        if keep is not None:
            return next((split for split in keep.fsplit + keep.lsplit if split.axis == axis), None)
        inner = choices.sample_option(rng, self._inner_sizes[axis])
        return None if inner is None else AxisSplit.from_inner_size(axis, self.shape[axis], inner)

    def _choose_order(
        self, rng: np.random.Generator, parts: Mapping[str, tuple[str, ...]], keep: Schedule | None
    ) -> tuple[str, ...]:
        if keep is not None:
            return _rename_loops(keep.formats[0].order, keep, parts)
        return choices.sample_option(
            rng, choices.list_storage_orders(tuple(parts[axis] for axis in self.operator.sparse_axes))
        )

    def _choose_modes(
        self,
        rng: np.random.Generator,
        order: tuple[str, ...],
        owner: Mapping[str, str],
        splits: Mapping[str, AxisSplit | None],
        keep: Schedule | None,
    ) -> dict[str, LevelMode]:
        if keep is not None:
            mode_of_axis = {level.axis: level.mode for level in keep.formats[0].modes}
            parent_modes = tuple(
                mode_of_axis.get(name, mode_of_axis[keep.sub_axes(owner[name])[0][0]]) for name in order
            )
            if parent_modes in choices.list_mode_sequences(self.operator, order):
                return dict(zip(order, parent_modes, strict=True))
        size = {axis: self.shape[axis] for axis in self.operator.sparse_axes}
        size |= {name: size for split in splits.values() if split for name, size in split.parts}
        legal = choices.list_weighted_modes(
            self.operator, order, [owner[name] for name in order], [size[name] for name in order]
        )
        return dict(zip(order, choices.sample_option(rng, legal), strict=True))

    def _choose_loops(
        self,
        rng: np.random.Generator,
        order: tuple[str, ...],
        parts: Mapping[str, tuple[str, ...]],
        keep: Schedule | None,
    ) -> tuple[str, ...]:
        if keep is not None:
            storage_loops = iter(order)
            return tuple(
                next(storage_loops) if name in order else name
                for name in _rename_loops(keep.lreorder, keep, parts)
            )
        return choices.sample_option(
            rng, choices.list_loop_orders(order, tuple(parts[axis] for axis in self.operator.dense_axes))
        )

    def _choose_unroll(
        self,
        rng: np.random.Generator,
        legal: choices.WeightedOptions[tuple[str | None, int]],
        owner: Mapping[str, str],
        keep: Schedule | None,
    ) -> tuple[str | None, int]:
        if keep is not None:
            (loop,) = _inherit_role(keep, "unroll", owner) or (None,)
            if any(loop == option for (option, _), _ in legal):
                return loop, keep.unroll_factor if loop is not None else 0
        return choices.sample_option(rng, legal)

    def _count_structures(self, parts: Mapping[str, tuple[str, ...]]) -> int:
        """Count the schedules with these sub axes, for fixed sizes."""
        op = self.operator
        owner = {name: axis for axis, names in parts.items() for name in names}
        dense = tuple(parts[axis] for axis in op.dense_axes)
        total = 0
        for order, _ in choices.list_storage_orders(tuple(parts[axis] for axis in op.sparse_axes)):
            for modes in choices.list_mode_sequences(op, order):
                mode = dict(zip(order, modes, strict=True))
                for loops, _ in choices.list_loop_orders(order, dense):
                    for parallel, _ in choices.list_parallel_loops(op, loops, owner, mode):
                        num_thread_options = 1
                        if parallel is not None:
                            num_chunks = len(choices.list_chunks(loops, parallel, order, mode))
                            num_thread_options = len(self._thread_options) * num_chunks
                        for vectorize, _ in (
                            choices.list_vector_loops(op, loops, owner, mode, parallel)
                            if num_thread_options
                            else ()
                        ):
                            total += num_thread_options * len(
                                choices.list_unroll_options(loops, mode, (parallel, vectorize))
                            )
        return total


def _rename_loops(
    names: tuple[str, ...], parent: Schedule, parts: Mapping[str, tuple[str, ...]]
) -> tuple[str, ...]:
    """Rename a parent's loops after new splits; new parts replace the outermost old part."""
    for axis, new in parts.items():
        old = tuple(name for name, _ in parent.sub_axes(axis))
        if old != new:
            names = tuple(
                sub_axis
                for name in names
                for sub_axis in (new if name == old[0] else () if name in old else (name,))
            )
    return names


def _inherit_role(parent: Schedule | None, role: str, owner: Mapping[str, str]) -> tuple[str | None] | None:
    """Return the parent's loop of a role under its current name as a 1-tuple, or None."""
    if parent is None:
        return None
    loop: str | None = getattr(parent, role)
    if loop is None or loop in owner:
        return (loop,)
    for axis in owner.values():
        names = [name for name, _ in parent.sub_axes(axis)]
        if loop in names:
            return (next(name for name, axis_name in owner.items() if axis_name == axis),)
    return None


def _keep_or_sample(
    rng: np.random.Generator, legal: choices.WeightedOptions[str | None], keep: tuple[str | None] | None
) -> str | None:
    if keep is not None and any(keep[0] == choice for choice, _ in legal):
        return keep[0]
    return choices.sample_option(rng, legal)


def _keep_number(
    rng: np.random.Generator, parent: Schedule | None, name: str, options: choices.WeightedOptions[int]
) -> int:
    """Return the number of a parallel parent, or sample it."""
    if parent is not None and parent.threads > 1:
        return getattr(parent, name)
    return choices.sample_option(rng, options)


def _collect_splits(splits: Mapping[str, AxisSplit | None], axes: tuple[str, ...]) -> tuple[AxisSplit, ...]:
    return tuple(split for axis in sorted(axes) if (split := splits[axis]) is not None)
