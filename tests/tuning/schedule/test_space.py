"""Search spaces: validity, canonical form and exact counts of schedules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.tuning.schedule import choices
from sparseflow.tuning.schedule.choices import UNROLL_FACTORS
from sparseflow.tuning.schedule.operators import OPERATORS, SDDMM, SPMM, SPMV, Operator
from sparseflow.tuning.schedule.parser import FormatLevel, LevelMode, SparseFormat
from sparseflow.tuning.schedule.rules import BALANCED
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace
from tests.tuning.random_schedules import SPMM_LINE, generators, spaces

SHAPE = {"i": 1000, "k": 700, "j": 128}
FEW_CHUNKS = (1, 16)


def fits(schedule: Schedule, space: ScheduleSpace) -> bool:
    canonical = schedule.canonicalize(space.operator, space.shape)  # raises if it cannot run
    return schedule == canonical and Schedule.parse(str(schedule)) == schedule


@settings(max_examples=60)
@given(spaces(), generators)
def test_samples_are_valid_and_canonical(space: ScheduleSpace, rng: np.random.Generator) -> None:
    a, b = space.sample(rng), space.sample(rng)
    child = space.crossover(a, b, rng)
    mutant = space.mutate(child, rng)
    assert all(fits(item, space) for item in (a, b, child, mutant))
    assert mutant != child
    for item in (a, b, child, mutant):
        assert item.threads == 1 or item.threads in space.threads


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_sample_depends_on_seed_only(operator: Operator) -> None:
    space = ScheduleSpace(operator, dict.fromkeys(operator.axes, 300))

    def draw_samples() -> list[Schedule]:
        rng = np.random.default_rng(5)
        result = [space.sample(rng) for _ in range(20)]
        result += [space.mutate(item, rng) for item in result]
        return result + [space.crossover(a, b, rng) for a, b in itertools.pairwise(result)]

    assert draw_samples() == draw_samples()


@settings(max_examples=40)
@given(spaces(), generators)
def test_crossover_equal_parents_is_parent(space: ScheduleSpace, rng: np.random.Generator) -> None:
    parent = space.sample(rng)
    assert space.crossover(parent, parent, rng) == parent


def test_crossover_takes_decisions_of_parents() -> None:
    space, rng = ScheduleSpace(SPMM, SHAPE), np.random.default_rng(1)
    for _ in range(100):
        a, b = space.sample(rng), space.sample(rng)
        child = space.crossover(a, b, rng)
        for axis in SPMM.axes:
            assert child.sub_axes(axis) in (a.sub_axes(axis), b.sub_axes(axis))


def test_mutate_is_mostly_local() -> None:
    space, rng = ScheduleSpace(SPMM, SHAPE), np.random.default_rng(2)
    differing = Counter()
    for _ in range(300):
        parent = space.sample(rng)
        child = space.mutate(parent, rng)
        differing[sum(a != b for a, b in zip(parts_of(parent), parts_of(child), strict=True))] += 1
    assert differing[0] == 0
    assert differing[1] > 100, "one decision changes"


def parts_of(schedule: Schedule) -> tuple[object, ...]:
    splits = {split.axis: split for split in schedule.fsplit + schedule.lsplit}
    return (
        *(splits.get(axis) for axis in SPMM.axes),
        schedule.formats,
        schedule.lreorder,
        (schedule.parallel, schedule.threads, schedule.chunk),
        schedule.vectorize,
        (schedule.unroll, schedule.unroll_factor),
    )


@settings(max_examples=40)
@given(generators)
def test_mutate_accepts_foreign_schedules(rng: np.random.Generator) -> None:
    space = ScheduleSpace(SPMM, SHAPE)
    three = Schedule.parse(
        "1 i 3 i0 1 i1 5 i2 7 1 A 4 i0 k i1 i2 A 4 i1 0 i0 1 k 1 i2 2 0 5 i0 k i1 j i2 i0 i2 k 3 5 64"
    )
    for parent in (Schedule.parse(SPMM_LINE), three):
        for child in (space.mutate(parent, rng), space.crossover(parent, space.sample(rng), rng)):
            assert fits(child, space)


class EveryChoice:
    """Replacement of `choices.sample_option` that enumerates all sequences of decisions."""

    def __init__(self) -> None:
        self.path: list[tuple[int, int]] = []  # (choice, number of choices) of each decision
        self.depth = 0

    def __call__(self, rng: np.random.Generator, weighted: choices.WeightedOptions[Any]) -> Any:
        assert all(weight > 0.0 for _, weight in weighted), "every legal option has a positive weight"
        if self.depth == len(self.path):
            self.path.append((0, len(weighted)))
        self.depth += 1
        return weighted[self.path[self.depth - 1][0]][0]

    def advance(self) -> bool:
        self.depth = 0
        while self.path:
            choice, number = self.path.pop()
            if choice + 1 < number:
                self.path.append((choice + 1, number))
                return True
        return False


def every_sample(space: ScheduleSpace, monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    strategy = EveryChoice()
    monkeypatch.setattr(choices, "sample_option", strategy)
    rng = np.random.default_rng(0)
    result = [space.sample(rng)]
    while strategy.advance():
        result.append(space.sample(rng))
    return result


@pytest.mark.parametrize(
    ("operator", "extent", "threads"),
    [(SPMV, 2, (1,)), (SPMV, 1, (1, 2, 4)), (SPMM, 2, (1,)), (SDDMM, 1, (2,))],
)
def test_space_has_every_schedule_once(
    operator: Operator, extent: int, threads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short axes cannot be split, so all schedules can be enumerated."""
    monkeypatch.setattr(choices, "CHUNK_SIZES", FEW_CHUNKS)
    shape = dict.fromkeys(operator.axes, extent)
    space = ScheduleSpace(operator, shape, threads)
    expected = {
        schedule.canonicalize(operator, shape)
        for schedule in unsplit_schedules(operator, [thread for thread in threads if thread > 1])
    }
    result = every_sample(space, monkeypatch)
    assert len(result) == len(set(result)) == space.count_schedules()
    assert set(result) == expected


