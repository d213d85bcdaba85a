"""Video decoding to RGB arrays, from video files or directories of images, with PyAV.

Frames are counted by decoding, because the counts in container headers are unreliable, and are read from the
beginning, because few formats seek exactly; decoding without color conversion is fast. A video that does not
decode to its end is an error, and so is one that decodes to fewer frames than its index lists. Damage that
the decoder conceals within a frame is not detected, nor is a Matroska file that was truncated between two
frames. Rotations by multiples of 90 degrees and reflections in the metadata are applied, as players do.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError

VIDEO_SUFFIXES = (".avi", ".mp4", ".mkv", ".webm", ".mov")
"""Suffixes of video files, in the order of the search."""

IMAGE_CODECS = {".jpg": "mjpeg", ".jpeg": "mjpeg", ".png": "png"}
"""Suffix of an image -> its decoder."""

MAX_PIXELS = 2**26
"""Largest number of pixels of a frame; a few bytes can describe a frame that does not fit into memory."""

_MAX_PLACEHOLDER_BYTES = 19
"""Size up to which a frame of MPEG-4 Part 2 may be a placeholder that decodes to nothing."""


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
        name: Name in the list, without suffix: `"Archery/v_Archery_g08_c01"`.

    Returns:
        The first existing of `<root>/<name>.avi` (or another of `VIDEO_SUFFIXES`), `<root>/<name>/`, and the
        same without the directory of the class; None if there is none.
    """
    with suppress(OSError):  # a name that no file can have
        for base in dict.fromkeys((Path(root) / name, Path(root) / Path(name).name)):
            for extension in VIDEO_SUFFIXES:
                path = base.with_name(base.name + extension)
                if path.is_file():
                    return path
            if base.is_dir():
                return base
    return None


def open_video(path: Path | str, *, frames: int | None = None) -> Video:
    """Open a video without decoding it.

    Args:
        path: A file, or a directory of images in the order of their names (numbers in names are compared as
            numbers).
        frames: Number of frames, if known; otherwise it is counted when it is needed.

    Raises:
        InputError: The path does not exist.
        FileFormatError: The directory has no image. Reading and counting raise it for a file that does not
            decode, has no video stream or no frame, or is truncated.
    """
    path = Path(path)
    if path.is_dir():
        return _FrameDirectory(path, frames)
    if not path.is_file():
        raise InputError(f"{path} does not exist; expected a video file or a directory of frames")
    return _VideoFile(path, frames)


def iterate_frames(path: Path | str, *, size: int | None = None, threads: int = 1) -> Iterator[np.ndarray]:
    """Yield all frames of a video; uint8, shape (height, width, 3), RGB, possibly with padded rows.

    Args:
        path: See `open_video`.
        size: Shorter side of the frames, pixels; None keeps the size.
        threads: Threads of the decoder.

    Raises:
        InputError: The path does not exist.
        FileFormatError: See `open_video`.
    """
    video = open_video(path)
    assert isinstance(video, _VideoFile | _FrameDirectory)
    convert = _RgbConverter(video.path, size)
    yield from map(convert, video.decode(threads))


