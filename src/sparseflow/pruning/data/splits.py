"""UCF-101's official lists: which videos train and which test, in each of three splits.

::

    classInd.txt        `1 ApplyEyeMakeup`                                       a class a line, from 1
    trainlist01.txt     `ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi 1`          a video and its class
    testlist01.txt      `ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi`            a video

Videos of a group (`g08`) were cut from one recording, so a group that both trained and tested would make the
test too easy: that is an error here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sparseflow.errors import FileFormatError, InputError

SPLITS = (1, 2, 3)

_VIDEO = re.compile(r"v_(?P<name>.+)_g(?P<group>\d{2,})_c\d{2,}")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A video of a list.

    Attributes:
        video: Its path below the folder of videos, without suffix: `"Archery/v_Archery_g08_c01"`.
        label: Its class, from 0.
        group: The recording that it was cut from: 8 of `g08`.
    """

    video: str
    label: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Split:
    """What trains and what tests.

    Attributes:
        classes: Their names; a label is a place in here.
        train: In the order of the list.
        test: In the order of the list.
    """

    classes: tuple[str, ...]
    train: tuple[Entry, ...]
    test: tuple[Entry, ...]


def read_split(lists: Path | str, split: int) -> Split:
    """One of the official splits, checked; the number of classes is whatever `classInd.txt` says.

    Args:
        lists: The folder of `classInd.txt` and the lists (`ucfTrainTestlist`).
        split: 1, 2 or 3.

    Raises:
        InputError: There is no such split, or a file is missing.
        FileFormatError: A line is malformed, names a class that is not there or a label of another class, a
            video stands there twice, or a group is on both sides. The message names the file and the line.
    """
    if split not in SPLITS:
        raise InputError(f"`split` (={split!r}) must be one of {', '.join(map(str, SPLITS))}")
    folder = Path(lists)
    classes = _classes(folder / "classInd.txt")
    labels = {name: label for label, name in enumerate(classes)}
    seen: dict[str, str] = {}
    sides: dict[tuple[int, int], tuple[str, str]] = {}
    train = _entries(folder / f"trainlist{split:02}.txt", labels, seen, sides, labelled=True)
    test = _entries(folder / f"testlist{split:02}.txt", labels, seen, sides, labelled=False)
    return Split(classes=classes, train=train, test=test)


def _classes(path: Path) -> tuple[str, ...]:
    classes: list[str] = []
    for where, line in _lines(path):
        number, _, name = line.partition(" ")
        name = name.strip()
        if not number.isdecimal() or not name or "/" in name or " " in name:
            raise FileFormatError(f"{where}: {line!r} must be a number and a class, like '1 ApplyEyeMakeup'")
        if int(number) != len(classes) + 1:
            raise FileFormatError(
                f"{where}: class {name} has the number {number}; expected {len(classes) + 1}"
            )
        if name in classes:
            raise FileFormatError(f"{where}: class {name} stands there twice")
        classes.append(name)
    if not classes:
        raise FileFormatError(f"{path} names no class; expected lines like '1 ApplyEyeMakeup'")
    return tuple(classes)


def _entries(
    path: Path,
    labels: dict[str, int],
    seen: dict[str, str],
    sides: dict[tuple[int, int], tuple[str, str]],
    *,
    labelled: bool,
) -> tuple[Entry, ...]:
    """The videos of a list.

    Args:
        path: The list.
        labels: Class -> label.
        seen: Video -> where it stood; added to.
        sides: Class and group -> the list that it was in and where it first stood; added to.
        labelled: Whether a class number follows each video.
    """
    entries = []
    for where, line in _lines(path):
        entry = _entry(where, line, labels, labelled=labelled)
        if entry.video in seen:
            raise FileFormatError(f"{where}: {entry.video} stood before at {seen[entry.video]}")
        seen[entry.video] = where
        side, before = sides.setdefault((entry.label, entry.group), (path.name, where))
        if side != path.name:
            raise FileFormatError(
                f"{where}: group {entry.group} of {entry.video} trains already ({before}); a group must not "
                "be on both sides of a split"
            )
        entries.append(entry)
    if not entries:
        raise FileFormatError(f"{path} names no video")
    return tuple(entries)


def _entry(where: str, line: str, labels: dict[str, int], *, labelled: bool) -> Entry:
    video, *rest = line.split()
    if len(rest) != labelled or any(not word.isdecimal() for word in rest):
        expected = "a video and its class, like 'A/v_A_g08_c01.avi 1'" if labelled else "a video, and no more"
        raise FileFormatError(f"{where}: {line!r} must be {expected}")
    path = PurePosixPath(video).parent / PurePosixPath(video).stem
    found = _VIDEO.fullmatch(path.name)
    # Official names do not always agree in case: HandstandPushups/v_HandStandPushups_g01_c01.avi.
    if len(path.parts) != 2 or found is None or found["name"].lower() != path.parent.name.lower():
        raise FileFormatError(f"{where}: {video!r} is not named like 'Class/v_Class_g08_c01.avi'")
    if path.parent.name not in labels:
        raise FileFormatError(f"{where}: {path.parent.name!r} is no class of classInd.txt")
    label = labels[path.parent.name]
    if labelled and int(rest[0]) != label + 1:
        raise FileFormatError(f"{where}: {path.parent.name} has the number {label + 1}, not {rest[0]}")
    return Entry(video=str(path), label=label, group=int(found["group"]))


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, each with where it stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(
            f"there is no {path}; name the folder that holds UCF-101's classInd.txt, trainlist0*.txt and "
            "testlist0*.txt"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} is not a list: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"{path}, line {number}", line.strip()
