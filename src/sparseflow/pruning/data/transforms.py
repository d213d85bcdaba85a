"""From the frames of a clip to a network's input: cropped alike, resized, normalised as for ImageNet."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

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