class _VideoFile:
    """A video file that PyAV decodes."""

    def __init__(self, path: Path, frames: int | None) -> None:
        self.path = path
        self._frames = frames

    @property
    def frames(self) -> int:
        if self._frames is None:
            self._frames = sum(1 for _ in self.decode())
        return self._frames

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        checked = check_indices(indices, self._frames, self.path)
        unique, order = np.unique(checked, return_inverse=True)
        convert, images, num_decoded = _RgbConverter(self.path), [], 0
        with closing(self.decode()) as av_frames:
            for num_decoded, frame in enumerate(av_frames, start=1):
                if num_decoded - 1 == unique[len(images)]:
                    images.append(convert(frame))
                    if len(images) == len(unique):
                        return np.stack([images[index] for index in order])
        if self._frames is None:
            raise InputError(f"frame {unique[-1]} does not exist: {self.path} has {num_decoded} frames")
        raise _make_count_error(self.path, num_decoded, self._frames)

    def decode(self, threads: int = 1) -> Generator[Any]:
        """Yield all frames as PyAV objects."""
        av = require("av", "pruning")
        num_decoded, is_corrupt = 0, False
        try:
            # With an explicit protocol, a colon in the path is not parsed as one.
            with av.open(f"file:{self.path}", metadata_errors="replace") as container:
                if not container.streams.video:
                    raise FileFormatError(f"{self.path} has no video stream")
                stream = container.streams.video[0]
                if stream.codec_context is None:
                    raise FileFormatError(f"{self.path} has a video stream without a known codec")
                stream.codec_context.options = _DECODER_OPTIONS
                stream.thread_count = threads
                stream.thread_type = "AUTO" if threads > 1 else "SLICE"
                announced = stream.frames
                for packet in container.demux(stream):
                    is_corrupt = is_corrupt or packet.is_corrupt
                    for frame in packet.decode():
                        num_decoded += 1
                        yield frame
                num_indexed = _count_indexed_frames(stream)
        except av.FFmpegError as error:
            raise FileFormatError(
                f"{self.path} does not decode after frame {num_decoded}: {error.strerror}"
            ) from error
        if is_corrupt or (num_decoded < announced and _is_truncated_riff(self.path)):
            raise FileFormatError(
                f"{self.path} is truncated: {num_decoded} of {announced} frames decode; download it again"
            )
        if not num_decoded:
            raise FileFormatError(f"{self.path} has a video stream without frames")
        if num_decoded < min(announced, num_indexed):
            raise FileFormatError(
                f"{self.path} is damaged: {num_decoded} of {announced} frames decode; download it again"
            )


class _FrameDirectory:
    """A directory of images of equal size."""

    def __init__(self, path: Path, frames: int | None) -> None:
        self.path = path
        self._images = sorted(
            (image for image in path.iterdir() if image.suffix.lower() in IMAGE_CODECS), key=_natural_key
        )
        if not self._images:
            raise FileFormatError(f"{path} has no frames; expected {', '.join(IMAGE_CODECS)} files")
        if frames is not None and frames != len(self._images):
            raise _make_count_error(path, len(self._images), frames)
        self._is_checked = frames is not None

    @property
    def frames(self) -> int:
        if not self._is_checked:
            for _ in self.decode():
                pass
            self._is_checked = True
        return len(self._images)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        checked = check_indices(indices, len(self._images), self.path)
        unique, order = np.unique(checked, return_inverse=True)
        images = list(
            map(_RgbConverter(self.path), self._decode_images([self._images[index] for index in unique]))
        )
        return np.stack([images[index] for index in order])

    def decode(self, threads: int = 1) -> Iterator[Any]:
        """Yield all frames as PyAV objects; threads do not help with single images."""
        del threads
        return self._decode_images(self._images)

    def _decode_images(self, paths: Sequence[Path]) -> Iterator[Any]:
        av = require("av", "pruning")
        decoders: dict[str, Any] = {}
        size = None
        for path in paths:
            codec = IMAGE_CODECS[path.suffix.lower()]
            if codec not in decoders:
                decoders[codec] = av.CodecContext.create(codec, "r")
                decoders[codec].thread_count = 1
                decoders[codec].options = _DECODER_OPTIONS
            try:
                packet = av.Packet(path.read_bytes())
                # Otherwise the PNG decoder adds the image to the previous one.
                packet.is_keyframe = True
                frames = decoders[codec].decode(packet)
            except (av.FFmpegError, OSError) as error:
                raise FileFormatError(f"{path} does not decode: {error.strerror}") from error
            if len(frames) != 1:
                raise FileFormatError(f"{path} does not decode: expected one image, got {len(frames)}")
            (frame,) = frames
            size = size or (frame.width, frame.height)
            if (frame.width, frame.height) != size:
                raise FileFormatError(
                    f"{path} has {frame.width} x {frame.height} pixels; the first frame of its directory has "
                    f"{size[0]} x {size[1]}"
                )
            yield frame


