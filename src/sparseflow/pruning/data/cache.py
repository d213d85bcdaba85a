"""Videos decoded beforehand: raw frames in files that are mapped into memory, so that training only reads.

::

    index.jsonl                        first what the cache is, then a line a video
    Archery/v_Archery_g01_c01.npy      uint8, shape (frames, height, width, 3), RGB

A file appears under its name when it is whole, so a build that was killed goes on where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.core.files import sync_dir
from sparseflow.core.journal import JsonLinesWriter, read_json_lines
from sparseflow.core.parallel import map_unordered
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.frame_counts import check_on_error
from sparseflow.pruning.data.video import as_indices, decoded

INDEX = "index.jsonl"

_MARK = {"format": "sparseflow.frames", "version": 1}


@dataclass(frozen=True, kw_only=True)
class CachedVideo:
    """A video of a cache; reads like any other.

    Attributes:
        path: Its file.
        frames: How many it has.
        height: Of a frame, in pixels.
        width: Likewise.
    """

    path: Path
    frames: int
    height: int
    width: int

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Some of its frames, in the order asked for; uint8, shape (n, height, width, 3), RGB.

        Raises:
            InputError: An index is no frame of the video.
            FileFormatError: Its file is missing or is not what the index says.
        """
        wanted = as_indices(indices, self.frames, self.path)
        frames = _mapped(self.path)
        if frames is None or frames.shape != (self.frames, self.height, self.width, 3):
            raise FileFormatError(
                f"{self.path} is missing or damaged: {INDEX} promises {self.frames} frames of {self.height} "
                f"× {self.width}; build the cache again"
            )
        return frames[wanted]


class VideoCache:
    """A folder that `build_cache` filled; `cache[name]` is a video.

    Attributes:
        folder: Where it lies.
        size: The shorter side of its frames, in pixels; None where they are as large as they were.
        videos: Name -> video, in the order in which they were decoded.
        skipped: Name of a video that is not there -> why.
    """

    def __init__(self, folder: Path, size: int | None, rows: Sequence[dict[str, Any]]) -> None:
        self.folder = folder
        self.size = size
        self.videos: dict[str, CachedVideo] = {}
        self.skipped: dict[str, str] = {}
        for row in rows:
            name = row["name"]
            if "error" in row:
                self.skipped[name] = row["error"]
            else:
                shape = {key: row[key] for key in ("frames", "height", "width")}
                self.videos[name] = CachedVideo(path=_file_of(folder, name), **shape)
                # It may have been mended since it was skipped.
                self.skipped.pop(name, None)

    @classmethod
    def open(cls, folder: Path | str) -> VideoCache:
        """A cache that was built.

        Raises:
            InputError: There is none in the folder.
            FileFormatError: Its index is damaged, or of something else.
        """
        root = Path(folder)
        rows = read_json_lines(root / INDEX)
        if not rows:
            raise InputError(f"{root} holds no cache of videos ({INDEX}); build one there first")
        head, *rest = rows
        if {key: head.get(key) for key in _MARK} != _MARK:
            raise FileFormatError(
                f"{root / INDEX} is not of a cache of videos, or of another version: {head}"
            )
        try:
            return cls(root, head["size"], rest)
        except (KeyError, TypeError) as error:
            raise FileFormatError(f"{root / INDEX} has a line that lacks something: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self.videos

    def __getitem__(self, name: str) -> CachedVideo:
        if name not in self.videos:
            why = self.skipped.get(name, "it was never asked for")
            raise InputError(f"{self.folder} does not hold the video {name}: {why}")
        return self.videos[name]


def build_cache(
    videos: Sequence[tuple[str, Path]],
    folder: Path | str,
    *,
    size: int | None,
    workers: int = 1,
    on_error: str = "raise",
    progress: Callable[[int, int], None] | None = None,
) -> VideoCache:
    """Decode videos into a cache, those that it does not hold yet.

    Args:
        videos: Name and path of each; the name becomes the path of its file.
        folder: Where the cache lies or shall lie.
        size: What the shorter side of frames shall be, in pixels; as it is when None.
        workers: Processes that decode.
        on_error: `"raise"`, or `"skip"` for a video that does not decode; it is tried again the next time.
        progress: Called with how many of those to decode are done and their number.

    Raises:
        InputError: An argument is out of its range, a name leads out of the folder, or the folder holds a
            cache of another size.
        FileFormatError: A video does not decode and is not to be skipped, or the index is damaged.
        RunError: Another process is building there.
    """
    check_on_error(on_error)
    _check_names([name for name, _ in videos])
    if size is not None and size < 1:
        raise InputError(f"`size` (={size}) must be at least 1 pixel, or None")
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    with closing(JsonLinesWriter(root / INDEX)) as index:
        if not read_json_lines(root / INDEX):
            index.write({**_MARK, "size": size})
        cache = VideoCache.open(root)
        if cache.size != size:
            raise InputError(
                f"{root} holds frames of size {cache.size} and {size} was asked for; name another folder"
            )
        todo = [(name, path) for name, path in videos if not _is_whole(cache, name)]
        make = partial(_make, root=root, size=size, skip=on_error == "skip")
        for done, (_, row) in enumerate(map_unordered(make, todo, workers=workers), start=1):
            index.write(row)
            if progress is not None:
                progress(done, len(todo))
        index.sync()
    return VideoCache.open(root)


def _make(video: tuple[str, Path], *, root: Path, size: int | None, skip: bool) -> dict[str, Any]:
    """Decode one video; gives its line of the index."""
    name, source = video
    path = _file_of(root, name)
    frames = _mapped(path)
    # A file that is there without its line was finished just before its writer died.
    if frames is None:
        try:
            frames = _write(path, source, size)
        except InputError as error:
            if not skip:
                raise
            return {"name": name, "error": str(error)}
    count, height, width, _ = frames.shape
    return {"name": name, "frames": count, "height": height, "width": width}


def _write(path: Path, source: Path, size: int | None) -> np.ndarray:
    """Decode into a file, frame by frame, and rename it when it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            shape = (0,)
            for count, frame in enumerate(decoded(source, size=size), start=1):
                if count == 1:
                    _write_header(file, (0, *frame.shape))
                # The decoder pads rows to its liking.
                file.write(np.ascontiguousarray(frame).data)
                shape = (count, *frame.shape)
            # NumPy leaves room for the first axis to grow, so the header is as long as it was.
            file.seek(0)
            _write_header(file, shape)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_dir(path.parent)
    frames = _mapped(path)
    assert frames is not None
    return frames


def _write_header(file: Any, shape: tuple[int, ...]) -> None:
    described = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)


def _mapped(path: Path) -> np.ndarray | None:
    """The frames of a file, mapped read-only; None where it is missing or is no file of frames."""
    try:
        frames = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return None
    sound = isinstance(frames, np.ndarray) and frames.dtype == np.uint8 and frames.ndim == 4
    return np.asarray(frames) if sound and frames.shape[3] == 3 and frames.size else None


def _is_whole(cache: VideoCache, name: str) -> bool:
    """Whether a video has both its line and its file."""
    if name not in cache:
        return False
    video, frames = cache[name], _mapped(_file_of(cache.folder, name))
    return frames is not None and frames.shape == (video.frames, video.height, video.width, 3)


def _file_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.npy"


def _check_names(names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"the video {twice} was named twice; name each once")
    for name in names:
        path = Path(name)
        if not path.name or path.is_absolute() or ".." in path.parts or path.name != name.rpartition("/")[2]:
            raise InputError(
                f"the name of a video, {name!r}, must be a path below the cache, like 'Class/video'"
            )
