"""Validity rules of schedules.

Each rule is a function that yields one message for each violation. A message starts with the short name of
the rule. The short names are stable: tables count violations by them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sparseflow.tuning.schedule.operators import Operator
from sparseflow.tuning.schedule.parser import FormatLevel, LevelMode, ScheduleFields

MAX_SIZE = 2**31 - 1
"""Largest size and coordinate: 32 bits."""

CHUNK_SIZES = tuple(2**power for power in range(10))
"""Iterations of the parallel loop that a thread may take at a time."""

BALANCED = 0
"""Chunk of a schedule whose threads take one range of iterations each, with equal numbers of elements."""


DIAGONAL_MODES = (LevelMode.DENSE, LevelMode.DIAGONAL, LevelMode.DENSE)
"""Modes of a format with diagonals: blocks of rows, their diagonals, the rows of a block."""

SYMMETRIC_MODES = (LevelMode.DENSE, LevelMode.SYMMETRIC)
"""Modes of the format of symmetric matrices: rows, and their columns up to the diagonal."""


def find_violations(
    schedule: ScheduleFields, operator: Operator, shape: Mapping[str, int] | None = None
) -> list[str]:
    """List the violations of a schedule; see `Schedule.find_violations`.

    If names do not match, only the violations of names are reported, because the other rules require matching
    names.
    """
    extents = None if shape is None else operator.extents(shape)
    name_violations = [*_check_tensors(schedule, operator), *_check_splits(schedule, operator)]
    name_violations = name_violations or [*_check_axes(schedule, operator), *_check_roles(schedule)]
    return name_violations or [
        *_check_formats(schedule),
        *_check_sizes(schedule),
        *_check_order(schedule, operator),
        *_check_singletons(schedule),
        *_check_diagonals(schedule, operator),
        *_check_symmetry(schedule, operator, extents),
        *_check_parallel(schedule, operator),
        *_check_loops(schedule, operator),
        *_check_dense_parts(schedule, extents),
    ]


def _check_tensors(schedule: ScheduleFields, operator: Operator) -> Iterator[str]:
    tensors = tuple(sparse_format.tensor for sparse_format in schedule.formats)
    if sorted(tensors) != sorted(operator.tensors):
        yield f"tensors: {_format_list(tensors)}; expected {_format_list(operator.tensors)}"
    for sparse_format in schedule.formats:
        if sorted(sparse_format.order) != sorted(level.axis for level in sparse_format.modes):
            yield f"mode-axes: modes and storage order of {sparse_format.tensor} have different axes"


def _check_splits(schedule: ScheduleFields, operator: Operator) -> Iterator[str]:
    for kind, splits, axes in (
        ("fsplit", schedule.fsplit, operator.sparse_axes),
        ("lsplit", schedule.lsplit, operator.dense_axes),
    ):
        for split in splits:
            if split.axis not in axes:
                yield f"split-axis: {kind} splits {split.axis}; it can split {_format_list(axes)}"
            expected = tuple(f"{split.axis}{number}" for number in range(max(len(split.parts), 2)))
            if tuple(part for part, _ in split.parts) != expected:
                yield f"part-names: {split.axis} needs at least two parts: {_format_list(expected)}"
    for axis, times in Counter(split.axis for split in schedule.fsplit + schedule.lsplit).items():
        if times > 1:
            yield f"split-twice: axis {axis} is split {times} times"


def _check_axes(schedule: ScheduleFields, operator: Operator) -> Iterator[str]:
    sparse = [part for axis in operator.sparse_axes for part, _ in schedule.sub_axes(axis)]
    for sparse_format in schedule.formats:
        if sorted(sparse_format.order) != sorted(sparse):
            yield (
                f"storage-axes: {sparse_format.tensor} is stored by {_format_list(sparse_format.order)}; "
                f"expected an order of {_format_list(sparse)}"
            )
    loops = [part for axis in operator.axes for part, _ in schedule.sub_axes(axis)]
    if sorted(schedule.lreorder) != sorted(loops):
        yield (
            f"loop-axes: the loops are {_format_list(schedule.lreorder)}; "
            f"expected an order of {_format_list(loops)}"
        )


def _check_roles(schedule: ScheduleFields) -> Iterator[str]:
    roles = {
        "parallel": schedule.parallel,
        "vectorize": schedule.vectorize,
        "unroll": schedule.unroll,
    }
    for role, loop in roles.items():
        if loop is not None and loop not in schedule.lreorder:
            yield f"unknown-loop: {role} is {loop}; expected one of {_format_list(schedule.lreorder)}"
    for loop, times in Counter(loop for loop in roles.values() if loop is not None).items():
        if times > 1:
            names = " and ".join(role for role, other in roles.items() if other == loop)
            yield f"same-loop: {names} have the same loop, {loop}"


def _check_formats(schedule: ScheduleFields) -> Iterator[str]:
    first, *other_formats = schedule.formats
    for other in other_formats:
        if other.levels() != first.levels():
            yield f"format-differs: {other.tensor} has the pattern of {first.tensor} and must have its format"


def _check_sizes(schedule: ScheduleFields) -> Iterator[str]:
    for split in schedule.fsplit + schedule.lsplit:
        sizes = [size for _, size in split.parts]
        if min(sizes) < 1 or max(sizes[0], math.prod(sizes[1:])) > MAX_SIZE:
            yield f"size: parts of {split.axis} are {_format_list(sizes)}; expected at most {MAX_SIZE} in all"
    if schedule.threads < 1:
        yield f"threads: {schedule.threads} threads; expected at least 1"
    if schedule.chunk not in (BALANCED, *CHUNK_SIZES):
        yield (
            f"chunk: {schedule.chunk}; expected a power of two from 1 to {CHUNK_SIZES[-1]}, or {BALANCED} "
            "for ranges with equal numbers of elements"
        )
    if (schedule.unroll is None) != (schedule.unroll_factor == 0) or not (
        0 <= schedule.unroll_factor <= MAX_SIZE
    ):
        yield (
            f"unroll-factor: {schedule.unroll_factor} with unrolled loop {schedule.unroll}; "
            "expected 0 without a loop and at least 1 with a loop"
        )


def _check_order(schedule: ScheduleFields, operator: Operator) -> Iterator[str]:
    order = schedule.formats[0].order
    loop_order = tuple(loop for loop in schedule.lreorder if loop in order)
    if loop_order != order:
        yield (
            f"storage-order: the storage order is {_format_list(order)} and the loop order "
            f"{_format_list(loop_order)}; they must be equal"
        )
    position = {loop: index for index, loop in enumerate(schedule.lreorder)}
    for axis in operator.axes:
        parts = [part for part, _ in schedule.sub_axes(axis)]
        if parts != sorted(parts, key=position.__getitem__):
            yield f"sub-order: the loops of {axis} must have the order {_format_list(parts)}"


def _check_singletons(schedule: ScheduleFields) -> Iterator[str]:
    levels = schedule.formats[0].levels()
    for index in find_dangling_singletons(tuple(level.mode for level in levels)):
        yield (
            f"singleton-parent: {levels[index].axis} is a singleton; it needs a non-unique level above, "
            "with only compressed or singleton levels between"
        )


def _check_diagonals(schedule: ScheduleFields, operator: Operator) -> Iterator[str]:
    modes = tuple(level.mode for level in schedule.formats[0].levels())
    order = schedule.formats[0].order
    if LevelMode.DIAGONAL in modes and not (allows_diagonals(operator, order) and modes == DIAGONAL_MODES):
        rows, cols = operator.sparse_axes
        yield (
            f"diagonal: the levels are {_format_list(order)} with modes {_format_list(modes)}; diagonals "
            f"need a dense output and the levels {rows}0 {cols} {rows}1 "
            f"with modes {_format_list(DIAGONAL_MODES)}"
        )


def _check_symmetry(
    schedule: ScheduleFields, operator: Operator, extents: Mapping[str, int] | None
) -> Iterator[str]:
    if not schedule.is_symmetric:
        return
    modes = tuple(level.mode for level in schedule.formats[0].levels())
    rows, cols = operator.sparse_axes
    if operator.name != "spmv" or schedule.formats[0].order != (rows, cols) or modes != SYMMETRIC_MODES:
        yield (
            f"symmetric: the modes are {_format_list(modes)} in {operator.name}; symmetric storage needs "
            f"spmv and the levels {rows} {cols} with modes {_format_list(SYMMETRIC_MODES)}"
        )
    if schedule.parallel not in (None, rows) or (schedule.parallel and schedule.chunk != BALANCED):
        yield (
            f"symmetric-parallel: threads share the loop {schedule.parallel} with chunk {schedule.chunk}; "
            f"threads that share a symmetric matrix need the loop {rows} with chunk {BALANCED}"
        )
    if (schedule.vectorize, schedule.unroll) != (None, None):
        yield "symmetric-loops: the loops of a symmetric matrix cannot be vectorized or unrolled"
    if extents is not None and extents[rows] != extents[cols]:
        yield f"symmetric-shape: the matrix has {extents[rows]} rows and {extents[cols]} columns"


def allows_diagonals(operator: Operator, order: Sequence[str]) -> bool:
    """Return whether levels in this order, outermost first, can have `DIAGONAL_MODES`."""
    rows, cols = operator.sparse_axes
    return not operator.sparse_output and tuple(order) == (f"{rows}0", cols, f"{rows}1")


def find_dangling_singletons(modes: tuple[LevelMode, ...]) -> list[int]:
    """Return the singleton levels whose parents may hold several elements.

    A singleton has one coordinate for each parent, so each parent must hold one element. A non-unique level
    ensures this, and compressed levels below it keep it. A dense level has positions without an element.
    """
    dangling, single_element = [], False
    for index, mode in enumerate(modes):
        if mode.singleton and not single_element:
            dangling.append(index)
        single_element = not mode.unique or (single_element and mode is not LevelMode.DENSE)
    return dangling


def _check_parallel(schedule: ScheduleFields, operator: Operator) -> Iterator[str]:
    loop = schedule.parallel
    if loop is None:
        return
    axis = next(axis for axis in operator.axes if loop in dict(schedule.sub_axes(axis)))
    if axis not in (operator.sparse_axes if operator.sparse_output else operator.output_axes):
        yield f"parallel-reduction: {loop} is summed over; threads would race on results"
    elif not operator.sparse_output:
        for level in schedule.formats[0].levels():
            if level.axis == loop and not level.mode.unique:
                yield f"parallel-shared: {loop} is not unique; threads would race on results"
    levels = schedule.formats[0].levels()
    if schedule.chunk == BALANCED and not allows_balance(schedule.lreorder, loop, levels):
        yield (
            f"balance: chunk {BALANCED} divides the elements below {loop}, which must be the outermost loop "
            "and a dense storage level"
        )


def allows_balance(loops: Sequence[str], parallel: str, levels: Sequence[FormatLevel]) -> bool:
    """Return whether threads can take ranges of a parallel loop with equal numbers of elements."""
    return loops[0] == parallel == levels[0].axis and levels[0].mode is LevelMode.DENSE


def _check_loops(schedule: ScheduleFields, operator: Operator) -> Iterator[str]:
    has_loop = {level.axis: level.mode.has_loop for level in schedule.formats[0].levels()}
    for role, loop in (
        ("parallel", schedule.parallel),
        ("vectorize", schedule.vectorize),
        ("unroll", schedule.unroll),
    ):
        if loop is not None and not has_loop.get(loop, True):
            yield f"{role}-singleton: {loop} is a singleton and has no loop"
    if schedule.vectorize not in (None, schedule.lreorder[-1], find_lane_loop(schedule, operator)):
        yield (
            f"vectorize-inner: {schedule.vectorize} is neither the innermost loop ({schedule.lreorder[-1]}) "
            "nor a dense loop over adjacent results directly above a compressed innermost loop"
        )


def find_lane_loop(schedule: ScheduleFields, operator: Operator) -> str | None:
    """Return the loop that may be vectorized above the innermost loop, or None.

    Its steps are adjacent results, and the innermost loop is compressed and sums. Each vector lane then
    traverses its own group.
    """
    modes = {level.axis: level.mode for level in schedule.formats[0].levels()}
    inner, size = schedule.sub_axes(operator.output_axes[-1])[-1]
    return select_lane_loop(operator, schedule.lreorder, inner, modes) if size and size % 2 == 0 else None


def select_lane_loop(
    operator: Operator, loops: Sequence[str], inner: str, modes: Mapping[str, LevelMode]
) -> str | None:
    """Apply the rule of `find_lane_loop` without a schedule.

    Args:
        operator: Operator.
        loops: All loops, outermost first.
        inner: Innermost part of the last output axis, of an even size.
        modes: Mode of each level.
    """
    if operator.sparse_output or operator.dense_axes or loops[-2] != inner or inner in operator.axes:
        return None
    innermost_mode = modes[loops[-1]]
    sums_groups = innermost_mode in (LevelMode.COMPRESSED, LevelMode.COMPRESSED_NONUNIQUE)
    return inner if sums_groups and modes[inner] is LevelMode.DENSE else None


def _check_dense_parts(schedule: ScheduleFields, extents: Mapping[str, int] | None) -> Iterator[str]:
    """Check the number of parts of dense axes.

    With two parts the last block is shortened; with more parts a single bound cannot do that.
    """
    for split in schedule.lsplit:
        if len(split.parts) > 2 and (extents is None or extents[split.axis] % split.inner_size):
            yield (
                f"dense-parts: {split.axis} has {len(split.parts)} parts; expected at most 2, or an extent "
                f"divisible by the product of the inner sizes (={split.inner_size})"
            )


def _format_list(items: tuple[object, ...] | list[str] | list[int]) -> str:
    return " ".join(map(str, items)) or "none"
