"""Official train and test lists of UCF-101, three splits.

::

    classInd.txt        `1 ApplyEyeMakeup`                                       number from 1 and class
    trainlist01.txt     `ApplyEyeMakeup/v_ApplyEyeMakeup_g08_c01.avi 1`          video and class number
    testlist01.txt      `ApplyEyeMakeup/v_ApplyEyeMakeup_g01_c01.avi`            video, or both

The videos of a group (`g08`) are parts of one recording. A group in both the training and the test list would
leak training data into the test, and is an error. Lists of other datasets may have other names, such as
`Class/video`, that do not begin with `v_`; such a video belongs to no group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from sparseflow.core.checks import check_one_of
from sparseflow.errors import FileFormatError
from sparseflow.pruning.data.lists.lines import read_lines

SPLIT_NUMBERS = (1, 2, 3)

_VIDEO_NAME = re.compile(r"v_(?P<name>.+)_g(?P<group>[0-9]{2,9})_c[0-9]{2,9}")
_NUMBER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True, kw_only=True)
class VideoEntry:
    """A video of a list.

    Attributes:
        video: Path below the video directory: `"Archery/v_Archery_g08_c01"`; lists of UCF-101 are read
            without suffixes.
        label: Class, from 0.
        group: Group, such as 8 for `g08`; None for a name without a group.
    """

    video: str
    label: int
    group: int | None = None


@dataclass(frozen=True, kw_only=True)
class DatasetSplit:
    """A training list and a test list.

    Attributes:
        classes: Class names by label.
        train: Training videos in the order of the list.
        test: Test videos in the order of the list.
    """

    classes: tuple[str, ...]
    train: tuple[VideoEntry, ...]
    test: tuple[VideoEntry, ...]


def read_split(lists_dir: Path | str, split: int) -> DatasetSplit:
    """Read and check an official split; `classInd.txt` determines the number of classes.

    Args:
        lists_dir: Directory of `classInd.txt` and the lists (`ucfTrainTestlist`).
        split: 1, 2 or 3.

    Raises:
        InputError: The split is unknown, or a file is missing.
        FileFormatError: A line is malformed or has an unknown class or the number of another class, a video
            occurs twice, or a group is in both lists. The message has the file and the line.
    """
    check_one_of(SPLIT_NUMBERS, split=split)
    directory = Path(lists_dir)
    classes = _read_classes(directory / "classInd.txt")
    labels = {name: label for label, name in enumerate(classes)}
    locations: dict[str, str] = {}
    train = _read_list(directory / f"trainlist{split:02}.txt", labels, locations, has_labels=True)
    test = _read_list(directory / f"testlist{split:02}.txt", labels, locations, has_labels=False)
    train_groups = {(entry.label, entry.group): entry.video for entry in train}
    for entry in test:
        if entry.group is not None and (entry.label, entry.group) in train_groups:
            train_video = train_groups[entry.label, entry.group]
            raise FileFormatError(
                f"{locations[entry.video]}: group {entry.group} of {entry.video} is also in the training "
                f"list ({locations[train_video]}); a group must not be in both lists"
            )
    return DatasetSplit(classes=classes, train=train, test=test)


def _read_classes(path: Path) -> tuple[str, ...]:
    classes: list[str] = []
    for location, line in read_lines(path):
        number, _, name = line.partition(" ")
        name = name.strip()
        if not _NUMBER.fullmatch(number) or not name or "/" in name or " " in name:
            raise FileFormatError(
                f"{location}: expected a number and a class such as '1 ApplyEyeMakeup', got {line!r:.100}"
            )
        if int(number) != len(classes) + 1:
            raise FileFormatError(f"{location}: expected number {len(classes) + 1}, got {number}")
        if name in classes:
            raise FileFormatError(f"{location}: duplicate class {name}")
        classes.append(name)
    if not classes:
        raise FileFormatError(f"{path} has no classes; expected lines such as '1 ApplyEyeMakeup'")
    return tuple(classes)


def _read_list(
    path: Path, labels: dict[str, int], locations: dict[str, str], *, has_labels: bool
) -> tuple[VideoEntry, ...]:
    """Read a list and add its videos to `locations`, video -> location of its line."""
    entries = []
    for location, line in read_lines(path):
        entry = _parse_entry(location, line, labels, has_label=has_labels)
        if entry.video in locations:
            raise FileFormatError(f"{location}: duplicate video {entry.video}, see {locations[entry.video]}")
        locations[entry.video] = location
        entries.append(entry)
    if not entries:
        raise FileFormatError(f"{path} has no videos")
    return tuple(entries)


def _parse_entry(location: str, line: str, labels: dict[str, int], *, has_label: bool) -> VideoEntry:
    video, *numbers = line.replace("\\", "/").split()
    # Some copies of the test lists have labels, too.
    if len(numbers) > 1 or len(numbers) < has_label or not all(map(_NUMBER.fullmatch, numbers)):
        expected = "a video and its class, such as 'A/v_A_g08_c01.avi 1'" if has_label else "one video"
        raise FileFormatError(f"{location}: expected {expected}, got {line!r:.100}")
    path = PurePosixPath(video).parent / PurePosixPath(video).stem
    match = _VIDEO_NAME.fullmatch(path.name)
    # Official names differ in case: HandstandPushups/v_HandStandPushups_g01_c01.avi.
    is_official = match is not None and match["name"].lower() == path.parent.name.lower()
    if len(path.parts) != 2 or not (is_official or not path.name.startswith(("v_", "."))):
        raise FileFormatError(
            f"{location}: expected a name such as 'Class/v_Class_g08_c01.avi' or 'Class/video.mp4', got "
            f"{video!r:.100}"
        )
    if path.parent.name not in labels:
        raise FileFormatError(f"{location}: unknown class {path.parent.name!r:.100}; see classInd.txt")
    label = labels[path.parent.name]
    if numbers and int(numbers[0]) != label + 1:
        raise FileFormatError(
            f"{location}: expected number {label + 1} for {path.parent.name}, got {numbers[0]}"
        )
    group = None if match is None else int(match["group"])
    return VideoEntry(video=str(path), label=label, group=group)
