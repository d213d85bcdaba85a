"""Video decoding to RGB arrays, from video files or directories of images, with PyAV.

Frames are counted by decoding, because the counts in container headers are unreliable. A video that does not
decode to its end is an error, and so is one that decodes to fewer frames than its index lists. A warning
names frames in which the decoder conceals damage; it does not notice all damage, nor the end of a Matroska
file that was truncated between two frames. Frames of a counted video are read from the keyframe before them
if the times of its packets order all frames, otherwise from the beginning; the result is the same.

Frames look as in a player: rotations by multiples of 90 degrees and reflections in the metadata are applied,
and pixels that are not square become square. Interlaced frames are kept, with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import numpy as np

from sparseflow.errors import InputError
from sparseflow.pruning.data.decoding.file_range import find_file_range
from sparseflow.pruning.data.decoding.image_directory import ImageDirectory
from sparseflow.pruning.data.decoding.rgb import RgbConverter
from sparseflow.pruning.data.decoding.video_file import VideoFile

VIDEO_SUFFIXES = (
    ".avi", ".mp4", ".mkv", ".webm", ".mov", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".3gp", ".ogv", ".ts",
    ".mts", ".m2ts", ".vob",
)  # fmt: skip
"""Suffixes of video files, in the order of the search; upper case is found, too."""


class Video(Protocol):
    """Random access to the frames of a video."""

    @property
    def frames(self) -> int:
        """Number of frames; all of them can be read."""
        ...

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read frames in the given order; uint8, shape (n, height, width, 3), RGB."""
        ...


def find_video(root: Path | str, name: str) -> Path | None:
    """Find a video of a list: a file or a directory of frames, with or without the directory of its class.

    Args:
        root: Directory of videos.
        name: Name in the list, with or without suffix: `"Archery/v_Archery_g08_c01"`, or a member of a tar
            file: `"train-000.tar/clip.mp4"`.

    Returns:
        The first existing of `<root>/<name>.avi` (or another of `VIDEO_SUFFIXES`), `<root>/<name>`, and the
        same without the directory of the class; None if there is none.
    """
    suffixes = [spelling for suffix in VIDEO_SUFFIXES for spelling in (suffix, suffix.upper())]
    if is_video_name(name):
        suffixes = []
    with suppress(OSError):  # a name that no file can have
        for base in dict.fromkeys((Path(root) / name, Path(root) / Path(name).name)):
            for path in (*(base.with_name(base.name + suffix) for suffix in suffixes), base):
                if find_file_range(path) is not None:
                    return path
            if base.is_dir():
                return base
    return None


def is_video_name(name: str) -> bool:
    """Whether the suffix of a name is that of a video file, in any case."""
    return Path(name).suffix.lower() in VIDEO_SUFFIXES


def open_video(path: Path | str, *, frames: int | None = None) -> Video:
    """Open a video without decoding it.

    Args:
        path: A file, a member of a tar file (`shard.tar/clip.mp4`), or a directory of images in the order of
            their names (numbers in names are compared as numbers).
        frames: Number of frames, if known; otherwise it is counted when it is needed.

    Raises:
        InputError: The path does not exist.
        FileFormatError: The directory has no image. Reading and counting raise it for a file that does not
            decode, has no video stream or no frame, or is truncated.
    """
    path = Path(path)
    if path.is_dir():
        return ImageDirectory(path, frames)
    content = find_file_range(path)
    if content is None:
        raise InputError(f"{path} does not exist; expected a video file or a directory of frames")
    return VideoFile(path, content, frames)


def iterate_frames(path: Path | str, *, size: int | None = None, threads: int = 1) -> Iterator[np.ndarray]:
    """Yield all frames of a video; uint8, shape (height, width, 3), RGB, possibly with padded rows.

    Args:
        path: See `open_video`.
        size: Shorter side of the frames, pixels; None keeps the number of rows.
        threads: Threads of the decoder.

    Raises:
        InputError: The path does not exist.
        FileFormatError: See `open_video`.
    """
    video = open_video(path)
    assert isinstance(video, VideoFile | ImageDirectory)
    convert = RgbConverter(video, size)
    yield from map(convert, video.decode(threads))
