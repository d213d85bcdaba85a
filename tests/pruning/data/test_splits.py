"""Official lists of UCF-101 and errors of damaged lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.splits import VideoEntry, read_split
from tests.pruning.data.tree import CLASSES, Tree, group_of

CLASS_LINES = "1 A\n2 B\n"
TRAIN = "A/v_A_g02_c01.avi 1\nB/v_B_g02_c01.avi 2\n"
TEST = "A/v_A_g01_c01.avi\n"


def written(folder: Path, *, classes: str = CLASS_LINES, train: str = TRAIN, test: str = TEST) -> Path:
    for name, text in (("classInd", classes), ("trainlist01", train), ("testlist01", test)):
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_read_split_returns_entries(tmp_path: Path) -> None:
    split = read_split(written(tmp_path), 1)
    assert split.classes == ("A", "B")
    assert split.train == (
        VideoEntry(video="A/v_A_g02_c01", label=0, group=2),
        VideoEntry(video="B/v_B_g02_c01", label=1, group=2),
    )
    assert split.test == (VideoEntry(video="A/v_A_g01_c01", label=0, group=1),)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_groups_do_not_overlap(tree: Tree, number: int) -> None:
    split = read_split(tree.lists, number)
    assert split.classes == CLASSES
    train, test = ({(entry.label, entry.group) for entry in side} for side in (split.train, split.test))
    assert not train & test
    assert {group for _, group in test} == {2 * number - 1, 2 * number}
    assert {entry.video for entry in (*split.train, *split.test)} == set(tree.frames)
    assert all(entry.group == group_of(entry.video) for entry in split.train)


def test_other_names_have_no_group(tmp_path: Path) -> None:
    split = read_split(written(tmp_path, train=TRAIN + "A/my-clip.mp4 1\n", test="A/clip_g02_c01.mov\n"), 1)
    assert split.train[2] == VideoEntry(video="A/my-clip", label=0, group=None)
    assert split.test == (VideoEntry(video="A/clip_g02_c01", label=0, group=None),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"classes": "1 A\nB\n"}, "classInd.txt, line 2: .*'B'"),
        ({"classes": "1 A\n3 B\n"}, "classInd.txt, line 2: .*2, got 3"),
        ({"classes": "1 A\n2 A\n"}, "line 2: .*A"),
        ({"classes": "\n"}, "classInd.txt"),
        ({"train": "\n\nA/v_A_g02_c01.avi\n"}, "trainlist01.txt, line 3"),
        ({"train": "A/v_A_g02_c01.avi one\n"}, "a video and its class"),
        ({"train": "A/v_A_g02_c01.avi 2\n"}, "line 1: .*1 for A, got 2"),
        ({"train": "C/v_C_g02_c01.avi 1\n"}, "'C'"),
        ({"train": "A/v_B_g02_c01.avi 1\n"}, "expected a name"),
        ({"train": "A/v_A_2_c01.avi 1\n"}, "expected a name"),
        ({"train": "v_A_g02_c01.avi 1\n"}, "expected a name"),
        ({"train": "/ 1\n"}, "expected a name"),
        ({"train": "A/.. 1\n"}, "expected a name"),
        ({"train": "A/v_A_g02_c01.avi " + "1" * 5000}, "^.{0,400}$"),
        ({"train": "A/v_A_g" + "2" * 5000 + "_c01.avi 1"}, "^.{0,400}$"),
        ({"classes": "1 A\n" + "2" * 5000 + " B\n"}, "^.{0,400}$"),
        ({"train": ""}, "trainlist01.txt"),
        ({"train": TRAIN + "A/v_A_g02_c01.avi 1\n"}, "line 3: .*A/v_A_g02_c01.*line 1"),
        ({"test": "A/v_A_g01_c01.avi 2\n"}, "testlist01.txt, line 1: .*1 for A, got 2"),
        ({"test": "A/v_A_g01_c01.avi 1 1\n"}, "testlist01.txt, line 1"),
        ({"test": "A/v_A_g02_c09.avi\n"}, "line 1: group 2 of A/v_A_g02_c09"),
    ],
)
def test_damaged_list_error_has_line(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        read_split(written(tmp_path, **change), 1)


def test_copies_of_the_lists_are_read(tmp_path: Path) -> None:
    expected = read_split(written(tmp_path), 1)
    written(tmp_path, test=TEST.replace(".avi", ".avi 1"), train=TRAIN.replace("/", "\\"))
    for path in tmp_path.iterdir():  # as the editor of Windows saves text
        path.write_bytes(path.read_text().replace("\n", "\r\n").encode("utf-8-sig"))
    assert read_split(tmp_path, 1) == expected


def test_binary_list_raises(tmp_path: Path) -> None:
    written(tmp_path)
    (tmp_path / "testlist01.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match=r"testlist01\.txt"):
        read_split(tmp_path, 1)


def test_missing_list_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"trainlist02\.txt"):
        read_split(written(tmp_path), 2)


@pytest.mark.parametrize("split", [0, 4, "1"])
def test_unknown_split_raises(tmp_path: Path, split: int) -> None:
    with pytest.raises(InputError, match="`split`"):
        read_split(written(tmp_path), split)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(line=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"]), max_size=30))
def test_random_lines_are_parsed_or_refused(tmp_path: Path, line: str) -> None:
    (written(tmp_path) / "trainlist01.txt").write_text(TRAIN + line + "\n", encoding="utf-8")
    try:
        assert len(read_split(tmp_path, 1).train) in (2, 3)
    except FileFormatError as error:
        assert "line 3" in str(error)
