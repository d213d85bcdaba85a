"""From a conversation to a prompt: the tokenizer's chat template, and images at the highest tier.

Templates put one placeholder for each image. How many tokens an image has, and what its pixels become, is
known by one of two ways of seeing: `CropProcessor` for LLaVA-style models, `PatchProcessor` for Qwen-VL;
write another as `ImagePromptProcessor` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sparseflow.adaptive.adapters.crops import CROPS, expand_placeholders, make_nested_crops
from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.errors import InputError


class Tokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, Any]], **how: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class ImagePromptProcessor(Protocol):
    """How images get into a prompt.

    Attributes:
        placeholder: What stands in a rendered template for an image.
    """

    @property
    def placeholder(self) -> str: ...

    def inputs(self, text: str, images: Sequence[Tensor]) -> dict[str, Any]:
        """Inputs of the highest tier.

        Args:
            text: A rendered template, with a placeholder for each image.
            images: Each [3, height, width] uint8; at least one.

        Returns:
            `input_ids` [1, tokens] int64 and what else the model takes.

        Raises:
            InputError: The template and the images do not fit.
        """
        ...

    def tokens(self, inputs: Mapping[str, Any]) -> dict[Tier, int]:
        """How many tokens all images of such inputs have at each tier."""
        ...


class CropProcessor:
    """Images as nested crops, as `adapters.llava` takes them.

    Args:
        tokenizer: Of the model.
        image_token: The placeholder's number, in the configuration `image_token_index`.
        size: Side of a crop in pixels: the vision tower's `image_size`.
        tokens_per_crop: As of the adapter.
        mean: Of red, green and blue, as in the image processor's `image_mean`.
        std: Of each, as in `image_std`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        image_token: int,
        size: int,
        tokens_per_crop: int,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        self.placeholder = tokenizer.decode([image_token], skip_special_tokens=False)
        self._tokenizer = tokenizer
        self._image_token = image_token
        self._tokens_per_crop = tokens_per_crop
        self._size, self._mean, self._std = size, tuple(mean), tuple(std)

    def inputs(self, text: str, images: Sequence[Tensor]) -> dict[str, Any]:
        """As in `ImagePromptProcessor`."""
        ids = _encoded(self._tokenizer, text, self._image_token, len(images))
        long = expand_placeholders(ids, self._image_token, CROPS[TIERS[-1]] * self._tokens_per_crop)[None]
        # One by one: images differ in size.
        crops = [make_nested_crops(image, self._size, mean=self._mean, std=self._std) for image in images]
        return {"input_ids": long, "attention_mask": torch.ones_like(long), "pixel_values": torch.cat(crops)}

    def tokens(self, inputs: Mapping[str, Any]) -> dict[Tier, int]:
        """As in `ImagePromptProcessor`."""
        images = len(inputs["pixel_values"]) // CROPS[TIERS[-1]]
        return {tier: images * crops * self._tokens_per_crop for tier, crops in CROPS.items()}


class PatchProcessor:
    """Images as patches, as Qwen-VL takes them: a token for each square of `merge` by `merge` of them.

    Args:
        tokenizer: Of the model.
        image_processor: Called with `images` and `return_tensors`; gives `pixel_values` and `image_grid_thw`,
            as `Qwen2VLImageProcessorPil` of transformers.
        image_token: The placeholder's number, in the configuration `image_token_id`.
        merge: In the vision configuration `spatial_merge_size`.
    """

    def __init__(
        self, tokenizer: Tokenizer, image_processor: Callable[..., Any], *, image_token: int, merge: int
    ) -> None:
        self.placeholder = tokenizer.decode([image_token], skip_special_tokens=False)
        self._tokenizer = tokenizer
        self._image_processor = image_processor
        self._image_token = image_token
        self._merge = merge

    def inputs(self, text: str, images: Sequence[Tensor]) -> dict[str, Any]:
        """As in `ImagePromptProcessor`."""
        ids = _encoded(self._tokenizer, text, self._image_token, len(images))
        found = self._image_processor(images=list(images), return_tensors="pt")
        repeats = torch.ones_like(ids)
        repeats[ids == self._image_token] = found["image_grid_thw"].prod(1) // self._merge**2
        long = ids.repeat_interleave(repeats)[None]
        return {
            "input_ids": long,
            "attention_mask": torch.ones_like(long),
            "mm_token_type_ids": (long == self._image_token).int(),
            "pixel_values": found["pixel_values"],
            "image_grid_thw": found["image_grid_thw"],
        }

    def tokens(self, inputs: Mapping[str, Any]) -> dict[Tier, int]:
        """As in `ImagePromptProcessor`."""
        # It needs transformers, which whoever has an image processor has.
        from sparseflow.adaptive.adapters.qwen3_vl import SCALES, scale_grid

        grids = [(rows, columns) for _, rows, columns in inputs["image_grid_thw"].tolist()]
        found: dict[Tier, int] = {}
        for tier, scale in SCALES.items():
            smaller = [scale_grid(grid, scale, self._merge) for grid in grids]
            found[tier] = sum(rows * columns // self._merge**2 for rows, columns in smaller)
        return found


def _encoded(tokenizer: Tokenizer, text: str, image_token: int, images: int) -> Tensor:
    """Tokens of a rendered template that has a placeholder for each image: [tokens] int64."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)
    found = int((ids == image_token).sum())
    if found != images:
        raise InputError(f"the template has {found} placeholders of {images} images")
    return ids
