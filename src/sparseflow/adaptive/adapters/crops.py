"""Images as nested crops, coarse to fine, and the placeholders that a prompt needs for them.

Level n is the image resized to n x n times the size that the vision tower takes, cut into n x n crops, row by
row. Levels 1, 2 and 3 have 1, 4 and 9 crops; a tier has the first one, two or three levels. So the crops of a
tier are the first of those of any higher one, and what they cost is known before an image is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.errors import InputError

LEVELS = (1, 2, 3)
"""Crops along a side, from coarse to fine; a tier adds one level."""
CROPS: MappingProxyType[Tier, int] = MappingProxyType(
    dict(zip(TIERS, accumulate(level * level for level in LEVELS), strict=True))
)
"""Crops of an image at each tier: 1, 5 and 14."""


def nested_crops(
    images: Tensor, size: int, *, mean: Sequence[float], std: Sequence[float], tier: Tier = "high"
) -> Tensor:
    """Crops of images, as a vision tower takes them.

    An image is resized to a square, as SigLIP's own processor does, by antialiased bicubic interpolation.

    Args:
        images: [channels, height, width], or [images, channels, height, width]; uint8, or floating between
            0 and 1.
        size: Side of a crop, in pixels: the vision tower's `image_size`.
        mean: Of each channel, as in the image processor's `image_mean`.
        std: Of each channel, as in `image_std`.
        tier: Crops of the levels up to this one; `at_tier` reduces those of the highest.

    Returns:
        [images * crops, channels, size, size], all crops of the first image before those of the second;
        float64 of a float64 image, else float32.

    Raises:
        InputError: These are no such images.
    """
    if images.ndim not in (3, 4) or not all(images.shape):
        raise InputError(
            f"`images` {list(images.shape)} must be [channels, height, width], or several of them"
        )
    if size < 1 or tier not in CROPS:
        raise InputError(
            f"`size` (={size}) must be at least 1 and `tier` (={tier!r}) one of {', '.join(TIERS)}"
        )
    channels = images.shape[-3]
    if not channels == len(mean) == len(std) or not all(value > 0.0 for value in std):
        raise InputError(
            f"images of {channels} channels need as many of `mean` (={list(mean)}) and of `std` "
            f"(={list(std)}), all above 0; make a grey image three alike channels first"
        )
    pixels = _unit(images).reshape(-1, *images.shape[-3:])
    levels = [_level(pixels, size, level) for level in LEVELS[: TIERS.index(tier) + 1]]
    crops = torch.cat(levels, 1).flatten(0, 1)
    shift, scale = (
        torch.tensor(each, dtype=crops.dtype, device=crops.device)[:, None, None] for each in (mean, std)
    )
    return (crops - shift) / scale


def expanded(input_ids: Tensor, image_token: int, count: int) -> Tensor:
    """A prompt in which each image's one placeholder is as many as the image has tokens.

    Args:
        input_ids: [tokens] int64, with one placeholder for each image, or [batch, tokens] with as many in
            each row.
        image_token: The placeholder, in the configuration `image_token_index`.
        count: Tokens of an image; at the highest tier `CROPS["high"]` times the adapter's `tokens_per_crop`.

    Returns:
        [tokens] or [batch, tokens] int64, with all other tokens as they were.

    Raises:
        InputError: There is no placeholder, two side by side, or not as many in each row.
    """
    if input_ids.ndim not in (1, 2) or count < 1:
        raise InputError(
            f"`input_ids` {list(input_ids.shape)} must be [tokens] or [batch, tokens] and `count` (={count}) "
            "at least 1"
        )
    rows = input_ids.reshape(-1, input_ids.shape[-1])
    is_image = rows == image_token
    if len(is_image.sum(1).unique()) > 1 or not bool(is_image.any()):
        raise InputError(
            f"rows have {is_image.sum(1).tolist()} placeholders (token {image_token}); each needs at least "
            "one, and all as many"
        )
    if bool((is_image[:, 1:] & is_image[:, :-1]).any()):
        raise InputError(
            "placeholders stand side by side: give one for each image, and a token between two images"
        )
    repeats = torch.where(is_image, count, 1)
    longer = [row.repeat_interleave(times) for row, times in zip(rows, repeats, strict=True)]
    return torch.stack(longer).reshape(*input_ids.shape[:-1], -1)


def _unit(images: Tensor) -> Tensor:
    """Pixels between 0 and 1."""
    if images.dtype == torch.uint8:
        return images.float() / 255.0
    if not images.is_floating_point():
        raise InputError(f"`images` of {images.dtype} must be uint8, or floating between 0 and 1")
    low, high = images.aminmax()
    # NaN fails, too.
    if not (float(low) >= 0.0 and float(high) <= 1.0):
        raise InputError(
            f"floating `images` must lie between 0 and 1, not between {float(low):g} and {float(high):g}; "
            "give them as they are before normalisation"
        )
    return images if images.dtype == torch.float64 else images.float()


def _level(pixels: Tensor, size: int, level: int) -> Tensor:
    """[images, channels, height, width] -> [images, level * level, channels, size, size]."""
    side = level * size
    if pixels.shape[-2:] != (side, side):
        pixels = functional.interpolate(pixels, size=(side, side), mode="bicubic", antialias=True)
        # Bicubic weights overshoot at edges.
        pixels = pixels.clamp(0.0, 1.0)
    cut = pixels.unflatten(-1, (level, size)).unflatten(-3, (level, size))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
