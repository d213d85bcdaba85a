"""Checks of frame indices and counts, and the largest frame that is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparseflow.errors import FileFormatError, InputError

MAX_PIXELS = 2**26
"""Largest number of pixels of a frame; a few bytes can describe a frame that does not fit into memory."""

DECODER_OPTIONS = {"max_pixels": str(MAX_PIXELS)}


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


def make_count_error(path: Path, num_decoded: int, num_counted: int) -> FileFormatError:
    """Make the error of a video whose number of frames is not the counted one."""
    return FileFormatError(
        f"{path} has {num_decoded} frames, but {num_counted} were counted; if the video was replaced, delete "
        "the frame counts"
    )
