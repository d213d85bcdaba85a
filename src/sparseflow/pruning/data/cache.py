"""Cache of decoded videos: raw frames in memory-mapped files, so that training only reads.

::

    index.jsonl                        header, then one row per video
    Archery/v_Archery_g01_c01.npy      uint8, shape (frames, height, width, 3), RGB

A file gets its name after it is complete, so an interrupted build resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import PositiveInt, TypeAdapter

from sparseflow.core.artifact import Artifact
from sparseflow.core.checks import check_at_least, check_one_of
from sparseflow.core.config import StrictModel
from sparseflow.core.files import replace_file
from sparseflow.core.journal import Journal, read_journal
from sparseflow.core.parallel import map_unordered
from sparseflow.core.progress import Progress
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.decoding.checks import check_indices
from sparseflow.pruning.data.frame_counts import ON_ERROR
from sparseflow.pruning.data.video import iterate_frames

INDEX_FILE = "index.jsonl"


class VideoCacheHeader(Artifact):
    """Header of the index.

    Attributes:
        size: Shorter side of the frames, pixels; None keeps the size of the video.
    """

    FORMAT: ClassVar[str] = "sparseflow.pruning.video-cache"
    VERSION: ClassVar[int] = 3
    HINT: ClassVar[str] = "build a new cache with `build_cache` in another directory"

    size: PositiveInt | None


class _VideoRow(StrictModel):
    name: str
    frames: PositiveInt
    height: PositiveInt
    width: PositiveInt


class _ErrorRow(StrictModel):
    name: str
    error: str


_ROW_TYPE: TypeAdapter[_VideoRow | _ErrorRow] = TypeAdapter(_VideoRow | _ErrorRow)


@dataclass(frozen=True, kw_only=True)
class CachedVideo:
    """A video of a cache; implements `video.Video`.

    Attributes:
        path: File of the frames.
        frames: Number of frames.
        height: Height of a frame, pixels.
        width: Width of a frame, pixels.
    """

    path: Path
    frames: int
    height: int
    width: int

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read frames in the given order; uint8, shape (n, height, width, 3), RGB.

        Raises:
            InputError: An index is out of range.
            FileFormatError: The file is missing or does not match the index.
        """
        checked = check_indices(indices, self.frames, self.path)
        frames = self.map_frames()
        if frames is None:
            raise FileFormatError(
                f"{self.path} is missing or damaged: expected {self.frames} frames of {self.height} x "
                f"{self.width} pixels; build the cache again"
            )
        return frames[checked]

    def map_frames(self) -> np.ndarray | None:
        """Map all frames read-only; None if the file is missing or does not match the index."""
        frames = _map_frames(self.path)
        shape = (self.frames, self.height, self.width, 3)
        return frames if frames is not None and frames.shape == shape else None


class VideoCache:
    """A directory written by `build_cache`; `cache[name]` is a video.

    Attributes:
        path: Directory.
        size: Shorter side of the frames, pixels; None for the size of the videos.
        videos: Name -> video, in the order of decoding.
        skipped: Name of a skipped video -> reason.
    """

    def __init__(self, path: Path, size: int | None, rows: Sequence[_VideoRow | _ErrorRow]) -> None:
        self.path = path
        self.size = size
        self.videos: dict[str, CachedVideo] = {}
        self.skipped: dict[str, str] = {}
        for row in rows:
            if isinstance(row, _ErrorRow):
                self.skipped[row.name] = row.error
                continue
            self.videos[row.name] = CachedVideo(
                path=_get_frames_path(path, row.name), frames=row.frames, height=row.height, width=row.width
            )
            # The video may have been repaired after it was skipped.
            self.skipped.pop(row.name, None)

    @classmethod
    def open(cls, path: Path | str) -> VideoCache:
        """Open an existing cache.

        Raises:
            InputError: The directory has no cache.
            FileFormatError: The index is damaged or has another format.
        """
        root = Path(path)
        header, rows = read_journal(root / INDEX_FILE, _ROW_TYPE, header_type=VideoCacheHeader)
        if header is None:
            raise InputError(f"{root} has no {INDEX_FILE}; build a video cache there first")
        return cls(root, header.size, rows)

    def __contains__(self, name: object) -> bool:
        return name in self.videos

    def __getitem__(self, name: str) -> CachedVideo:
        if name not in self.videos:
            reason = self.skipped.get(name, "it was not in the list of videos")
            raise InputError(f"{self.path} does not contain the video {name}: {reason}")
        return self.videos[name]


