"""Schedules for tests: any that the grammar allows, and any that can run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from sparseflow.tuning.schedule.operators import OPERATORS, Operator
from sparseflow.tuning.schedule.parser import AxisSplit, FormatLevel, LevelMode, SparseFormat
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace

SPMM_LINE = (
    "2 i 2 i0 256 i1 16 k 2 k0 4096 k1 16 1 A 4 i0 i1 k0 k1 A 4 i0 1 i1 1 k0 1 k1 1 1 j 2 j0 2 j1 64 "
    "6 j0 i0 i1 k0 k1 j1 j0 j1 None 0 128 512"
)
CSR_LINE = "0 1 A 2 i k A 2 i 0 k 1 1 j 2 j0 4 j1 64 4 i j0 k j1 i j1 None 0 2 16"
SPMV_LINE = (
    "2 i 2 i0 4096 i1 32 j 2 j0 4096 j1 2 1 A 4 i0 i1 j0 j1 A 4 i0 1 i1 0 j0 1 j1 0 0 4 i0 i1 j0 j1 "
    "i0 None i1 32 104 2"
)
SDDMM_LINE = (
    "2 i 2 i0 64 i1 4 j 2 j0 32 j1 8 2 A 4 i0 j0 i1 j1 D 4 i0 j0 i1 j1 A 4 i0 1 i1 0 j0 1 j1 0 "
    "D 4 i0 1 i1 0 j0 1 j1 0 1 k 2 k0 4 k1 16 6 i0 j0 i1 j1 k0 k1 i0 k1 i1 4 8 32"
)
LINES = (SPMM_LINE, CSR_LINE, SPMV_LINE, SDDMM_LINE)

_AXES = st.sampled_from(["i", "j", "k", "row", "Ij", "x_"])
_NAMES = st.sampled_from(["i", "i0", "i1", "k", "k0", "j1", "row2", "None_", "x_0"])
_NUM_SIZES = st.integers(0, 10**18 - 1)


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    """Draw any schedule of the grammar; it may fit no operator."""
    axes = draw(st.lists(_AXES, unique=True, max_size=4))
    splits = [
        AxisSplit(
            axis=axis, parts=tuple((f"{axis}{n}", draw(_NUM_SIZES)) for n in range(draw(st.integers(2, 12))))
        )
        for axis in axes
    ]
    cut = draw(st.integers(0, len(splits)))
    formats = []
    for tensor in draw(st.lists(st.sampled_from(["A", "D", "T1"]), unique=True, min_size=1)):
        order = draw(st.lists(_NAMES, unique=True, min_size=1, max_size=5))
        modes = [
            FormatLevel(axis=axis, mode=draw(st.sampled_from(list(LevelMode))))
            for axis in draw(st.permutations(order))
        ]
        formats.append(SparseFormat(tensor=tensor, order=tuple(order), modes=tuple(modes)))
    loop = st.none() | _NAMES
    return Schedule(
        fsplit=tuple(splits[:cut]),
        formats=tuple(formats),
        lsplit=tuple(splits[cut:]),
        lreorder=tuple(draw(st.lists(_NAMES, unique=True, min_size=1, max_size=7))),
        parallel=draw(loop),
        vectorize=draw(loop),
        unroll=draw(loop),
        unroll_factor=draw(_NUM_SIZES),
        threads=draw(_NUM_SIZES),
        chunk=draw(_NUM_SIZES),
    )


@st.composite
def spaces(draw: st.DrawFn) -> ScheduleSpace:
    """Draw a space of any operator with odd, large or tiny extents."""
    operator = OPERATORS[draw(st.sampled_from(sorted(OPERATORS)))]
    shape = {axis: draw(st.integers(1, 40) | st.integers(1, 10**6)) for axis in operator.axes}
    threads = draw(st.lists(st.integers(1, 64), min_size=1, max_size=3))
    return ScheduleSpace(operator, shape, threads, draw(st.sampled_from([1, 2, 100, 1024])))


generators = st.integers(0, 2**32).map(np.random.default_rng)


def restated(schedule: Schedule, operator: Operator, rng: np.random.Generator) -> Schedule:
    """Sample another schedule with the same canonical form."""
    modes = list(schedule.formats[0].modes)
    for index, level in enumerate(modes):
        if not level.mode.has_loop and rng.integers(2):
            modes[index] = replace(level, mode=LevelMode.SINGLETON_NONUNIQUE)
    for index in range(len(modes)):
        same = index == len(modes) - 1 or _holds_one_element([level.mode for level in modes[:index]])
        free = operator.sparse_output or modes[index].axis != schedule.parallel
        if modes[index].mode is LevelMode.COMPRESSED and same and free and rng.integers(2):
            modes[index] = replace(modes[index], mode=LevelMode.COMPRESSED_NONUNIQUE)
    listed = tuple(modes[index] for index in rng.permutation(len(modes)))
    roles = {}
    if schedule.unroll is None:
        selected = {schedule.parallel, schedule.vectorize}
        singletons = {level.axis for level in modes if not level.mode.has_loop}
        remaining = [loop for loop in schedule.lreorder if loop not in selected | singletons]
        if remaining and rng.integers(2):
            roles |= {"unroll": remaining[rng.integers(len(remaining))], "unroll_factor": 1}
    if schedule.parallel is None:
        roles |= {"threads": int(rng.integers(1, 9)), "chunk": 2 ** int(rng.integers(10))}
    return replace(
        schedule,
        fsplit=tuple(
            replace(split, parts=((split.parts[0][0], int(rng.integers(1, 10**6))), *split.parts[1:]))
            for split in reversed(schedule.fsplit)
        ),
        formats=tuple(replace(format, modes=listed) for format in reversed(schedule.formats)),
        **roles,
    )


def _holds_one_element(above: list[LevelMode]) -> bool:
    """Whether positions below these levels hold one element: below a non-unique level, none is dense."""
    for mode in reversed(above):
        if mode is LevelMode.DENSE:
            return False
        if not mode.unique:
            return True
    return False
