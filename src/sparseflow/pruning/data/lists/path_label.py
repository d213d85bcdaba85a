"""Lists of paths and labels, as of mmaction2 and VideoMAE, and the official lists of Kinetics.

::

    abseiling/a.mp4 0                                            path and label
    abseiling/a.mp4,abseiling                                    the same, separated by commas
    frames/a 120 0                                               directory of frames, their number, and label
    label,youtube_id,time_start,time_end,split                   header of Kinetics
    abseiling,0347ZoDXyP0,95,105,train
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

from sparseflow.errors import FileFormatError
from sparseflow.pruning.data.lists.lines import LabeledVideo, read_lines
from sparseflow.pruning.data.video import VIDEO_SUFFIXES, find_video, is_video_name

_SUFFIX = "|".join(re.escape(suffix) for suffix in VIDEO_SUFFIXES)
_FILE = re.compile(rf"(?P<path>.+?(?:{_SUFFIX}))\s+(?P<label>\S.*)", re.IGNORECASE)
_FRAMES = re.compile(r"(?P<path>\S.*?)(?:\s+[0-9]{1,9})?\s+(?P<label>\S+)")
_SEVERAL_NUMBERS = re.compile(r"[0-9]+(\s+[0-9]+)+")

_HEADERS = ("label", "class", "category", "class_id", "class_name")
"""Names of the second column in the first line of a list with a header."""


def read_path_list(path: Path, videos_dir: Path) -> list[LabeledVideo]:
    """Read a list.

    Args:
        path: List.
        videos_dir: Directory to which the paths in the list are relative.

    Raises:
        InputError: The list does not exist.
        FileFormatError: A line is malformed, or the list has no videos.
    """
    lines = list(read_lines(path))
    header = [field.strip().lower() for field in lines[0][1].split(",")] if lines else []
    if "youtube_id" in header:
        return list(_parse_kinetics(lines, header, videos_dir))
    has_commas = all("," in line for _, line in lines)
    videos = []
    for number, (location, line) in enumerate(lines):
        name, label = _split_comma(line) if has_commas else _split_space(line)
        if number == 0 and label.lower() in _HEADERS and not is_video_name(name):
            continue
        if not name or not label or _SEVERAL_NUMBERS.fullmatch(label):
            raise FileFormatError(
                f"{location}: expected a path and one label, such as 'A/a.mp4 0' or 'A/a.mp4,A', got "
                f"{line!r:.100}"
            )
        videos.append(LabeledVideo(path=videos_dir / name.replace("\\", "/"), label=label, location=location))
    if not videos:
        raise FileFormatError(f"{path} has no videos; expected lines such as 'A/a.mp4 0'")
    return videos


def _split_comma(line: str) -> tuple[str, str]:
    fields = [field.strip() for field in next(csv.reader([line]))]
    return (fields[0], fields[1]) if len(fields) == 2 else ("", "")


def _split_space(line: str) -> tuple[str, str]:
    match = _FILE.fullmatch(line) or _FRAMES.fullmatch(line)
    return (match["path"], match["label"]) if match else ("", "")


def _parse_kinetics(
    lines: list[tuple[str, str]], header: list[str], videos_dir: Path
) -> Iterator[LabeledVideo]:
    """Yield the videos of a list of Kinetics, whose files are named ID_START_END with six digits each."""
    for location, line in lines[1:]:
        row = dict(zip(header, (field.strip() for field in next(csv.reader([line]))), strict=False))
        label, split = row.get("label", ""), row.get("split", "")
        try:
            start, end = (int(float(row[name])) for name in ("time_start", "time_end"))
        except (KeyError, ValueError, OverflowError) as error:
            raise FileFormatError(
                f"{location}: expected label, youtube_id, time_start, time_end and split, got {line!r:.100}"
            ) from error
        if not label:
            raise FileFormatError(f"{location}: expected a label, got {line!r:.100}; use the validation list")
        stem = f"{row['youtube_id']}_{start:06}_{end:06}"
        names = [f"{folder}{stem}" for folder in (f"{split}/{label}/", f"{label}/", f"{split}/")]
        yield LabeledVideo(
            path=next(filter(None, (find_video(videos_dir, name) for name in names)), videos_dir / names[1]),
            label=label, location=location, subset="train" if split == "train" else "test",
        )  # fmt: skip
