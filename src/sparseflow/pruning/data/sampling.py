"""From the frames of a clip to a network's input: cropped alike, resized, normalised as for ImageNet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from sparseflow.errors import InputError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, red, green and blue, in [0, 1]."""

AREA = (0.5, 1.0)
"""Smallest and largest part of a frame that a random crop takes."""

ASPECT = (3 / 4, 4 / 3)
"""Narrowest and widest random crop: width over height."""

_ATTEMPTS = 10


@dataclass(frozen=True, kw_only=True)
class Crop:
    """A rectangle of a frame, in pixels, and whether it is then mirrored left to right."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


def draw_crop(height: int, width: int, generator: np.random.Generator) -> Crop:
    """A random rectangle of a frame, mirrored half of the time.

    Its area is uniform over `AREA`, its aspect log-uniform over `ASPECT`. Where none fits in a few attempts
    it is the largest in the middle whose aspect is within bounds.
    """
    flip = bool(generator.random() < 0.5)
    for _ in range(_ATTEMPTS):
        area = generator.uniform(*AREA) * height * width
        aspect = math.exp(generator.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        tall, wide = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < tall <= height and 0 < wide <= width:
            top = int(generator.integers(height - tall, endpoint=True))
            left = int(generator.integers(width - wide, endpoint=True))
            return Crop(top=top, left=left, height=tall, width=wide, flip=flip)
    tall = max(1, min(height, round(width / ASPECT[0])))
    wide = max(1, min(width, round(height * ASPECT[1])))
    return Crop(top=(height - tall) // 2, left=(width - wide) // 2, height=tall, width=wide, flip=flip)


def crop_resized(frames: np.ndarray, crop: Crop, size: int) -> torch.Tensor:
    """One rectangle of all frames, as a square.

    Args:
        frames: Shape (T, height, width, 3), uint8.
        crop: Of each frame.
        size: Side of the square, in pixels.

    Returns:
        Shape (T, 3, size, size), uint8.
    """
    rows = slice(crop.top, crop.top + crop.height)
    clip = _resized(frames[:, rows, crop.left : crop.left + crop.width], size, size)
    return clip.flip(-1) if crop.flip else clip


def centre_crop(frames: np.ndarray, size: int) -> torch.Tensor:
    """The middle of all frames, after their shorter side became `size` · 256 / 224.

    Args:
        frames: Shape (T, height, width, 3), uint8.
        size: Side of the square, in pixels.

    Returns:
        Shape (T, 3, size, size), uint8.
    """
    height, width = frames.shape[1:3]
    scale = round(size * 256 / 224) / min(height, width)
    clip = _resized(frames, round(height * scale), round(width * scale))
    top, left = ((side - size) // 2 for side in clip.shape[2:])
    return clip[:, :, top : top + size, left : left + size]


def normalised(clip: torch.Tensor) -> torch.Tensor:
    """`(clip / 255 − MEAN) / STD`, channel by channel; float32, shape (T, 3, height, width) as before."""
    mean = 255 * torch.tensor(MEAN).view(3, 1, 1)
    std = 255 * torch.tensor(STD).view(3, 1, 1)
    return clip.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)


def _resized(frames: np.ndarray, height: int, width: int) -> torch.Tensor:
    """Bilinear and free of aliasing; uint8, shape (T, 3, height, width)."""
    clip = torch.from_numpy(frames).permute(0, 3, 1, 2)
    if clip.shape[2:] == (height, width):
        return clip
    return functional.interpolate(clip, size=(height, width), mode="bilinear", antialias=True)


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
