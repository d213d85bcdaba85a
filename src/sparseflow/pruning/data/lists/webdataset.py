"""Tar files of WebDataset: members with the same name up to the first dot are one sample.

::

    000001.mp4    video
    000001.cls    label: a number or a name; or `.txt`; or `.json` with `label`, `cls` or `class`
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from sparseflow.core.files import parse_json
from sparseflow.errors import FileFormatError
from sparseflow.pruning.data.decoding.file_range import FileRange, list_members
from sparseflow.pruning.data.lists.lines import LabeledVideo
from sparseflow.pruning.data.video import is_video_name

_MAX_LABEL_BYTES = 1 << 20
_JSON_KEYS = ("label", "cls", "class")


def read_shards(shards: Sequence[Path]) -> list[LabeledVideo]:
    """List the videos of tar files; their paths are `<tar file>/<member>`.

    Raises:
        FileFormatError: A tar file is damaged or compressed, or a video has no label.
    """
    return [video for shard in shards for video in _read_shard(shard)]


def _read_shard(shard: Path) -> list[LabeledVideo]:
    samples: dict[str, dict[str, str]] = {}
    members = list_members(shard)
    for name in members:
        path = PurePosixPath(name)
        key, _, suffix = path.name.partition(".")
        samples.setdefault(str(path.with_name(key or path.name)), {})[suffix.lower()] = name
    videos = []
    for key, files in samples.items():
        for name in files.values():
            if is_video_name(name):
                label = _read_label(shard, key, files, members)
                location = f"{shard}, member {name}"
                videos.append(LabeledVideo(path=shard / name, label=label, location=location))
    return videos


def _read_label(shard: Path, key: str, files: dict[str, str], members: Any) -> str:
    for suffix in ("cls", "json", "txt"):
        if suffix in files:
            label = _parse_label(suffix, members[files[suffix]])
            if label:
                return label
            raise FileFormatError(
                f"{shard}, member {files[suffix]}: expected a label; JSON has it in one of "
                f"{', '.join(_JSON_KEYS)}"
            )
    raise FileFormatError(f"{shard} has no label for {key}; expected {key}.cls, {key}.json or {key}.txt")


def _parse_label(suffix: str, content: FileRange) -> str | None:
    """Parse a label; None if it is invalid."""
    try:
        data = content.read(_MAX_LABEL_BYTES)
        value = parse_json(data) if suffix == "json" else data.decode("utf-8-sig").strip()
    except ValueError:
        return None
    if isinstance(value, dict):
        value = next((value[name] for name in _JSON_KEYS if name in value), None)
    return str(value).strip() if isinstance(value, str | int) and not isinstance(value, bool) else None
