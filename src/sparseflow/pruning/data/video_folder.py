"""Labeled videos of any common layout; the layout is recognized from the files.

========================  ====================================================================================
`train`                   is read as
========================  ====================================================================================
directory of tar files    WebDataset: `key.mp4` with `key.cls`, `key.json` or `key.txt`
directory of              HMDB51: `<class>_test_split<n>.txt`
split files
other directory           a folder for each class
`.tar`                    WebDataset
`.csv`, `.txt`, `.tsv`    a path and a label in each line, or an official list of Kinetics
`.json`                   Something-Something v2, with `labels.json` beside it
========================  ====================================================================================

A directory with a training and a test part contains both subsets: folders, lists or tar files whose names
contain `train` and `val`, `validation` or `test`. If nothing determines the test videos, a seeded fraction of
each class becomes the test.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparseflow.core.checks import check_at_least
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.lists import class_folders, hmdb51, path_label, something_something, webdataset
from sparseflow.pruning.data.lists.lines import LabeledVideo, read_lines
from sparseflow.pruning.data.splits import DatasetSplit, VideoEntry

_LIST_SUFFIXES = (".csv", ".txt", ".tsv", ".json")

_SUBSET_NAMES = {
    "train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val",
    "validate": "val", "test": "test", "testing": "test",
}  # fmt: skip

_NUMBER = re.compile("[0-9]{1,9}")
_MAX_LISTED = 5


def read_video_folder(
    train: Path,
    test: Path | None = None,
    *,
    videos_dir: Path | None = None,
    classes_path: Path | None = None,
    split: int = 1,
    test_fraction: float = 0.2,
    split_seed: int = 0,
) -> tuple[DatasetSplit, Path]:
    """Read labeled videos.

    Args:
        train: Directory, list or tar file of the training videos, or of all videos.
        test: The same for the test videos, unless `train` determines them.
        videos_dir: Directory to which the paths in lists are relative; that of the list by default.
        classes_path: File with the name of a class in each line, in the order of the labels, which may be
            preceded by its number; by default lists of numbers have classes without names, and names are
            sorted.
        split: Split of HMDB51: 1, 2 or 3.
        test_fraction: Fraction of each class for the test if nothing else determines it.
        split_seed: Random seed of this selection.

    Returns:
        The training and test videos, and the directory to which their names are relative.

    Raises:
        InputError: A file does not exist, or no known layout is recognized.
        FileFormatError: A list is malformed, a label is unknown, or a video occurs twice.
    """
    check_at_least(0, split_seed=split_seed)
    if not 0 < test_fraction < 1:
        raise InputError(f"`test_fraction` (={test_fraction}) must be above 0 and below 1")
    train_paths, test_paths = _find_subsets(train, split) if test is None else ([train], [test])
    videos = _read_videos(train_paths, videos_dir, split)
    train_videos = [video for video in videos if video.subset != "test"]
    if test_paths:
        videos = _read_videos(test_paths, videos_dir, split)
        test_videos = [video for video in videos if video.subset != "train"]
    else:
        test_videos = [video for video in videos if video.subset == "test"]
    classes, labels = _read_classes(classes_path, train_paths[0], train_videos)
    root = videos_dir or _find_root([*train_paths, *test_paths])
    locations: dict[str, str] = {}
    train_entries = _make_entries(train_videos, labels, root, locations)
    test_entries = _make_entries(test_videos, labels, root, locations)
    if not test_entries:
        train_entries, test_entries = _split_by_class(train_entries, test_fraction, split_seed)
    return DatasetSplit(classes=classes, train=train_entries, test=test_entries), root


def _find_subsets(path: Path, split: int) -> tuple[list[Path], list[Path]]:
    """Find the training and the test part of a directory; without them, all is the training part."""
    if not path.is_dir() or hmdb51.list_split_files(path, split):
        return [path], []
    subsets = defaultdict(list)
    for child in sorted(path.iterdir()):
        if child.is_dir() or child.suffix.lower() in (*_LIST_SUFFIXES, ".tar"):
            words = re.split("[^a-z]+", child.name.lower())
            subsets[next((_SUBSET_NAMES[word] for word in words if word in _SUBSET_NAMES), "")].append(child)
    # Official test lists often have no labels.
    train, test = subsets["train"], subsets["val"] or subsets["test"]
    if not train or not test:
        return [path], []
    for paths in (train, test):
        if len(paths) > 1 and any(part.suffix.lower() != ".tar" for part in paths):
            raise InputError(
                f"{path} has several parts: {_format_names(paths)}; name one with `train` and one with `test`"
            )
    return train, test


def _read_videos(paths: Sequence[Path], videos_dir: Path | None, split: int) -> list[LabeledVideo]:
    """Read videos of one folder or list, or of several tar files."""
    path = paths[0]
    suffix = path.suffix.lower()
    if not path.exists():
        raise InputError(f"{path} does not exist; expected a directory, a list or a tar file of videos")
    if path.is_dir():
        shards = sorted(path.glob("*.tar"))
        if shards:
            return webdataset.read_shards(shards)
        if hmdb51.list_split_files(path, split):
            return hmdb51.read_split_files(path, split, videos_dir or path)
        if any(child.is_dir() and not child.name.startswith(".") for child in path.iterdir()):
            return class_folders.read_class_folders(path)
    elif suffix == ".tar":
        return webdataset.read_shards(paths)
    elif suffix == ".json":
        return something_something.read_template_list(path, videos_dir or path.parent)
    elif suffix in _LIST_SUFFIXES:
        return path_label.read_path_list(path, videos_dir or path.parent)
    content = f"contains {_format_names(sorted(path.iterdir()))}" if path.is_dir() else "has no known suffix"
    raise InputError(
        f"{path} {content}; expected folders named after classes, .tar files of WebDataset, split files of "
        f"HMDB51 (*_test_split{split}.txt), or a list ({', '.join(_LIST_SUFFIXES)})"
    )


def _read_classes(
    path: Path | None, source: Path, videos: Sequence[LabeledVideo]
) -> tuple[tuple[str, ...], dict[str, int]]:
    """Determine the names of the classes, and the index of each label in a list."""
    if path is None and source.suffix.lower() == ".json":
        path = something_something.find_class_file(source)
    if path is not None and path.suffix.lower() == ".json":
        names, first = something_something.read_class_file(path), 0
    elif path is not None:
        names, first = _read_class_lines(path)
    elif all(_NUMBER.fullmatch(video.label) for video in videos):
        names, first = tuple(map(str, range(1 + max(int(video.label) for video in videos)))), 0
    else:
        names, first = tuple(sorted({video.label for video in videos})), 0
    labels = {name: label for label, name in enumerate(names)}
    if path is not None:
        labels = {str(first + label): label for label in range(len(names))} | labels
    return names, labels


def _read_class_lines(path: Path) -> tuple[tuple[str, ...], int]:
    """Read the names of a class file and the number of the first class."""
    lines = list(read_lines(path))
    if lines and re.fullmatch("id\\s*,\\s*name", lines[0][1]):
        del lines[0]
    if not lines:
        raise FileFormatError(f"{path} has no classes; expected one name in each line")
    numbered = [re.fullmatch(r"([0-9]{1,9})[\s,]+(\S.*)", line) for _, line in lines]
    for first in (0, 1):
        if all(match and int(match[1]) == first + label for label, match in enumerate(numbered)):
            names = [match[2] for match in numbered if match]
            break
    else:
        names, first = [line for _, line in lines], 0
    if len(set(names)) < len(names):
        duplicate = next(name for name, count in Counter(names).items() if count > 1)
        raise FileFormatError(f"{path}: duplicate class {duplicate!r:.100}")
    return tuple(names), first


def _make_entries(
    videos: Sequence[LabeledVideo], labels: dict[str, int], root: Path, locations: dict[str, str]
) -> tuple[VideoEntry, ...]:
    """Make the entries of a subset and add its videos to `locations`, name -> location."""
    entries = []
    for video in videos:
        is_below = video.path.is_relative_to(root)
        name = (video.path.relative_to(root) if is_below else video.path).as_posix()
        if name in locations:
            raise FileFormatError(f"{video.location}: duplicate video {name}, see {locations[name]}")
        locations[name] = video.location
        label = labels.get(video.label)
        if label is None and _NUMBER.fullmatch(video.label):
            label = labels.get(str(int(video.label)))
        if label is None:
            raise FileFormatError(
                f"{video.location}: unknown class {video.label!r:.100}; the classes are "
                f"{_format_names(list(labels))}"
            )
        entries.append(VideoEntry(video=name, label=label))
    return tuple(entries)


def _split_by_class(
    entries: Sequence[VideoEntry], fraction: float, seed: int
) -> tuple[tuple[VideoEntry, ...], tuple[VideoEntry, ...]]:
    """Select a fraction of each class for the test, but at least one video of it, and leave one."""
    generator = np.random.default_rng(seed)
    labels = np.array([entry.label for entry in entries])
    selected: set[int] = set()
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label)).tolist()
        selected.update(members[: min(max(1, round(fraction * len(members))), len(members) - 1)])
    if not selected:
        raise InputError(
            "every class has one video, which leaves none for the test; add videos or set `test`"
        )
    return (
        tuple(entry for index, entry in enumerate(entries) if index not in selected),
        tuple(entry for index, entry in enumerate(entries) if index in selected),
    )


def _find_root(paths: Sequence[Path]) -> Path:
    return Path(os.path.commonpath([path if path.is_dir() else path.parent for path in paths]))


def _format_names(items: Sequence[Path | str]) -> str:
    names = [item.name if isinstance(item, Path) else item for item in items]
    return (", ".join(names[:_MAX_LISTED]) or "nothing") + (", …" if len(names) > _MAX_LISTED else "")
