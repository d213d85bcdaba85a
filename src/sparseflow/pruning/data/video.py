"""Videos as arrays of RGB, from a file of video (through PyAV) or a folder of images (likewise).

Frames are counted by decoding them, since the counts that containers announce cannot be relied upon, and read
from the beginning on, since seeking is exact in few formats; decoding without converting is quick. What does
not decode to its end is an error: damage that the decoder conceals is not noticed, nor is a Matroska file
that was cut at a frame.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

VIDEO_SUFFIXES = (".avi", ".mp4", ".mkv", ".webm", ".mov")
"""Of files that are videos, in the order in which they are looked for."""

IMAGE_CODECS = {".jpg": "mjpeg", ".jpeg": "mjpeg", ".png": "png"}
"""Suffix of a frame in a folder -> its decoder."""


class Video(Protocol):
    """Frames by their place."""

    @property
    def frames(self) -> int:
        """How many there are; all of them can be read."""
        ...

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Some of them, in the order asked for; uint8, shape (n, height, width, 3), RGB."""
        ...


def find_video(root: Path | str, name: str) -> Path | None:
    """Where a video of a list lies: a file or a folder of frames, in its class's folder or without one.

    Args:
        root: The folder of videos.
        name: As in the list, without suffix: `"Archery/v_Archery_g08_c01"`.

    Returns:
        The first of `<root>/<name>.avi` (or another of `VIDEO_SUFFIXES`), `<root>/<name>/`, and the same
        without the class's folder; None where there is none of them.
    """
    for base in dict.fromkeys((Path(root) / name, Path(root) / Path(name).name)):
        for suffix in VIDEO_SUFFIXES:
            path = base.with_name(base.name + suffix)
            if path.is_file():
                return path
        if base.is_dir():
            return base
    return None


def open_video(path: Path | str, *, frames: int | None = None) -> Video:
    """A video to read from; nothing is decoded yet.

    Args:
        path: A file, or a folder of images in the order of their names (numbers in them count as numbers).
        frames: How many there are, where that is known; they are counted when asked for otherwise.

    Raises:
        InputError: There is nothing there.
        FileFormatError: A folder holds no image. Reading and counting raise it, too: for a file that does
            not decode, has no video or no frame in it, or was truncated.
    """
    path = Path(path)
    if path.is_dir():
        return _FrameFolder(path, frames)
    if not path.is_file():
        raise InputError(f"there is no video at {path}; name a file or a folder of frames")
    return _VideoFile(path, frames)


def decode(path: Path | str, *, size: int | None = None, threads: int = 1) -> np.ndarray:
    """All frames of a video.

    Args:
        path: As for `open_video`.
        size: What the shorter side shall be, in pixels; as it is when None.
        threads: Of the decoder.

    Returns:
        Shape (frames, height, width, 3), uint8, RGB.

    Raises:
        InputError: There is nothing there, or `size` or `threads` is not positive.
        FileFormatError: As for `open_video`.
    """
    return np.stack(list(decoded(path, size=size, threads=threads)))


def decoded(path: Path | str, *, size: int | None = None, threads: int = 1) -> Iterator[np.ndarray]:
    """The same one after the other, each of shape (height, width, 3), rows maybe padded; few are held."""
    if size is not None and size < 1:
        raise InputError(f"`size` (={size}) must be at least 1 pixel")
    if threads < 1:
        raise InputError(f"`threads` (={threads}) must be at least 1")
    video = open_video(path)
    assert isinstance(video, _VideoFile | _FrameFolder)
    convert = _Rgb(size)
    yield from map(convert, video.pictures(threads))


class _VideoFile:
    """A file that PyAV decodes."""

    def __init__(self, path: Path, frames: int | None) -> None:
        self.path = path
        self._frames = frames

    @property
    def frames(self) -> int:
        if self._frames is None:
            self._frames = sum(1 for _ in self.pictures())
        return self._frames

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        wanted, places = np.unique(as_indices(indices, self._frames, self.path), return_inverse=True)
        convert, found, seen = _Rgb(), [], 0
        with closing(self.pictures()) as pictures:
            for seen, picture in enumerate(pictures, start=1):
                if seen - 1 == wanted[len(found)]:
                    found.append(convert(picture))
                    if len(found) == len(wanted):
                        return np.stack([found[place] for place in places])
        if self._frames is None:
            raise InputError(f"{self.path} has {seen} frames; number {wanted[-1]} was asked for")
        raise _changed(self.path, seen, self._frames)

    def pictures(self, threads: int = 1) -> Generator[Any]:
        """PyAV's frames, all of them."""
        av = require("av", "pruning")
        seen, cut = 0, False
        try:
            # The protocol is named so that a colon in the path is not taken for one.
            with av.open(f"file:{self.path}") as container:
                if not container.streams.video:
                    raise FileFormatError(f"{self.path} has no video in it")
                stream = container.streams.video[0]
                stream.thread_count = threads
                stream.thread_type = "AUTO" if threads > 1 else "SLICE"
                announced = stream.frames
                for packet in container.demux(stream):
                    cut = cut or packet.is_corrupt
                    for picture in packet.decode():
                        seen += 1
                        yield picture
        except av.FFmpegError as error:
            raise FileFormatError(
                f"{self.path} does not decode after frame {seen}: {error.strerror}"
            ) from error
        if cut or (seen < announced and _riff_is_cut(self.path)):
            raise FileFormatError(
                f"{self.path} was truncated: {seen} frames decode of {announced} announced; get it again"
            )
        if not seen:
            raise FileFormatError(f"{self.path} has a video of no frames in it")