class _RgbConverter:
    """Converts PyAV frames of one video to upright arrays of one shape.

    Args:
        path: Path of the video for error messages.
        size: Shorter side of the arrays, pixels; None keeps the size.
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        # The `reformat` method of a frame would set up the conversion for each frame.
        self._reformatter = require("av.video.reformatter", "pruning").VideoReformatter()
        self._path, self._size = path, size
        self._shape: tuple[int, int] | None = None
        self._is_transposed: bool | None = None

    def __call__(self, frame: Any) -> np.ndarray:
        if self._shape is None:
            width, height = frame.width, frame.height
            scale = 1 if self._size is None else self._size / min(width, height)
            self._shape = (max(1, round(width * scale)), max(1, round(height * scale)))
        width, height = self._shape
        rgb = self._reformatter.reformat(
            frame, width=width, height=height, format="rgb24", interpolation="BILINEAR", threads=1
        )
        return self._orient(rgb.to_ndarray(), *_read_display_matrix(frame))

    def _orient(self, image: np.ndarray, a: int, b: int, c: int, d: int) -> np.ndarray:
        """Apply the display matrix: pixel (x, y) is shown at (a x + c y, b x + d y)."""
        is_transposed = abs(b) + abs(c) > abs(a) + abs(d)
        if self._is_transposed not in (None, is_transposed):
            raise FileFormatError(f"{self._path} has frames of different orientations; rotate them first")
        self._is_transposed = is_transposed
        if is_transposed:
            image, a, b, c, d = image.swapaxes(0, 1), c, d, a, b
        if abs(b) + abs(c) > _MAX_SKEW * (abs(a) + abs(d)):
            raise FileFormatError(
                f"{self._path} is rotated by an angle that is no multiple of 90 degrees; rotate its frames "
                "with ffmpeg"
            )
        if is_transposed or a < 0 or d < 0:
            return np.ascontiguousarray(image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])
        return image


_DECODER_OPTIONS = {"max_pixels": str(MAX_PIXELS)}

_MAX_SKEW = 0.02
"""Largest sine of a rotation, about one degree, that is ignored."""


def _read_display_matrix(frame: Any) -> tuple[int, int, int, int]:
    """Read the linear part of a frame's display matrix; the identity without one."""
    try:
        matrices = [item for item in frame.side_data if item.type.name == "DISPLAYMATRIX"]
    except ValueError:  # PyAV does not know the type of Exif data, which hides reflections.
        turns = round(frame.rotation / 90) % 4
        return ((1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0))[turns]
    if not matrices:
        return 1, 0, 0, 1
    a, b, _, c, d = np.frombuffer(matrices[0], np.int32, 5).tolist()
    return a, b, c, d


def _count_indexed_frames(stream: Any) -> int:
    """Count the frames that the index of a container lists, without those that may decode to nothing."""
    smallest = _MAX_PLACEHOLDER_BYTES if stream.codec_context.name == "mpeg4" else 0
    return sum(entry.size > smallest and not entry.is_discard for entry in stream.index_entries)


def check_indices(indices: Sequence[int] | np.ndarray, frames: int | None, path: Path) -> np.ndarray:
    """Check frame indices and convert them to int64, shape (n,).

    Args:
        indices: Frame indices.
        frames: Frames of the video; None skips the check of the upper bound.
        path: Path of the video for the error message.

    Raises:
        InputError: Indices are not a non-empty sequence of integers, or one is out of range.
    """
    array = np.asarray(indices)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise InputError(f"`indices` (={indices}) must be a sequence of integers, at least one")
    if array.min() < 0 or (frames is not None and array.max() >= frames):
        upper = "" if frames is None else f" and at most {frames - 1}"
        raise InputError(f"`indices` (={array.tolist()}) must be frames of {path}: at least 0{upper}")
    return array.astype(np.int64)


def _make_count_error(path: Path, num_decoded: int, num_counted: int) -> FileFormatError:
    return FileFormatError(
        f"{path} has {num_decoded} frames, but {num_counted} were counted; if the video was replaced, delete "
        "the frame counts"
    )


def _is_truncated_riff(path: Path) -> bool:
    """Whether the header of an AVI announces more bytes than the file has."""
    with path.open("rb") as file:
        header = file.read(8)
    return header[:4] == b"RIFF" and int.from_bytes(header[4:], "little") + 8 > path.stat().st_size


def _natural_key(image: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort key that puts frame_10 after frame_9."""
    parts = re.findall(r"\d+|\D+", image.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], image.name
