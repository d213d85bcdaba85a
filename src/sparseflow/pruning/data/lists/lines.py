"""Videos with the labels of a list, and the lines of text files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparseflow.errors import FileFormatError, InputError

Subset = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class LabeledVideo:
    """A video of a list.

    Attributes:
        path: Path of the video, possibly without suffix.
        label: Name or number of its class.
        location: File and line for error messages.
        subset: `"train"` or `"test"` if the list says it.
    """

    path: Path
    label: str
    location: str
    subset: Subset | None = None


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of each line that is not blank.

    Raises:
        InputError: The file does not exist.
        FileFormatError: The file is not text in UTF-8.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist; expected a list of videos or classes") from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} is not a readable list in UTF-8: {error}") from error
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield f"{path}, line {number}", line.strip()
