"""A video file that PyAV decodes, read from its start or from a keyframe."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.data.decoding import checks
from sparseflow.pruning.data.decoding.file_range import FileRange
from sparseflow.pruning.data.decoding.packet_index import read_packets
from sparseflow.pruning.data.decoding.rgb import RgbConverter

_MAX_PLACEHOLDER_BYTES = 19
"""Size up to which a frame of MPEG-4 Part 2 may be a placeholder that decodes to nothing."""

_MIN_SKIPPED_FRAMES = 12
"""Frames whose decoding takes longer than reading all packets of a short video."""

_MAX_RANGES = 10
"""Ranges of frames that a message lists."""


class VideoFile:
    """A video file; implements `video.Video`.

    Attributes:
        path: Path of the file, which may be in a tar file.
        pixel_aspect: Width of a stored pixel divided by its height, known once a frame was decoded.
    """

    def __init__(self, path: Path, content: FileRange, frames: int | None) -> None:
        self.path = path
        self.pixel_aspect = Fraction(1)
        self._content, self._frames = content, frames

    @property
    def frames(self) -> int:
        """Number of frames; they are counted by decoding."""
        if self._frames is None:
            self._frames = sum(1 for _ in self.decode())
        return self._frames

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read frames in the given order; uint8, shape (n, height, width, 3), RGB."""
        checked = checks.check_indices(indices, self._frames, self.path)
        unique, order = np.unique(checked, return_inverse=True)
        images = self._read_from_keyframes(unique.tolist()) or self._read_from_start(unique.tolist())
        return np.stack([images[index] for index in order])

    def _read_from_keyframes(self, indices: list[int]) -> list[np.ndarray] | None:
        """Read ascending frames from the keyframes before them; None if the file does not permit it."""
        if self._frames is None or indices[0] < _MIN_SKIPPED_FRAMES:
            return None
        av = require("av", "pruning")
        try:
            with self._open() as (container, stream):
                size = (stream.codec_context.width, stream.codec_context.height)
                index = read_packets(container, stream, indices[0], indices[-1])
                if index is None or len(index.pts) != self._frames:
                    return None
                frames = list(index.decode(stream, indices))
        except av.FFmpegError:
            return None  # Reading from the start tells what is wrong.
        # All frames have the size of the first frame of the file.
        is_complete = len(frames) == len(indices) and (frames[0].width, frames[0].height) == size
        return list(map(RgbConverter(self), frames)) if is_complete else None

    def _read_from_start(self, indices: list[int]) -> list[np.ndarray]:
        convert, images, num_decoded = RgbConverter(self), [], 0
        with closing(self.decode()) as av_frames:
            for num_decoded, frame in enumerate(av_frames, start=1):
                if num_decoded - 1 == indices[len(images)]:
                    images.append(convert(frame))
                    if len(images) == len(indices):
                        return images
        if self._frames is None:
            raise InputError(f"frame {indices[-1]} does not exist: {self.path} has {num_decoded} frames")
        raise checks.make_count_error(self.path, num_decoded, self._frames)

    def decode(self, threads: int = 1) -> Generator[Any]:
        """Yield all frames as PyAV objects; warn at the end of frames that are interlaced or damaged."""
        av = require("av", "pruning")
        frame_pts: list[int | None] = []
        positions: set[int | None] = set()
        damaged: list[int] = []
        index: list[int] = []
        num_interlaced = announced = num_indexed = 0
        is_truncated = False
        try:
            with self._open(threads) as (container, stream):
                announced, index = stream.frames, _list_indexed_frames(stream)
                for packet in container.demux(stream):
                    if packet.size:
                        # A corrupt packet before the end is a gap, as between two joined MPEG-TS files.
                        is_truncated = packet.is_corrupt
                        positions.add(packet.pos)
                    for frame in packet.decode():
                        if frame.is_corrupt:
                            damaged.append(len(frame_pts))
                        frame_pts.append(frame.pts)
                        num_interlaced += frame.interlaced_frame
                        yield frame
                num_indexed = len(_list_indexed_frames(stream))
        except av.FFmpegError as error:
            raise FileFormatError(
                f"{self.path} does not decode after frame {len(frame_pts)}: {error.strerror}"
            ) from error
        num_decoded = len(frame_pts)
        expected = f" of {announced}" if announced else ""
        if is_truncated or (num_decoded < announced and self._is_truncated_riff()):
            raise FileFormatError(
                f"{self.path} is truncated: {num_decoded}{expected} frames decode; download it again"
            )
        if not num_decoded:
            raise FileFormatError(f"{self.path} has a video stream without frames")
        if num_decoded < min(announced, num_indexed):
            # The index of an AVI has the positions of headers, which have 8 bytes.
            lost = [number for number, pos in enumerate(index) if not {pos, pos + 8} & positions]
            affected = _format_frames({*damaged, *lost, *_find_gaps(frame_pts, announced)})
            raise FileFormatError(
                f"{self.path} is damaged{affected}: {num_decoded}{expected} frames decode; download it again"
            )
        if damaged:
            self._warn(
                f"is damaged{_format_frames(damaged)}, where the decoder conceals it; download it again"
            )
        if num_interlaced:
            self._warn(
                f"is interlaced: {num_interlaced} of {num_decoded} frames consist of two fields, and moving "
                "edges look like combs; deinterlace it with `ffmpeg -i IN -vf bwdif OUT`"
            )

    def _warn(self, message: str) -> None:
        warnings.warn(f"{self.path} {message}", stacklevel=3)

    @contextmanager
    def _open(self, threads: int = 1) -> Iterator[tuple[Any, Any]]:
        """Open the file and select the video stream that ffmpeg selects."""
        av = require("av", "pruning")
        with av.open(self._content.url, metadata_errors="replace") as container:
            if not container.streams.video:
                raise FileFormatError(f"{self.path} has no video stream")
            stream = max(container.streams.video, key=_rank_stream)
            if stream.codec_context is None:
                raise FileFormatError(f"{self.path} has a video stream without a known codec")
            stream.codec_context.options = checks.DECODER_OPTIONS
            stream.thread_count = threads
            stream.thread_type = "AUTO" if threads > 1 else "SLICE"
            aspect = stream.sample_aspect_ratio
            self.pixel_aspect = aspect if aspect and aspect > 0 else Fraction(1)
            try:
                yield container, stream
            except IndexError as error:  # PyAV does not know streams that begin later.
                raise FileFormatError(
                    f"{self.path} has a stream that does not begin at its start; copy the file with "
                    "`ffmpeg -i IN -c copy OUT.mkv`"
                ) from error

    def _is_truncated_riff(self) -> bool:
        """Whether the header of an AVI announces more bytes than the file has."""
        header = self._content.read(8)
        return header[:4] == b"RIFF" and int.from_bytes(header[4:], "little") + 8 > self._content.size


