"""What a schedule must keep to so that it can run: each rule is a function, each breach a sentence.

A sentence starts with its rule's short name, which stays as it is: tables count by it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import Mode

if TYPE_CHECKING:
    from sparseflow.tuning.schedule.schedule import Schedule

LARGEST = 2**31 - 1
"""Coordinates and sizes are 32 bits wide."""

CHUNKS = tuple(2**power for power in range(10))
"""Iterations of the parallel loop that may be handed out at a time."""


def problems(schedule: Schedule, operator: Operator, shape: Mapping[str, int] | None = None) -> list[str]:
    """Why `schedule` cannot run; `Schedule.problems` tells more.

    Other rules only make sense once the names fit: as long as they do not, nothing else is reported.
    """
    extents = None if shape is None else operator.extents(shape)
    names = [*_tensors(schedule, operator), *_splits(schedule, operator)]
    names = names or [*_axes(schedule, operator), *_roles(schedule)]
    return names or [
        *_formats(schedule),
        *_numbers(schedule),
        *_order(schedule, operator),
        *_singletons(schedule),
        *_parallel(schedule, operator),
        *_loops(schedule, operator),
        *_dense_parts(schedule, extents),
    ]


def _tensors(schedule: Schedule, operator: Operator) -> Iterator[str]:
    found = tuple(each.tensor for each in schedule.formats)
    if sorted(found) != sorted(operator.tensors):
        yield f"tensors: the schedule stores {_listed(found)}; expected {_listed(operator.tensors)}"
    for each in schedule.formats:
        if sorted(each.order) != sorted(level.axis for level in each.modes):
            yield f"mode-axes: the modes of {each.tensor} are not of the axes that it is stored by"


def _splits(schedule: Schedule, operator: Operator) -> Iterator[str]:
    for kind, splits, axes in (
        ("fsplit", schedule.fsplit, operator.sparse_axes),
        ("lsplit", schedule.lsplit, operator.dense_axes),
    ):
        for split in splits:
            if split.axis not in axes:
                yield f"split-axis: {kind} names {split.axis}; it may split {_listed(axes)}"
            expected = tuple(f"{split.axis}{number}" for number in range(max(len(split.parts), 2)))
            if tuple(part for part, _ in split.parts) != expected:
                yield f"part-names: the parts of {split.axis} must be at least two: {_listed(expected)}"
    for axis, times in Counter(split.axis for split in schedule.fsplit + schedule.lsplit).items():
        if times > 1:
            yield f"split-twice: axis {axis} is split {times} times"


def _axes(schedule: Schedule, operator: Operator) -> Iterator[str]:
    sparse = [part for axis in operator.sparse_axes for part, _ in schedule.sub_axes(axis)]
    for each in schedule.formats:
        if sorted(each.order) != sorted(sparse):
            yield f"storage-axes: {each.tensor} is stored by {_listed(each.order)}; it has {_listed(sparse)}"
    loops = [part for axis in operator.axes for part, _ in schedule.sub_axes(axis)]
    if sorted(schedule.lreorder) != sorted(loops):
        yield f"loop-axes: the loops are {_listed(schedule.lreorder)}; expected an order of {_listed(loops)}"


def _roles(schedule: Schedule) -> Iterator[str]:
    roles = {
        "parallel": schedule.parallel,
        "vectorize": schedule.vectorize,
        "unroll": schedule.unroll,
    }
    for role, loop in roles.items():
        if loop is not None and loop not in schedule.lreorder:
            yield f"unknown-loop: {role} names {loop}, which is none of {_listed(schedule.lreorder)}"
    for loop, times in Counter(loop for loop in roles.values() if loop is not None).items():
        if times > 1:
            named = " and ".join(role for role, other in roles.items() if other == loop)
            yield f"same-loop: {named} name the same loop, {loop}"


def _formats(schedule: Schedule) -> Iterator[str]:
    first, *others = schedule.formats
    for other in others:
        if other.levels() != first.levels():
            yield f"format-differs: {other.tensor} must be stored as {first.tensor} is, whose pattern it has"


def _numbers(schedule: Schedule) -> Iterator[str]:
    for split in schedule.fsplit + schedule.lsplit:
        sizes = [size for _, size in split.parts]
        if min(sizes) < 1 or max(sizes[0], math.prod(sizes[1:])) > LARGEST:
            yield f"size: the parts of {split.axis} are {_listed(sizes)}; expected 1 to {LARGEST} in all"
    if schedule.threads < 1:
        yield f"threads: {schedule.threads} threads; expected at least 1"
    if schedule.chunk not in CHUNKS:
        yield f"chunk: {schedule.chunk}; expected a power of two from 1 to {CHUNKS[-1]}"
    if (schedule.unroll is None) != (schedule.unroll_factor == 0) or not (
        0 <= schedule.unroll_factor <= LARGEST
    ):
        yield (
            f"unroll-factor: {schedule.unroll_factor} with {schedule.unroll or 'no'} loop unrolled; "
            "expected 0 without such a loop and at least 1 with one"
        )


def _order(schedule: Schedule, operator: Operator) -> Iterator[str]:
    order = schedule.formats[0].order
    walked = tuple(loop for loop in schedule.lreorder if loop in order)
    if walked != order:
        yield f"storage-order: stored by {_listed(order)}, looped over by {_listed(walked)}; they must agree"
    place = {loop: at for at, loop in enumerate(schedule.lreorder)}
    for axis in operator.axes:
        parts = [part for part, _ in schedule.sub_axes(axis)]
        if parts != sorted(parts, key=place.__getitem__):
            yield f"sub-order: the loops of {axis} must stand in the order {_listed(parts)}"


def _singletons(schedule: Schedule) -> Iterator[str]:
    levels = schedule.formats[0].levels()
    for at in dangling_singletons(tuple(level.mode for level in levels)):
        yield (
            f"singleton-parent: {levels[at].axis} is a singleton; above it a non-unique level is needed, "
            "with compressed or singleton levels only between the two"
        )


def dangling_singletons(modes: tuple[Mode, ...]) -> list[int]:
    """Singleton levels above which positions are not sure to hold one element each.

    A singleton has one coordinate a parent, so the parent must hold one element. A non-unique level makes it
    so, and compressed levels below keep it; a dense level has positions without an element.
    """
    found, single = [], False
    for at, mode in enumerate(modes):
        if mode.singleton and not single:
            found.append(at)
        single = not mode.unique or (single and mode is not Mode.DENSE)
    return found


def _parallel(schedule: Schedule, operator: Operator) -> Iterator[str]:
    loop = schedule.parallel
    if loop is None:
        return
    axis = next(axis for axis in operator.axes if loop in dict(schedule.sub_axes(axis)))
    if axis not in (operator.sparse_axes if operator.sparse_output else operator.output_axes):
        yield f"parallel-reduction: {loop} is summed over, and threads would add to the same elements"
    elif not operator.sparse_output:
        for level in schedule.formats[0].levels():
            if level.axis == loop and not level.mode.unique:
                yield f"parallel-shared: {loop} is not unique, and threads would add to the same elements"


def _loops(schedule: Schedule, operator: Operator) -> Iterator[str]:
    looped = {level.axis: level.mode.has_loop for level in schedule.formats[0].levels()}
    for role, loop in (
        ("parallel", schedule.parallel),
        ("vectorize", schedule.vectorize),
        ("unroll", schedule.unroll),
    ):
        if loop is not None and not looped.get(loop, True):
            yield f"{role}-singleton: {loop} is a singleton and has no loop"
    if schedule.vectorize not in (None, schedule.lreorder[-1], row_lanes(schedule, operator)):
        yield (
            f"vectorize-inner: {schedule.vectorize} is neither the innermost loop, {schedule.lreorder[-1]}, "
            "nor a dense one over neighbouring results right above a compressed innermost one"
        )


def row_lanes(schedule: Schedule, operator: Operator) -> str | None:
    """The loop, if there is one, whose steps may run side by side although another one is innermost.

    Its steps are neighbouring results, and the innermost loop, which is compressed, sums: each lane of a
    vector then walks a group of its own.
    """
    modes = {level.axis: level.mode for level in schedule.formats[0].levels()}
    inner, size = schedule.sub_axes(operator.output_axes[-1])[-1]
    return lanes_loop(operator, schedule.lreorder, inner, modes) if size and size % 2 == 0 else None


def lanes_loop(operator: Operator, loops: Sequence[str], inner: str, modes: Mapping[str, Mode]) -> str | None:
    """What `row_lanes` tells, before there is a schedule.

    Args:
        operator: What is computed.
        loops: All loops, outermost first.
        inner: The innermost part of the last axis of the output, of an even size.
        modes: Mode of each level.
    """
    if operator.sparse_output or operator.dense_axes or loops[-2] != inner or inner in operator.axes:
        return None
    walked = modes[loops[-1]]
    sums = walked in (Mode.COMPRESSED, Mode.COMPRESSED_NONUNIQUE)
    return inner if sums and modes[inner] is Mode.DENSE else None


def _dense_parts(schedule: Schedule, extents: Mapping[str, int] | None) -> Iterator[str]:
    """With two parts the last block is cut short; with more, no single bound would do that."""
    for split in schedule.lsplit:
        if len(split.parts) > 2 and (extents is None or extents[split.axis] % split.inner):
            yield (
                f"dense-parts: {split.axis} has {len(split.parts)} parts; expected at most 2, or an extent "
                f"that the product of the inner ones (={split.inner}) divides"
            )


def _listed(items: tuple[object, ...] | list[str] | list[int]) -> str:
    return " ".join(map(str, items)) or "nothing"
