"""Frame counts of videos, saved to a file.

::

    {"format": "sparseflow.pruning.frame-counts", "version": 2, "frames": {"A/v_A_g01_c01": [151, 412672]}}

Each count is stored with the size of the video (bytes of a file, or entries of a directory), so that a
replaced video is counted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import PositiveInt

from sparseflow.core.artifact import Artifact
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.decoding.file_range import find_file_range
from sparseflow.pruning.data.video import open_video

ON_ERROR = ("raise", "skip")

_SAVE_INTERVAL = 200
"""Counted videos between two writes of the file."""


@dataclass(frozen=True, kw_only=True)
class FrameCounts:
    """Result of `count_frames`.

    Attributes:
        frames: Name of a video -> frames.
        skipped: Name of a video that was not counted -> reason.
    """

    frames: dict[str, int]
    skipped: dict[str, str]


class FrameCountsFile(Artifact):
    """File of frame counts.

    Attributes:
        frames: Name of a video -> frames, and size of the video.
    """

    FORMAT: ClassVar[str] = "sparseflow.pruning.frame-counts"
    VERSION: ClassVar[int] = 2
    HINT: ClassVar[str] = "delete it or choose another file"

    frames: dict[str, tuple[PositiveInt, int]]


def count_frames(
    videos: Sequence[tuple[str, Path]],
    *,
    counts_path: Path | str | None = None,
    on_error: str = "raise",
    progress: Progress | None = None,
) -> FrameCounts:
    """Count the frames of videos that the file does not have.

    Args:
        videos: Name and path of each video.
        counts_path: File of the counts, created if absent; counts of other videos are kept. None saves
            nothing.
        on_error: `"raise"`, or `"skip"` for videos that do not decode.
        progress: Called after each counted video.

    Raises:
        InputError: A video does not exist and `on_error` is `"raise"`.
        FileFormatError: A video does not decode and `on_error` is `"raise"`, or the file is invalid.
    """
    path = None if counts_path is None else Path(counts_path)
    counts = {} if path is None or not path.is_file() else dict(FrameCountsFile.load(path).frames)
    sizes = {name: _get_size(video) for name, video in videos}
    pending = [(name, video) for name, video in videos if counts.get(name, (0, -1))[1] != sizes[name]]
    skipped: dict[str, str] = {}
    num_unsaved = 0

    def save() -> None:
        if path is not None:
            FrameCountsFile(frames=counts).save(path)

    try:
        for num_done, (name, video) in enumerate(pending, start=1):
            try:
                counts[name] = (open_video(video).frames, sizes[name])
                num_unsaved += 1
            except InputError as error:
                if on_error == "raise":
                    raise
                skipped[name] = str(error)
            if num_unsaved >= _SAVE_INTERVAL:
                save()
                num_unsaved = 0
            if progress is not None:
                progress(f"counting frames, {num_done} of {len(pending)}", num_done / len(pending))
    finally:
        if num_unsaved:
            save()
    frames = {name: counts[name][0] for name, _ in videos if name not in skipped}
    return FrameCounts(frames=frames, skipped=skipped)


def _get_size(video: Path) -> int:
    """Bytes of a file or entries of a directory; -2 if absent, so that counting reports the error."""
    try:
        if video.is_dir():
            return sum(1 for _ in video.iterdir())
        content = find_file_range(video)
    except (OSError, FileFormatError):
        return -2
    return -2 if content is None else content.size
