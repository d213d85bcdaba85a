"""Images as nested crops, coarse to fine, and prompts with the matching placeholders.

Level n is the image resized to n times the input size of the vision tower and cut into n x n crops in
row-major order. Levels 1, 2 and 3 have 1, 4 and 9 crops; a tier has the first one, two or three levels. The
crops of a tier are therefore a prefix of those of any higher tier, and their number does not depend on the
image.
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
"""Crops per side, coarse to fine; each tier adds one level."""
CROPS: MappingProxyType[Tier, int] = MappingProxyType(
    dict(zip(TIERS, accumulate(level * level for level in LEVELS), strict=True))
)
"""Crops per image at each tier: 1, 5 and 14."""


def make_nested_crops(
    images: Tensor, size: int, *, mean: Sequence[float], std: Sequence[float], tier: Tier = "high"
) -> Tensor:
    """Cut images into the crops that a vision tower takes.

    Images are resized to squares by antialiased bicubic interpolation, as in SigLIP's processor.

    Args:
        images: [channels, height, width] or [images, channels, height, width]; uint8, or floating in [0, 1].
        size: Side of a crop in pixels: the vision tower's `image_size`.
        mean: Mean per channel: the image processor's `image_mean`.
        std: Standard deviation per channel: `image_std`.
        tier: Highest tier to make crops for; `reduce_to_tier` reduces them.

    Returns:
        [images * crops, channels, size, size], image by image; float64 for float64 images, otherwise float32.

    Raises:
        InputError: The images or arguments have the wrong shape, type or range.
    """
    if images.ndim not in (3, 4) or not all(images.shape):
        raise InputError(
            f"`images` {list(images.shape)} must be [channels, height, width] or [images, "
            "channels, height, width]"
        )
    if size < 1 or tier not in CROPS:
        raise InputError(
            f"`size` (={size}) must be at least 1 and `tier` (={tier!r}) one of {', '.join(TIERS)}"
        )
    channels = images.shape[-3]
    if not channels == len(mean) == len(std) or not all(value > 0.0 for value in std):
        raise InputError(
            f"images of {channels} channels need {channels} values in `mean` (={list(mean)}) and "
            f"in `std` (={list(std)}, above 0); repeat a gray channel three times"
        )
    pixels = _scale_to_unit(images).reshape(-1, *images.shape[-3:])
    levels = [_cut_level(pixels, size, level) for level in LEVELS[: TIERS.index(tier) + 1]]
    crops = torch.cat(levels, 1).flatten(0, 1)
    shift, scale = (
        torch.tensor(values, dtype=crops.dtype, device=crops.device)[:, None, None] for values in (mean, std)
    )
    return (crops - shift) / scale


def expand_placeholders(input_ids: Tensor, image_token: int, count: int) -> Tensor:
    """Repeat each image's placeholder once per vision token.

    Args:
        input_ids: [tokens] int64 with one placeholder per image, or [batch, tokens] with equally many in each
            row.
        image_token: Placeholder: the config's `image_token_index`.
        count: Vision tokens per image; at the highest tier `CROPS["high"]` times the adapter's
            `tokens_per_crop`.

    Returns:
        [tokens] or [batch, tokens] int64; other tokens are unchanged.

    Raises:
        InputError: There are no placeholders, adjacent ones, or unequal counts per row.
    """
    if input_ids.ndim not in (1, 2) or count < 1:
        raise InputError(
            f"`input_ids` {list(input_ids.shape)} must be [tokens] or [batch, tokens], and "
            f"`count` (={count}) at least 1"
        )
    rows = input_ids.reshape(-1, input_ids.shape[-1])
    is_image = rows == image_token
    if len(is_image.sum(1).unique()) > 1 or not bool(is_image.any()):
        raise InputError(
            f"rows have {is_image.sum(1).tolist()} placeholders (token {image_token}); each needs "
            "the same number, at least one"
        )
    if bool((is_image[:, 1:] & is_image[:, :-1]).any()):
        raise InputError("adjacent placeholders: use one per image, and another token between two images")
    repeats = torch.where(is_image, count, 1)
    expanded_rows = [row.repeat_interleave(times) for row, times in zip(rows, repeats, strict=True)]
    return torch.stack(expanded_rows).reshape(*input_ids.shape[:-1], -1)


def _scale_to_unit(images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images.float() / 255.0
    if not images.is_floating_point():
        raise InputError(f"`images` of dtype {images.dtype} must be uint8, or floating in [0, 1]")
    low, high = images.aminmax()
    # Also rejects NaN.
    if not (float(low) >= 0.0 and float(high) <= 1.0):
        raise InputError(
            f"floating `images` must be in [0, 1], not in [{float(low):g}, {float(high):g}]; pass "
            "them without normalization"
        )
    return images if images.dtype == torch.float64 else images.float()


def _cut_level(pixels: Tensor, size: int, level: int) -> Tensor:
    """[images, channels, height, width] -> [images, level * level, channels, size, size]."""
    side = level * size
    if pixels.shape[-2:] != (side, side):
        pixels = functional.interpolate(pixels, size=(side, side), mode="bicubic", antialias=True)
        # Bicubic weights overshoot at edges.
        pixels = pixels.clamp(0.0, 1.0)
    cut = pixels.unflatten(-1, (level, size)).unflatten(-3, (level, size))
    return cut.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
