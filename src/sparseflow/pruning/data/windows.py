"""Windows that slide over a video at several lengths, and the frames that are taken from each.

A window of `clip_len` frames begins every `stride` = max(1, ⌊clip_len · stride_ratio⌋) frames, as long as it
fits; a video that is shorter has one, whose missing frames are the last one again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sparseflow.errors import InputError


def stride_of(clip_len: int, stride_ratio: float) -> int:
    """Frames from one window to the next.

    Raises:
        InputError: `clip_len` is below 1, or `stride_ratio` is not in (0, 1].
    """
    if clip_len < 1:
        raise InputError(f"`clip_len` (={clip_len}) must be at least 1 frame")
    if not 0 < stride_ratio <= 1:
        raise InputError(f"`stride_ratio` (={stride_ratio}) must be above 0 and at most 1")
    return max(1, math.floor(clip_len * stride_ratio))


def sliding_windows(frames: int, clip_lens: Sequence[int], stride_ratio: float) -> list[tuple[int, int]]:
    """The windows of a video, as (first frame, length), length by length.

    Args:
        frames: How many the video has.
        clip_lens: Lengths of windows, in frames, each once.
        stride_ratio: Of a window's length, to the next window.

    Raises:
        InputError: An argument is out of its range.
    """
    _check_frames(frames)
    if not clip_lens or len(set(clip_lens)) < len(clip_lens):
        raise InputError(f"`clip_lens` (={tuple(clip_lens)}) must name at least one length, and none twice")
    return [
        (start, clip_len)
        for clip_len in clip_lens
        for start in range(0, max(0, frames - clip_len) + 1, stride_of(clip_len, stride_ratio))
    ]


def frame_indices(start: int, clip_len: int, num_frames: int, frames: int) -> np.ndarray:
    """Which frames stand for a window: ⌊linspace(start, start + clip_len − 1, num_frames)⌋, evenly spread.

    Args:
        start: The window's first frame.
        clip_len: Its length.
        num_frames: How many to take; more than `clip_len` repeats some.
        frames: How many the video has; what lies beyond is its last one.

    Returns:
        Shape (num_frames,), int64, ascending.

    Raises:
        InputError: A number is not positive, or `start` is no frame of the video.
    """
    _check_frames(frames)
    if clip_len < 1 or num_frames < 1:
        raise InputError(f"`clip_len` (={clip_len}) and `num_frames` (={num_frames}) must be at least 1")
    if not 0 <= start < frames:
        raise InputError(f"`start` (={start}) must be a frame of the video, 0 to {frames - 1}")
    # In integers: a float that should be 7 may be 6.999….
    steps = np.arange(num_frames, dtype=np.int64) * (clip_len - 1) // max(1, num_frames - 1)
    return np.minimum(start + steps, frames - 1)


def jittered(start: int, clip_len: int, frames: int, stride: int, generator: np.random.Generator) -> int:
    """Another start, up to half a stride away, at which the window still fits.

    Args:
        start: The window's first frame.
        clip_len: Its length.
        frames: How many the video has.
        stride: Frames from one window to the next.
        generator: What the shift is drawn from, once.
    """
    half = stride // 2
    shifted = start + int(generator.integers(-half, half, endpoint=True))
    return min(max(shifted, 0), max(0, frames - clip_len))


def _check_frames(frames: int) -> None:
    if frames < 1:
        raise InputError(f"`frames` (={frames}) must be at least 1")
