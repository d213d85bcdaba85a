"""Schedules: text form, rules and canonical form."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from sparseflow.errors import FileFormatError, InputError
from sparseflow.tuning.schedule.operators import OPERATORS, SDDMM, SPMM, SPMV
from sparseflow.tuning.schedule.parser import AxisSplit, FormatLevel, LevelMode
from sparseflow.tuning.schedule.schedule import Schedule, ScheduleLine, parse_labeled_line
from sparseflow.tuning.schedule.space import ScheduleSpace
from tests.tuning.random_schedules import (
    CSR_LINE,
    LINES,
    SDDMM_LINE,
    SPMM_LINE,
    SPMV_LINE,
    any_schedule,
    generators,
    restated,
    spaces,
)

CSR = Schedule.parse(CSR_LINE)
SPLIT = Schedule.parse(SPMM_LINE)
BY_OPERATOR = ((SPMM_LINE, SPMM), (CSR_LINE, SPMM), (SPMV_LINE, SPMV), (SDDMM_LINE, SDDMM))

JUNK = [
    "",
    " ",
    "x",
    "-1",
    "+1",
    "01",
    "1.5",
    "1e3",
    "٣",
    "²",
    "1" * 19,
    "None",
    "i0",
    "A",
    "5",
    "\t",
    "é",
    "0x1",
]


# Text form ---------------------------------------------------------------------------------------


def test_parse_fields() -> None:
    assert SPLIT.fsplit[0] == AxisSplit(axis="i", parts=(("i0", 256), ("i1", 16)))
    assert SPLIT.formats[0].tensor == "A"
    assert SPLIT.formats[0].order == ("i0", "i1", "k0", "k1")
    assert SPLIT.formats[0].modes[0] == FormatLevel(axis="i0", mode=LevelMode.COMPRESSED)
    assert SPLIT.lsplit == (AxisSplit(axis="j", parts=(("j0", 2), ("j1", 64))),)
    assert SPLIT.lreorder == ("j0", "i0", "i1", "k0", "k1", "j1")
    assert (SPLIT.parallel, SPLIT.vectorize, SPLIT.unroll) == ("j0", "j1", None)
    assert (SPLIT.unroll_factor, SPLIT.threads, SPLIT.chunk) == (0, 128, 512)


@pytest.mark.parametrize("line", LINES)
def test_parse_known_lines_round_trip(line: str) -> None:
    assert str(Schedule.parse(line)) == line
    assert parse_labeled_line(line) == (Schedule.parse(line), None)
    assert parse_labeled_line(f"{line} 445.855559") == (Schedule.parse(line), 445.855559)
    assert parse_labeled_line(f"{line} 2.5e-05")[1] == 2.5e-05


@settings(max_examples=40)
@given(any_schedule())
def test_parse_any_schedule_round_trip(schedule: Schedule) -> None:
    line = str(schedule)
    assert Schedule.parse(line) == schedule
    assert str(Schedule.parse(line)) == line
    adapter = TypeAdapter(ScheduleLine)
    assert adapter.dump_python(schedule, mode="json") == line and adapter.validate_python(line) == schedule
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@settings(max_examples=100)
@given(st.sampled_from(LINES).map(Schedule.parse) | any_schedule(), st.data())
def test_parse_error_has_position(schedule: Schedule, data: st.DataObject) -> None:
    tokens = str(schedule).split(" ")
    pattern = data.draw(st.integers(0, len(tokens) - 1))
    edit = data.draw(st.sampled_from(["drop", "cut", "put", "insert", "swap"]))
    junk = data.draw(st.sampled_from(JUNK) | st.sampled_from(tokens))
    changed = {
        "drop": [*tokens[:pattern], *tokens[pattern + 1 :]],
        "cut": tokens[:pattern],
        "put": [*tokens[:pattern], junk, *tokens[pattern + 1 :]],
        "insert": [*tokens[:pattern], junk, *tokens[pattern:]],
        "swap": [*tokens[:pattern], *reversed(tokens[pattern : pattern + 2]), *tokens[pattern + 2 :]],
    }[edit]
    line = " ".join(changed)
    try:
        read = Schedule.parse(line)
    except FileFormatError as error:
        position = re.search(r"column (\d+) \(token (\d+)\)", str(error))
        assert position is not None
        column, token = int(position[1]), int(position[2])
        pieces = line.split(" ")
        starts = np.cumsum([1, *(len(piece) + 1 for piece in pieces)])
        assert column == starts[token - 1], "the column is that of the token"
        assert token > pattern, "the error is not before the edit"
        if token <= len(pieces) and pieces[token - 1]:
            assert repr(pieces[token - 1]) in str(error), "the token is quoted"
    else:
        assert str(read) == line, "the line round-trips"


@pytest.mark.parametrize("line", LINES)
def test_parse_wrong_length_raises(line: str) -> None:
    tokens = line.split(" ")
    for length in range(len(tokens)):
        with pytest.raises(FileFormatError):
            Schedule.parse(" ".join(tokens[:length]))
    for tail in (" ", " 1", " 1.5", "\n", " None"):
        with pytest.raises(FileFormatError):
            Schedule.parse(line + tail)
    for tail in (
        " ",
        " 1.5 2",
        " nan",
        " inf",
        " 1e999",
        " -1.0",
        " 0.0",
        " 0",
        " 1.",
        " .5",
        " 1_0",
        " 1.5\n",
    ):
        with pytest.raises(FileFormatError):
            parse_labeled_line(line + tail)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("k 1 1 j", "k 7 1 j", "'7'"),
        ("0 1 A", "1 1 A", "'1'"),
        ("i k A 2", "i k B 2", "'B'"),
        ("A 2 i 0", "A 3 i 0", "'3'"),
        ("i 0 k 1", "i 0 i 1", "'i'"),
        ("2 i k", "2 i i", "'i'"),
        ("j0 4 j1", "j1 4 j1", "'j1'"),
        ("1 j 2", "1 j 1", "'1'"),
        ("1 j 2", "1 j3 2", "'j3'"),
        ("i j0 k j1 i", "i j0 k i i", "'i'"),
        ("None 0 2", "none- 0 2", "'none-'"),
        (
            " 2 16",
            " 2  16",
            "",
        ),
        (" 2 16", " 2", "line"),
        (" 2 16", " 02 16", "'02'"),
    ],
)
def test_parse_error_shows_token(old: str, new: str, message: str) -> None:
    assert CSR_LINE.count(old) == 1
    with pytest.raises(FileFormatError, match=re.escape(message) or None):
        Schedule.parse(CSR_LINE.replace(old, new))


def test_parse_repeated_split_raises() -> None:
    with pytest.raises(FileFormatError):
        Schedule.parse("1 j 2 j0 4 j1 4 1 A 1 i A 1 i 0 1 j 2 j0 4 j1 4 1 i None None None 0 1 1")


def test_parse_long_line_raises() -> None:
    names = " ".join(f"a{number}x" for number in range(100_000))
    with pytest.raises(FileFormatError, match="characters"):
        Schedule.parse(f"0 1 A 100000 {names}")


@pytest.mark.parametrize("value", [None, 3, {}, "0 1", CSR_LINE + " 1.5"])
def test_schedule_line_invalid_value_raises(value: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(ScheduleLine).validate_python(value)


# Rules -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "operator"), BY_OPERATOR)
def test_known_lines_are_valid(line: str, operator) -> None:
    schedule = Schedule.parse(line)
    assert schedule.find_violations(operator) == []
    assert schedule.validate(operator) is schedule


BROKEN = [
    ("tensors", SPMM, "A 2 i k A 2", "B 2 i k B 2"),
    ("split-axis", SPMM, "1 1 j 2 j0 4 j1 64", "1 1 k 2 k0 4 k1 64"),
    ("storage-axes", SPMM, "A 2 i k A 2 i 0 k 1", "A 2 i m A 2 i 0 m 1"),
    ("loop-axes", SPMM, "4 i j0 k j1", "3 i j0 j1"),
    ("unknown-loop", SPMM, "k j1 i j1", "k j1 i0 j1"),
    ("same-loop", SPMM, "i j1 None 0", "i j1 i 2"),
    ("size", SPMM, "j0 4 j1 64", "j0 4 j1 0"),
    ("size", SPMM, "j0 4 j1 64", "j0 2147483648 j1 64"),
    ("threads", SPMM, "0 2 16", "0 0 16"),
    ("balance", SPMM, "i 0 k 1 1 j 2 j0 4 j1 64 4 i j0 k j1 i j1 None 0 2 16",
     "i 1 k 1 1 j 2 j0 4 j1 64 4 i j0 k j1 i j1 None 0 2 0"),
    ("diagonal", SPMM, "i 0 k 1", "i 0 k 5"),
    ("chunk", SPMM, "0 2 16", "0 2 48"),
    ("chunk", SPMM, "0 2 16", "0 2 1024"),
    ("unroll-factor", SPMM, "None 0", "None 4"),
    ("unroll-factor", SPMM, "None 0", "k 0"),
    ("storage-order", SPMM, "A 2 i k", "A 2 k i"),
    ("sub-order", SPMM, "i j0 k j1 i j1", "i j1 k j0 i j0"),
    ("singleton-parent", SPMM, "i 0 k 1", "i 0 k 3"),
    ("singleton-parent", SPMM, "i 0 k 1 1 j 2 j0 4 j1 64 4 i j0 k j1 i",
     "i 4 k 1 1 j 2 j0 4 j1 64 4 i j0 k j1 None"),
    ("parallel-reduction", SPMM, "j1 i j1", "j1 k j1"),
    ("parallel-shared", SPMM, "i 0 k 1", "i 2 k 1"),
    ("unroll-singleton", SPMM, "i 0 k 1 1 j 2 j0 4 j1 64 4 i j0 k j1 i j1 None 0",
     "i 2 k 3 1 j 2 j0 4 j1 64 4 i j0 k j1 None j1 k 2"),
    ("vectorize-inner", SPMM, "i j1 None", "i k None"),
    ("dense-parts", SPMM, "j 2 j0 4 j1 64 4 i j0 k j1 i j1", "j 3 j0 4 j1 8 j2 8 5 i j0 k j1 j2 i j2"),
    ("dense-parts", SPMM, "j 2 j0 4 j1 64 4 i j0 k j1 i j1", "j 3 j0 4 j1 8 j2 7 5 i j0 k j1 j2 i j2"),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "operator", "old", "new"), BROKEN)
def test_every_rule_is_reported_by_name(reason: str, operator, old: str, new: str) -> None:
    assert CSR_LINE.count(old) == 1
    schedule = Schedule.parse(CSR_LINE.replace(old, new))
    assert [problem.split(":")[0] for problem in schedule.find_violations(operator)] == [reason]
    with pytest.raises(InputError, match=f"cannot run as spmm: {reason}: "):
        schedule.validate(operator)


def test_singletons_have_no_loop() -> None:
    coo = "0 1 A 2 i j A 2 i 2 j 3 0 2 i j {} None 0 2 16"
    assert Schedule.parse(coo.format("None None")).find_violations(SPMV) == []
    violations = Schedule.parse(coo.format("None j")).find_violations(SPMV)
    assert [problem.split(":")[0] for problem in violations] == ["vectorize-singleton"]
    csc = Schedule.parse("0 1 A 2 j i A 2 j 2 i 3 0 2 j i i None None 0 2 16")
    assert [problem.split(":")[0] for problem in csc.find_violations(SPMV)] == ["parallel-singleton"]


def test_sparse_output_can_be_parallel() -> None:
    schedule = Schedule.parse(SDDMM_LINE)
    shared = replace(
        schedule,
        formats=tuple(
            replace(
                format,
                modes=tuple(replace(level, mode=LevelMode.COMPRESSED_NONUNIQUE) for level in format.modes),
            )
            for format in schedule.formats
        ),
    )
    assert shared.find_violations(SDDMM) == []
    assert replace(shared, parallel="j0").find_violations(SDDMM) == []
    (problem,) = replace(shared, parallel="k0").find_violations(SDDMM)
    assert problem.startswith("parallel-reduction: ")


def test_sddmm_tensors_share_format() -> None:
    schedule = Schedule.parse(SDDMM_LINE)
    first, second = schedule.formats
    other = replace(second, modes=tuple(reversed(second.modes)))
    assert replace(schedule, formats=(first, other)).find_violations(SDDMM) == [], (
        "the order of the list is free"
    )
    other = replace(second, modes=(FormatLevel(axis="i0", mode=LevelMode.DENSE), *second.modes[1:]))
    (problem,) = replace(schedule, formats=(first, other)).find_violations(SDDMM)
    assert problem.startswith("format-differs: ")


def test_more_dense_parts_require_divisible_extent() -> None:
    line = CSR_LINE.replace("j 2 j0 4 j1 64 4 i j0 k j1 i j1", "j 3 j0 4 j1 8 j2 8 5 i j0 k j1 j2 i j2")
    schedule = Schedule.parse(line)
    assert schedule.find_violations(SPMM, {"i": 9, "k": 9, "j": 256}) == []
    (problem,) = schedule.find_violations(SPMM, {"i": 9, "k": 9, "j": 250})
    assert problem.startswith("dense-parts: ")


@settings(max_examples=40)
@given(any_schedule(), st.sampled_from(sorted(OPERATORS)))
def test_find_violations_any_schedule(schedule: Schedule, name: str) -> None:
    operator = OPERATORS[name]
    for problem in schedule.find_violations(operator, dict.fromkeys(operator.axes, 8)):
        assert re.match(r"[a-z]+(-[a-z]+)*: \S", problem)


def test_find_violations_unparsable_schedule() -> None:
    repeated = replace(SPLIT, fsplit=(SPLIT.fsplit[0], *SPLIT.fsplit))
    assert repeated.find_violations(SPMM)[0].startswith("split-twice: ")
    named = replace(SPLIT, fsplit=(AxisSplit(axis="i", parts=(("x", 2), ("y", 2))), SPLIT.fsplit[1]))
    assert named.find_violations(SPMM)[0].startswith("part-names: ")
    modes = replace(SPLIT.formats[0], modes=SPLIT.formats[0].modes[:2])
    assert replace(SPLIT, formats=(modes,)).find_violations(SPMM)[0].startswith("mode-axes: ")


def test_sub_axes() -> None:
    assert SPLIT.sub_axes("i") == (("i0", 256), ("i1", 16))
    assert SPLIT.sub_axes("j") == (("j0", 2), ("j1", 64))
    assert CSR.sub_axes("i") == (("i", None),)


def test_levels_are_in_storage_order() -> None:
    listed = Schedule.parse(SDDMM_LINE).formats[0]
    assert [level.axis for level in listed.modes] == ["i0", "i1", "j0", "j1"]
    assert [level.axis for level in listed.levels()] == ["i0", "j0", "i1", "j1"]
    assert [level.mode for level in listed.levels()] == [1, 1, 0, 0]


# Canonical form ----------------------------------------------------------------------------------


def test_canonicalize_sizes() -> None:
    same = SPLIT.canonicalize(SPMM, {"i": 1000, "k": 17, "j": 65})
    assert [split.parts for split in (*same.fsplit, *same.lsplit)] == [
        (("i0", 63), ("i1", 16)),
        (("k0", 2), ("k1", 16)),
        (("j0", 2), ("j1", 64)),
    ]


@pytest.mark.parametrize(
    ("given_modes", "plain"),
    [
        ((2, 3), (2, 3)),
        ((0, 2), (0, 1)),
        ((2, 2), (2, 1)),
        ((2, 4, 4, 3), (2, 3, 3, 3)),
        ((1, 2, 2, 2), (1, 2, 1, 1)),
        ((2, 0, 2, 1), (2, 0, 1, 1)),
        ((2, 0, 2, 3), (2, 0, 2, 3)),
    ],
)
def test_canonicalize_normalizes_modes(given_modes, plain) -> None:
    names = ("i", "j") if len(given_modes) == 2 else ("i0", "i1", "j0", "j1")
    splits = "2 i 2 i0 2 i1 2 j 2 j0 2 j1 2" if len(given_modes) == 4 else "0"
    order = f"{len(names)} {' '.join(names)}"
    modes = " ".join(f"{name} {mode}" for name, mode in zip(names, given_modes, strict=True))
    line = f"{splits} 1 A {order} A {len(names)} {modes} 0 {order} None None None 0 1 1"
    same = Schedule.parse(line).canonicalize(SPMV, {"i": 4, "j": 4})
    assert tuple(level.mode for level in same.formats[0].levels()) == plain


def test_canonicalize_one_thread() -> None:
    shape = {"i": 100, "k": 100, "j": 256}
    single = replace(CSR, threads=1).canonicalize(SPMM, shape)
    assert (single.parallel, single.threads, single.chunk) == (None, 1, 1)
    assert single == replace(CSR, parallel=None, threads=7, chunk=4).canonicalize(SPMM, shape)


def test_canonicalize_invalid_raises() -> None:
    with pytest.raises(InputError):
        replace(CSR, threads=0).canonicalize(SPMM, {"i": 1, "k": 1, "j": 1})
    with pytest.raises(InputError):
        CSR.canonicalize(SPMM, {"i": 1})


@settings(max_examples=40)
@given(spaces(), generators)
def test_canonicalize_equivalent_schedules_are_equal(space: ScheduleSpace, rng: np.random.Generator) -> None:
    schedule = space.sample(rng)
    other = restated(schedule, space.operator, rng)
    assert other.find_violations(space.operator, space.shape) == []
    same = other.canonicalize(space.operator, space.shape)
    assert same == schedule == same.canonicalize(space.operator, space.shape)
    assert same.find_violations(space.operator, space.shape) == []
