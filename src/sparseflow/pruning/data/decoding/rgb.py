"""Conversion of decoded frames to upright RGB arrays with square pixels."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparseflow.core.extras import require
from sparseflow.errors import FileFormatError
from sparseflow.pruning.data.decoding.checks import MAX_PIXELS

_MAX_SKEW = 0.02
"""Largest sine of a rotation, about one degree, that is ignored."""


class FrameSource(Protocol):
    """A video whose frames are converted.

    Attributes:
        path: Path of the video for error messages.
        pixel_aspect: Width of a stored pixel divided by its height.
    """

    path: Path
    pixel_aspect: Fraction


class RgbConverter:
    """Converts PyAV frames of one video to upright arrays of one shape.

    Frames whose size differs from that of the first one are resized to it, as ffmpeg does.

    Args:
        source: Video of the frames.
        size: Shorter side of the arrays, pixels; None keeps the number of rows of the stored frames.
    """

    def __init__(self, source: FrameSource, size: int | None = None) -> None:
        # The `reformat` method of a frame would set up the conversion for each frame.
        self._reformatter = require("av.video.reformatter", "pruning").VideoReformatter()
        self._error: type[Exception] = require("av", "pruning").FFmpegError
        self._source, self._size = source, size
        self._shape: tuple[int, int] | None = None
        self._is_transposed: bool | None = None

    def __call__(self, frame: Any) -> np.ndarray:
        self._shape = self._shape or self._compute_shape(frame)
        width, height = self._shape
        try:
            rgb = self._reformatter.reformat(
                frame, width=width, height=height, format="rgb24", interpolation="BILINEAR", threads=1
            )
        except self._error as error:
            raise FileFormatError(
                f"{self._source.path} has frames of the format {frame.format.name}, which do not convert to "
                f"RGB: {error}"
            ) from error
        return self._orient(rgb.to_ndarray(), *_read_display_matrix(frame))

    def _compute_shape(self, frame: Any) -> tuple[int, int]:
        """Width and height of the stored frame after resizing."""
        aspect = self._source.pixel_aspect
        width, height = frame.width * aspect, frame.height
        scale = 1 if self._size is None else self._size / min(width, height)
        # ffmpeg's filter `scale=iw*sar:ih` rounds down, too.
        width, height = int(width) if scale == 1 else round(width * scale), round(height * scale)
        if width * height > MAX_PIXELS:
            raise FileFormatError(
                f"{self._source.path} has frames of {width} x {height} square pixels, because its pixels are "
                f"{aspect} times as wide as high; correct the aspect ratio"
            )
        return max(1, width), max(1, height)

    def _orient(self, image: np.ndarray, a: int, b: int, c: int, d: int) -> np.ndarray:
        """Apply the display matrix: pixel (x, y) is shown at (a x + c y, b x + d y)."""
        path, is_transposed = self._source.path, abs(b) + abs(c) > abs(a) + abs(d)
        if self._is_transposed not in (None, is_transposed):
            raise FileFormatError(f"{path} has frames of different orientations; rotate them first")
        self._is_transposed = is_transposed
        if is_transposed:
            image, a, b, c, d = image.swapaxes(0, 1), c, d, a, b
        if abs(b) + abs(c) > _MAX_SKEW * (abs(a) + abs(d)):
            raise FileFormatError(
                f"{path} is rotated by an angle that is no multiple of 90 degrees; rotate its frames with "
                "ffmpeg"
            )
        if is_transposed or a < 0 or d < 0:
            return np.ascontiguousarray(image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1])
        return image


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
