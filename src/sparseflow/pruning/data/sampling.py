"""Sampling of clips: sliding windows and frames, crops, resizing and normalization.

A window of `clip_len` frames starts every max(1, floor(clip_len * stride_ratio)) frames while it fits. A
shorter video has one window, padded with its last frame.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from sparseflow.core.checks import check_at_least
from sparseflow.errors import InputError

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's pixels in [0, 1]: red, green, blue."""

AREA = (0.5, 1.0)
"""Smallest and largest fraction of a frame in a random crop."""

ASPECT = (3 / 4, 4 / 3)
"""Smallest and largest aspect ratio of a random crop, width / height."""

_MAX_ATTEMPTS = 10


def compute_stride(clip_len: int, stride_ratio: float) -> int:
    """Frames between the starts of consecutive windows.

    Raises:
        InputError: `clip_len` is below 1, or `stride_ratio` is not in (0, 1].
    """
    check_at_least(1, clip_len=clip_len)
    if not 0 < stride_ratio <= 1:
        raise InputError(f"`stride_ratio` (={stride_ratio}) must be above 0 and at most 1")
    return max(1, math.floor(clip_len * stride_ratio))


def list_sliding_windows(frames: int, clip_lens: Sequence[int], stride_ratio: float) -> list[tuple[int, int]]:
    """List the windows of a video as (first frame, length), length by length.

    Args:
        frames: Frames of the video.
        clip_lens: Unique lengths of windows, frames.
        stride_ratio: Stride divided by the length of the window.

    Raises:
        InputError: An argument is out of range.
    """
    check_at_least(1, frames=frames)
    if not clip_lens or len(set(clip_lens)) < len(clip_lens):
        raise InputError(f"`clip_lens` (={tuple(clip_lens)}) must be unique lengths, at least one")
    return [
        (start, clip_len)
        for clip_len in clip_lens
        for start in range(0, max(0, frames - clip_len) + 1, compute_stride(clip_len, stride_ratio))
    ]


def select_frames(start: int, clip_len: int, num_frames: int, frames: int) -> np.ndarray:
    """Select evenly spaced frames: floor(linspace(start, start + clip_len - 1, num_frames)).

    Args:
        start: First frame of the window.
        clip_len: Length of the window.
        num_frames: Frames to select; frames repeat if it exceeds `clip_len`.
        frames: Frames of the video; indices beyond it become the last frame.

    Returns:
        Ascending indices, int64, shape (num_frames,).
    """
    # Integer arithmetic: in floating point 7 may become 6.999...
    steps = np.arange(num_frames, dtype=np.int64) * (clip_len - 1) // max(1, num_frames - 1)
    return np.minimum(start + steps, frames - 1)


def jitter_start(start: int, clip_len: int, frames: int, stride: int, generator: np.random.Generator) -> int:
    """Shift the start of a window randomly by up to half a stride, within the video.

    Args:
        start: First frame of the window.
        clip_len: Length of the window.
        frames: Frames of the video.
        stride: Frames between the starts of consecutive windows.
        generator: Source of one random number.
    """
    half = stride // 2
    shifted = start + int(generator.integers(-half, half, endpoint=True))
    return min(max(shifted, 0), max(0, frames - clip_len))


@dataclass(frozen=True, kw_only=True)
class Crop:
    """A rectangle of a frame, in pixels, and whether it is flipped horizontally."""

    row: int
    column: int
    height: int
    width: int
    flip: bool


def sample_crop(height: int, width: int, generator: np.random.Generator) -> Crop:
    """Sample a rectangle of a frame, flipped with probability 1/2.

    The area is uniform over `AREA`, the aspect ratio log-uniform over `ASPECT`. If no sample fits after a few
    attempts, the crop is the largest centered rectangle with an allowed aspect ratio.
    """
    flip = bool(generator.random() < 0.5)
    for _ in range(_MAX_ATTEMPTS):
        area = generator.uniform(*AREA) * height * width
        aspect = math.exp(generator.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        crop_height, crop_width = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < crop_height <= height and 0 < crop_width <= width:
            row = int(generator.integers(height - crop_height, endpoint=True))
            column = int(generator.integers(width - crop_width, endpoint=True))
            return Crop(row=row, column=column, height=crop_height, width=crop_width, flip=flip)
    crop_height = max(1, min(height, round(width / ASPECT[0])))
    crop_width = max(1, min(width, round(height * ASPECT[1])))
    return Crop(
        row=(height - crop_height) // 2, column=(width - crop_width) // 2, height=crop_height,
        width=crop_width, flip=flip,
    )  # fmt: skip


def crop_and_resize(frames: np.ndarray, crop: Crop, size: int) -> torch.Tensor:
    """Crop all frames alike and resize them to a square.

    Args:
        frames: uint8, shape (T, height, width, 3).
        crop: Rectangle of each frame.
        size: Side of the square, pixels.

    Returns:
        uint8, shape (T, 3, size, size).
    """
    rows = slice(crop.row, crop.row + crop.height)
    clip = _resize(frames[:, rows, crop.column : crop.column + crop.width], size, size)
    return clip.flip(-1) if crop.flip else clip


def center_crop(frames: np.ndarray, size: int) -> torch.Tensor:
    """Resize the shorter side to `size` * 256 / 224 and crop the center.

    Args:
        frames: uint8, shape (T, height, width, 3).
        size: Side of the square, pixels.

    Returns:
        uint8, shape (T, 3, size, size).
    """
    height, width = frames.shape[1:3]
    scale = round(size * 256 / 224) / min(height, width)
    clip = _resize(frames, round(height * scale), round(width * scale))
    row, column = ((side - size) // 2 for side in clip.shape[2:])
    return clip[:, :, row : row + size, column : column + size]


def normalize_clip(clip: torch.Tensor) -> torch.Tensor:
    """Compute (clip / 255 - MEAN) / STD for each channel; float32, shape (..., 3, height, width)."""
    mean, std = (255 * torch.tensor(values, device=clip.device).view(3, 1, 1) for values in (MEAN, STD))
    return clip.to(torch.float32, memory_format=torch.contiguous_format).sub_(mean).div_(std)


def _resize(frames: np.ndarray, height: int, width: int) -> torch.Tensor:
    """Resize with anti-aliased bilinear interpolation; uint8, shape (T, 3, height, width)."""
    clip = torch.from_numpy(frames).permute(0, 3, 1, 2)
    if clip.shape[2:] == (height, width):
        return clip
    return functional.interpolate(clip, size=(height, width), mode="bilinear", antialias=True)
