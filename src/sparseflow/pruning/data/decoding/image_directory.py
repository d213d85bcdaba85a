"""A directory of images of equal size as a video."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError
from sparseflow.pruning.data.decoding import checks
from sparseflow.pruning.data.decoding.rgb import RgbConverter

IMAGE_CODECS = {".jpg": "mjpeg", ".jpeg": "mjpeg", ".png": "png"}
"""Suffix of an image -> its decoder."""


class ImageDirectory:
    """A directory of images, in the order of their names; implements `video.Video`.

    Attributes:
        path: Directory.
        pixel_aspect: 1; the density of an image is not used.

    Raises:
        FileFormatError: The directory has no image, or another number than `frames`.
    """

    def __init__(self, path: Path, frames: int | None) -> None:
        self.path = path
        self.pixel_aspect = Fraction(1)
        self._images = sorted(
            (image for image in path.iterdir() if image.suffix.lower() in IMAGE_CODECS), key=_natural_key
        )
        if not self._images:
            raise FileFormatError(f"{path} has no frames; expected {', '.join(IMAGE_CODECS)} files")
        if frames is not None and frames != len(self._images):
            raise checks.make_count_error(path, len(self._images), frames)
        self._is_checked = frames is not None

    @property
    def frames(self) -> int:
        """Number of frames; all images are decoded first."""
        if not self._is_checked:
            for _ in self.decode():
                pass
            self._is_checked = True
        return len(self._images)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Read frames in the given order; uint8, shape (n, height, width, 3), RGB."""
        checked = checks.check_indices(indices, len(self._images), self.path)
        unique, order = np.unique(checked, return_inverse=True)
        av_frames = self._decode_images([self._images[index] for index in unique])
        images = list(map(RgbConverter(self), av_frames))
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
                decoders[codec].options = checks.DECODER_OPTIONS
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


def _natural_key(image: Path) -> tuple[list[tuple[int, str]], str]:
    """Sort key that puts frame_10 after frame_9."""
    parts = re.findall(r"\d+|\D+", image.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], image.name