def test_count_is_exact_with_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    space = ScheduleSpace(SPMV, {"i": 5, "j": 2}, threads=(1,))
    result = every_sample(space, monkeypatch)
    assert len(result) == len(set(result)) == space.count_schedules()
    assert {item.sub_axes("i")[-1] for item in result} == {("i", None), ("i1", 2), ("i1", 4)}
    assert all(fits(item, space) for item in result[::7])


def unsplit_schedules(operator: Operator, threads: list[int]) -> Iterator[Schedule]:
    """List every valid schedule without splits that suits matrices which are not symmetric."""
    roles = [None, *operator.axes]
    for order, loops in itertools.product(
        itertools.permutations(operator.sparse_axes), itertools.permutations(operator.axes)
    ):
        for modes in itertools.product(LevelMode, repeat=2):
            levels = tuple(FormatLevel(axis=axis, mode=mode) for axis, mode in zip(order, modes, strict=True))
            formats = tuple(SparseFormat(tensor=name, order=order, modes=levels) for name in operator.tensors)
            for parallel, vectorize, unroll in itertools.product(roles, roles, roles):
                first = Schedule(
                    fsplit=(), formats=formats, lsplit=(), lreorder=loops, parallel=parallel, unroll=unroll,
                    vectorize=vectorize, unroll_factor=2 if unroll else 0, threads=1, chunk=1,
                )  # fmt: skip
                if first.find_violations(operator):
                    continue
                for factor, number, chunk in itertools.product(
                    UNROLL_FACTORS if unroll else (0,),
                    threads if parallel else (1,),
                    (BALANCED, *FEW_CHUNKS) if parallel else (1,),
                ):
                    schedule = replace(first, unroll_factor=factor, threads=number, chunk=chunk)
                    if not schedule.find_violations(operator) and not schedule.is_symmetric:
                        yield schedule


def test_count_includes_split_sizes() -> None:
    """Extent 9 has inner sizes 2, 4 and 8; other decisions do not depend on the size."""
    sizes = [
        ScheduleSpace(SPMV, {"i": 9, "j": 1}, max_split=largest).count_schedules()
        for largest in (1, 2, 4, 8, 16)
    ]
    steps = np.diff(sizes)
    assert steps[0] == steps[1] == steps[2] > 0
    assert steps[3] == 0


@settings(max_examples=8)
@given(spaces(), st.integers(0, 2**32))
def test_space_is_never_empty(space: ScheduleSpace, seed: int) -> None:
    assert (
        space.count_schedules() >= len({space.sample(np.random.default_rng(seed + n)) for n in range(5)}) >= 1
    )


def test_samples_prefer_fast_schedules() -> None:
    space, rng = ScheduleSpace(SPMM, SHAPE), np.random.default_rng(3)
    samples = [space.sample(rng) for _ in range(1000)]
    rows_first = [sample for sample in samples if sample.lreorder[0].startswith("i")]
    shared = [sample for sample in rows_first if sample.parallel == sample.lreorder[0]]
    tiled = [sample for sample in shared if sample.lsplit and 8 <= sample.lsplit[0].parts[1][1] <= 64]
    vectors = [sample for sample in tiled if sample.vectorize == "j1"]
    assert len(rows_first) > 850
    assert len(vectors) > 400
    assert len(set(samples)) > 900


def test_samples_cover_all_kinds() -> None:
    space, rng = ScheduleSpace(SPMM, SHAPE), np.random.default_rng(4)
    samples = [space.sample(rng) for _ in range(3000)]
    assert {level.mode for sample in samples for level in sample.formats[0].modes} == {0, 1, 2, 3, 5}
    assert {tuple(len(sample.sub_axes(axis)) for axis in SPMM.axes) for sample in samples} == set(
        itertools.product((1, 2), repeat=3)
    )
    orders = {sample.formats[0].order for sample in samples if len(sample.formats[0].order) == 4}
    assert len(orders) == 6
    assert {sample.unroll_factor for sample in samples} == {0, *UNROLL_FACTORS}
    assert {sample.chunk for sample in samples} == {BALANCED, *(2**power for power in range(10))}
    assert None in {sample.parallel for sample in samples}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads": ()}, "`threads`"),
        ({"threads": (0, 1)}, "`threads`"),
        ({"max_split": 0}, "`max_split`"),
        ({"shape": {"i": 1}}, ""),
    ],
)
def test_invalid_space_raises(arguments: dict, message: str) -> None:
    with pytest.raises(InputError, match=message or None):
        ScheduleSpace(**({"operator": SPMM, "shape": SHAPE} | arguments))
