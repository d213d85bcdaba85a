"""Lists of Something-Something v2: JSON files of videos with templates, beside `labels.json`.

::

    train.json     [{"id": "78687", "template": "Holding [something] next to [something]", ...}, ...]
    labels.json    {"Holding something next to something": "0", ...}
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from sparseflow.core.files import read_json
from sparseflow.errors import FileFormatError
from sparseflow.pruning.data.lists.lines import LabeledVideo


class _Video(BaseModel):
    """The official files have more fields."""

    id: str
    template: str


_VIDEOS = TypeAdapter(list[_Video])
_LABELS = TypeAdapter(dict[str, int])
_Content = TypeVar("_Content")


def read_template_list(path: Path, videos_dir: Path) -> list[LabeledVideo]:
    """Read a list; videos are `<videos_dir>/<id>.webm` or with another suffix.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not a list with templates. The official test list has none.
    """
    return [
        LabeledVideo(
            path=videos_dir / video.id, label=video.template.replace("[", "").replace("]", ""),
            location=f"{path}, video {video.id}",
        )
        for video in _read(path, _VIDEOS, "a list of videos with `id` and `template`")
    ]  # fmt: skip


def find_class_file(path: Path) -> Path | None:
    """Find the class file beside a list; None if there is none."""
    return next(iter(sorted(path.parent.glob("*labels.json"))), None)


def read_class_file(path: Path) -> tuple[str, ...]:
    """Read the class names by label.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file does not map names to the numbers from 0.
    """
    labels = _read(path, _LABELS, "an object of class names and numbers")
    if sorted(labels.values()) != list(range(len(labels))):
        raise FileFormatError(f"{path}: expected the numbers from 0 to {len(labels) - 1}, each once")
    return tuple(sorted(labels, key=labels.__getitem__))


def _read(path: Path, content: TypeAdapter[_Content], expected: str) -> _Content:
    try:
        return content.validate_python(read_json(path))
    except ValidationError as error:
        raise FileFormatError(f"{path}: expected {expected}, got {error.errors()[0]['msg']}") from error