class _FrameFolder:
    """A folder of images of one size."""

    def __init__(self, path: Path, frames: int | None) -> None:
        self.path = path
        self._images = sorted(
            (image for image in path.iterdir() if image.suffix.lower() in IMAGE_CODECS), key=_by_number
        )
        if not self._images:
            raise FileFormatError(
                f"{path} is a folder without frames; expected {', '.join(IMAGE_CODECS)} files"
            )
        if frames is not None and frames != len(self._images):
            raise _changed(path, len(self._images), frames)
        self._counted = frames is not None

    @property
    def frames(self) -> int:
        if not self._counted:
            for _ in self.pictures():
                pass
            self._counted = True
        return len(self._images)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        wanted, places = np.unique(as_indices(indices, len(self._images), self.path), return_inverse=True)
        found = list(map(_Rgb(), self._decoded([self._images[place] for place in wanted])))
        return np.stack([found[place] for place in places])

    def pictures(self, threads: int = 1) -> Iterator[Any]:
        """PyAV's frames, all of them; an image is too small for threads to help."""
        del threads
        return self._decoded(self._images)

    def _decoded(self, images: Sequence[Path]) -> Iterator[Any]:
        av = require("av", "pruning")
        decoders: dict[str, Any] = {}
        size = None
        for image in images:
            codec = IMAGE_CODECS[image.suffix.lower()]
            if codec not in decoders:
                decoders[codec] = av.CodecContext.create(codec, "r")
                decoders[codec].thread_count = 1
            try:
                packet = av.Packet(image.read_bytes())
                # Otherwise the decoder of PNG adds it to the image before.
                packet.is_keyframe = True
                pictures = decoders[codec].decode(packet)
            except (av.FFmpegError, OSError) as error:
                raise FileFormatError(f"{image} does not decode: {error.strerror}") from error
            if len(pictures) != 1:
                raise FileFormatError(f"{image} does not decode: there is no image in it")
            (picture,) = pictures
            size = size or (picture.width, picture.height)
            if (picture.width, picture.height) != size:
                raise FileFormatError(
                    f"{image} is {picture.width} × {picture.height} pixels and other frames of its folder "
                    f"are {size[0]} × {size[1]}"
                )
            yield picture


class _Rgb:
    """Turns PyAV's frames of one video into arrays of one shape.

    Args:
        size: What the shorter side shall be, in pixels; as it is when None.
    """

    def __init__(self, size: int | None = None) -> None:
        # A frame's own `reformat` would set the conversion up anew for each.
        self._reformatter = require("av.video.reformatter", "pruning").VideoReformatter()
        self._size = size
        self._shape: tuple[int, int] | None = None

    def __call__(self, picture: Any) -> np.ndarray:
        if self._shape is None:
            width, height = picture.width, picture.height
            scale = 1 if self._size is None else self._size / min(width, height)
            self._shape = (max(1, round(width * scale)), max(1, round(height * scale)))
        width, height = self._shape
        rgb = self._reformatter.reformat(
            picture, width=width, height=height, format="rgb24", interpolation="BILINEAR", threads=1
        )
        return rgb.to_ndarray()


def as_indices(indices: Sequence[int] | np.ndarray, frames: int | None, path: Path) -> np.ndarray:
    """Places of frames, checked: shape (n,), int64.

    Args:
        indices: What was asked for.
        frames: How many there are; not looked at when None.
        path: Of the video, for the message.

    Raises:
        InputError: They are not integers in a row, or one is no frame of the video.
    """
    asked = np.asarray(indices)
    if asked.ndim != 1 or not asked.size or asked.dtype.kind not in "iu":
        raise InputError(f"`indices` (={indices}) must be integers, at least one, in one row")
    if asked.min() < 0 or (frames is not None and asked.max() >= frames):
        known = "" if frames is None else f" to {frames - 1}"
        raise InputError(f"`indices` (={asked.tolist()}) must be frames of {path}, from 0{known}")
    return asked.astype(np.int64)


def _changed(path: Path, seen: int, counted: int) -> FileFormatError:
    return FileFormatError(
        f"{path} ends after {seen} frames and {counted} had been counted; if it was replaced, count again"
    )


def _riff_is_cut(path: Path) -> bool:
    """Whether an AVI says that it is longer than its file."""
    with path.open("rb") as file:
        head = file.read(8)
    return head[:4] == b"RIFF" and int.from_bytes(head[4:], "little") + 8 > path.stat().st_size


def _by_number(image: Path) -> tuple[list[tuple[int, str]], str]:
    """So that frame_10 follows frame_9, zeros before numbers or not."""
    parts = re.findall(r"\d+|\D+", image.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], image.name
