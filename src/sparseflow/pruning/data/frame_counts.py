"""How many frames each video has: counted once, kept in a file.

::

    {"format": "sparseflow.frame_counts", "version": 1, "frames": {"A/v_A_g01_c01": [151, 412672]}}

Beside each count stands the size of the video, bytes of a file or entries of a folder, so that a video that
was replaced is counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from sparseflow.core.config import describe_validation_error
from sparseflow.core.files import write_atomic
from sparseflow.core.parallel import map_unordered
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.video import open_video

ON_ERROR = ("raise", "skip")

_SAVE_EVERY = 200
"""Videos that are counted between two writings of the file."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What was found.

    Attributes:
        frames: Name of a video -> its frames.
        skipped: Name of a video -> why it could not be counted.
    """

    frames: dict[str, int]
    skipped: dict[str, str]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Literal["sparseflow.frame_counts"] = "sparseflow.frame_counts"
    version: Literal[1] = 1
    frames: dict[str, tuple[PositiveInt, int]]


def count_frames(
    videos: Sequence[tuple[str, Path]],
    *,
    file: Path | str | None = None,
    workers: int = 1,
    on_error: str = "raise",
    progress: Callable[[int, int], None] | None = None,
) -> Counts:
    """Count the frames of videos, those that the file does not know.

    Args:
        videos: Name and path of each.
        file: Where counts are kept, made when absent; what it says of other videos stays. Nowhere when None.
        workers: Processes.
        on_error: `"raise"`, or `"skip"` for a video that does not decode.
        progress: Called with how many of those to count are done and their number.

    Raises:
        InputError: `on_error` is neither.
        FileFormatError: A video does not decode and is not to be skipped, or the file is something else.
    """
    check_on_error(on_error)
    path = None if file is None else Path(file)
    known = {} if path is None else _read(path)
    sizes = {name: _size_of(video) for name, video in videos}
    todo = [(name, video) for name, video in videos if known.get(name, (0, -1))[1] != sizes[name]]
    skipped: dict[str, str] = {}
    unsaved = 0
    try:
        count = partial(_count, skip=on_error == "skip")
        for done, (place, found) in enumerate(
            map_unordered(count, [video for _, video in todo], workers=workers), start=1
        ):
            name = todo[place][0]
            if isinstance(found, str):
                skipped[name] = found
            else:
                known[name] = (found, sizes[name])
                unsaved += 1
            if unsaved >= _SAVE_EVERY:
                _write(path, known)
                unsaved = 0
            if progress is not None:
                progress(done, len(todo))
    finally:
        if unsaved:
            _write(path, known)
    return Counts(frames={name: known[name][0] for name, _ in videos if name not in skipped}, skipped=skipped)


def check_on_error(on_error: str) -> None:
    """Raises InputError unless it is one of `ON_ERROR`."""
    if on_error not in ON_ERROR:
        raise InputError(f"`on_error` (={on_error!r}) must be {' or '.join(map(repr, ON_ERROR))}")


def _count(video: Path, *, skip: bool) -> int | str:
    """The frames of a video, or why they cannot be counted."""
    try:
        return open_video(video).frames
    except InputError as error:
        if not skip:
            raise
        return str(error)


def _size_of(video: Path) -> int:
    """What changes when a video is replaced; -2 where there is none, so that counting it says so."""
    try:
        return sum(1 for _ in video.iterdir()) if video.is_dir() else video.stat().st_size
    except OSError:
        return -2


def _read(path: Path) -> dict[str, tuple[int, int]]:
    try:
        content = _File.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValidationError as error:
        raise FileFormatError(
            f"{path} does not hold counts of frames: {describe_validation_error(error)}; "
            "delete it or name another file"
        ) from error
    return dict(content.frames)


def _write(path: Path | None, known: dict[str, tuple[int, int]]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, _File(frames=known).model_dump_json() + "\n")