def _rank_stream(stream: Any) -> tuple[bool, bool, int]:
    """Rank a stream as ffmpeg does: no cover picture, marked as default, large."""
    kind, context = type(stream.disposition), stream.codec_context
    is_picture, is_default = stream.disposition & kind.attached_pic, stream.disposition & kind.default
    return not is_picture, bool(is_default), 0 if context is None else context.width * context.height


def _list_indexed_frames(stream: Any) -> list[int]:
    """List the positions of frames in the index of a container, without those that may decode to nothing."""
    smallest = _MAX_PLACEHOLDER_BYTES if stream.codec_context.name == "mpeg4" else 0
    return [entry.pos for entry in stream.index_entries if entry.size > smallest and not entry.is_discard]


def _find_gaps(frame_pts: Sequence[int | None], frames: int) -> Iterator[int]:
    """Yield the numbers of missing frames, which leave gaps in time; a variable rate leaves gaps, too."""
    times = np.array([pts for pts in frame_pts if pts is not None])
    if len(times) < max(2, len(frame_pts)):
        return
    steps, last = np.diff(times), 0
    for step in np.rint(steps / max(1, np.median(steps))).astype(int).tolist():
        yield from range(last + 1, min(last + step, frames))
        last += step


def _format_frames(numbers: Collection[int]) -> str:
    """Format frame numbers: `" at frames 3, 5 to 7"`."""
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f" at frames {', '.join(texts[:_MAX_RANGES])}{', …' * (len(texts) > _MAX_RANGES)}" if texts else ""
