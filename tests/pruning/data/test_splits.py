"""The official lists: what is in them, and what is wrong with those that are damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.splits import Entry, read_split
from tests.pruning.data.tree import CLASSES, Tree, group_of

CLASS_LINES = "1 A\n2 B\n"
TRAIN = "A/v_A_g02_c01.avi 1\nB/v_B_g02_c01.avi 2\n"
TEST = "A/v_A_g01_c01.avi\n"


def written(folder: Path, *, classes: str = CLASS_LINES, train: str = TRAIN, test: str = TEST) -> Path:
    for name, text in (("classInd", classes), ("trainlist01", train), ("testlist01", test)):
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_a_split_says_what_trains_and_what_tests(tmp_path: Path) -> None:
    split = read_split(written(tmp_path), 1)
    assert split.classes == ("A", "B")
    assert split.train == (
        Entry(video="A/v_A_g02_c01", label=0, group=2),
        Entry(video="B/v_B_g02_c01", label=1, group=2),
    )
    assert split.test == (Entry(video="A/v_A_g01_c01", label=0, group=1),)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_group_is_on_both_sides(tree: Tree, number: int) -> None:
    split = read_split(tree.lists, number)
    assert split.classes == CLASSES
    train, test = ({(entry.label, entry.group) for entry in side} for side in (split.train, split.test))
    assert not train & test
    assert {group for _, group in test} == {2 * number - 1, 2 * number}
    assert {entry.video for entry in (*split.train, *split.test)} == set(tree.frames)
    assert all(entry.group == group_of(entry.video) for entry in split.train)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": "1 A\nB\n"}, "classInd.txt, line 2: 'B' must be a number and a class"),
        ({"classes": "1 A\n3 B\n"}, "classInd.txt, line 2: class B has the number 3; expected 2"),
        ({"classes": "1 A\n2 A\n"}, "line 2: class A stands there twice"),
        ({"classes": "\n"}, "names no class"),
        ({"train": "\n\nA/v_A_g02_c01.avi\n"}, "trainlist01.txt, line 3: .* must be a video and its class"),
        ({"train": "A/v_A_g02_c01.avi one\n"}, "must be a video and its class"),
        ({"train": "A/v_A_g02_c01.avi 2\n"}, "line 1: A has the number 1, not 2"),
        ({"train": "C/v_C_g02_c01.avi 1\n"}, "'C' is no class of classInd.txt"),
        ({"train": "A/v_B_g02_c01.avi 1\n"}, "is not named like"),
        ({"train": "A/v_A_2_c01.avi 1\n"}, "is not named like"),
        ({"train": "v_A_g02_c01.avi 1\n"}, "is not named like"),
        ({"train": "/ 1\n"}, "is not named like"),
        ({"train": ""}, "trainlist01.txt names no video"),
        ({"train": TRAIN + "A/v_A_g02_c01.avi 1\n"}, "line 3: A/v_A_g02_c01 stood before at .*, line 1"),
        ({"test": "A/v_A_g01_c01.avi 1\n"}, "testlist01.txt, line 1: .* must be a video, and no more"),
        ({"test": "A/v_A_g02_c09.avi\n"}, "line 1: group 2 of A/v_A_g02_c09 trains already"),
    ],
)
def test_a_damaged_list_is_named_with_its_line(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_split(written(tmp_path, **change), 1)


def test_a_list_that_is_not_text_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "testlist01.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match=r"testlist01\.txt is not a list"):
        read_split(tmp_path, 1)


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no .*trainlist02\.txt"):
        read_split(written(tmp_path), 2)


@pytest.mark.parametrize("split", [0, 4, "1"])
def test_there_are_three_splits(tmp_path: Path, split: int) -> None:
    with pytest.raises(InputError, match="must be one of 1, 2, 3"):
        read_split(written(tmp_path), split)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), max_size=30))
def test_any_line_is_read_or_refused(tmp_path: Path, line: str) -> None:
    (written(tmp_path) / "trainlist01.txt").write_text(TRAIN + line + "\n", encoding="utf-8")
    try:
        assert len(read_split(tmp_path, 1).train) in (2, 3)
    except FileFormatError as error:
        assert "line 3" in str(error)