def build_cache(
    videos: Sequence[tuple[str, Path]],
    out_dir: Path | str,
    *,
    size: int | None,
    workers: int = 1,
    on_error: str = "raise",
    progress: Progress | None = None,
) -> VideoCache:
    """Decode the videos that a cache does not contain yet.

    Args:
        videos: Name and path of each video; the name determines the path in the cache.
        out_dir: Directory of the cache, created if absent.
        size: Shorter side of the frames, pixels; None keeps the size of the video.
        workers: Parallel processes.
        on_error: `"raise"`, or `"skip"` for videos that do not decode; the next build tries them again.
        progress: Called after each decoded video.

    Raises:
        InputError: An argument is out of range, a name leads out of the directory, or the directory has a
            cache of another size.
        FileFormatError: A video does not decode and `on_error` is `"raise"`, or the index is damaged.
        RunError: Another process builds a cache in the directory.
    """
    check_one_of(ON_ERROR, on_error=on_error)
    _check_names([name for name, _ in videos])
    if size is not None:
        check_at_least(1, size=size)
    root = Path(out_dir)
    root.mkdir(parents=True, exist_ok=True)
    with Journal(root / INDEX_FILE, _ROW_TYPE, header=VideoCacheHeader(size=size)) as index:
        cache = VideoCache(root, size, index.rows)
        pending = [
            (name, path) for name, path in videos if name not in cache or cache[name].map_frames() is None
        ]
        decode = partial(_decode_into_cache, root=root, size=size, skip=on_error == "skip")
        for num_done, (_, row) in enumerate(map_unordered(decode, pending, workers=workers), start=1):
            index.append(row)
            if progress is not None:
                progress(f"decoding videos, {num_done} of {len(pending)}", num_done / len(pending))
        return VideoCache(root, size, index.rows)


def _decode_into_cache(
    video: tuple[str, Path], *, root: Path, size: int | None, skip: bool
) -> _VideoRow | _ErrorRow:
    name, source = video
    path = _get_frames_path(root, name)
    frames = _map_frames(path)
    # A file without a row was completed just before its writer died.
    if frames is None:
        try:
            frames = _write_frames(path, source, size)
        except InputError as error:
            if not skip:
                raise
            return _ErrorRow(name=name, error=str(error))
    num_frames, height, width, _ = frames.shape
    return _VideoRow(name=name, frames=num_frames, height=height, width=width)


def _write_frames(path: Path, source: Path, size: int | None) -> np.ndarray:
    """Decode into a temporary file, frame by frame, and rename it when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        shape = (0,)
        for num_frames, frame in enumerate(iterate_frames(source, size=size), start=1):
            if num_frames == 1:
                _write_header(file, (0, *frame.shape))
            # The decoder may pad rows.
            file.write(np.ascontiguousarray(frame).data)
            shape = (num_frames, *frame.shape)
        # NumPy reserves space for a longer first axis, so the header keeps its length.
        file.seek(0)
        _write_header(file, shape)
    frames = _map_frames(path)
    assert frames is not None
    return frames


def _write_header(file: Any, shape: tuple[int, ...]) -> None:
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)


def _map_frames(path: Path) -> np.ndarray | None:
    """Frames of a file, mapped read-only; None if the file is missing or invalid."""
    try:
        frames = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    is_valid = isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.ndim == 4
    return np.asarray(frames) if is_valid and frames.shape[3] == 3 and frames.size else None


def _get_frames_path(root: Path, name: str) -> Path:
    return root / f"{name}.npy"


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InputError(f"video names must be unique, got {duplicate!r} twice")
    for name in names:
        path = Path(name)
        if not path.name or path.is_absolute() or ".." in path.parts or path.name != name.rpartition("/")[2]:
            raise InputError(f"the video name {name!r} must be a relative path, such as 'Class/video'")
