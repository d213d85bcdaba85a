"""Image inputs of prompts: nested crops for LLaVA-style models, patches for Qwen-VL.

A chat template has one placeholder per image; a processor expands it to the image's tokens at the highest
tier. Other models need their own `ImagePromptProcessor`.
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
    """Tokenizer interface; transformers tokenizers implement it."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class ImagePromptProcessor(Protocol):
    """Builder of image inputs.

    Attributes:
        placeholder: Text that represents an image in a rendered template.
    """

    @property
    def placeholder(self) -> str: ...

    def inputs(self, text: str, images: Sequence[Tensor]) -> dict[str, Any]:
        """Build the model inputs at the highest tier.

        Args:
            text: Rendered template with one placeholder per image.
            images: Pixels, [3, height, width] uint8 each; at least one image.

        Returns:
            `input_ids` [1, tokens] int64 and the other inputs of the model.

        Raises:
            InputError: The number of placeholders differs from the number of images.
        """
        ...

    def tokens(self, inputs: Mapping[str, Any]) -> dict[Tier, int]:
        """Count the image tokens by tier."""
        ...


class CropProcessor:
    """Image inputs as nested crops, for `adapters.llava`.

    Args:
        tokenizer: Tokenizer of the model.
        image_token: Token id of the placeholder (`image_token_index` of the model config).
        size: Side of a crop in pixels (`image_size` of the vision tower).
        tokens_per_crop: Number of tokens of a crop.
        mean: RGB mean (`image_mean` of the image processor).
        std: RGB standard deviation (`image_std`).
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
        """Implement `ImagePromptProcessor`."""
        ids = _encode(self._tokenizer, text, self._image_token, len(images))
        long = expand_placeholders(ids, self._image_token, CROPS[TIERS[-1]] * self._tokens_per_crop)[None]
        # Images differ in size.
        crops = [make_nested_crops(image, self._size, mean=self._mean, std=self._std) for image in images]
        return {"input_ids": long, "attention_mask": torch.ones_like(long), "pixel_values": torch.cat(crops)}

    def tokens(self, inputs: Mapping[str, Any]) -> dict[Tier, int]:
        """Implement `ImagePromptProcessor`."""
        images = len(inputs["pixel_values"]) // CROPS[TIERS[-1]]
        return {tier: images * crops * self._tokens_per_crop for tier, crops in CROPS.items()}


class PatchProcessor:
    """Image inputs as patches, for Qwen-VL; `merge` × `merge` patches are one token.

    Args:
        tokenizer: Tokenizer of the model.
        image_processor: Callable with `images` and `return_tensors` that returns `pixel_values` and
            `image_grid_thw`, such as `Qwen2VLImageProcessorPil` of transformers.
        image_token: Token id of the placeholder (`image_token_id` of the model config).
        merge: `spatial_merge_size` of the vision config.
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
        """Implement `ImagePromptProcessor`."""
        ids = _encode(self._tokenizer, text, self._image_token, len(images))
        features = self._image_processor(images=list(images), return_tensors="pt")
        repeats = torch.ones_like(ids)
        repeats[ids == self._image_token] = features["image_grid_thw"].prod(1) // self._merge**2
        long = ids.repeat_interleave(repeats)[None]
        return {
            "input_ids": long,
            "attention_mask": torch.ones_like(long),
            "mm_token_type_ids": (long == self._image_token).int(),
            "pixel_values": features["pixel_values"],
            "image_grid_thw": features["image_grid_thw"],
        }

    def tokens(self, inputs: Mapping[str, Any]) -> dict[Tier, int]:
        """Implement `ImagePromptProcessor`."""
        # Imported late: it needs transformers.
        from sparseflow.adaptive.adapters.qwen3_vl import SCALES, scale_grid

        grids = [(rows, columns) for _, rows, columns in inputs["image_grid_thw"].tolist()]
        num_tokens: dict[Tier, int] = {}
        for tier, scale in SCALES.items():
            smaller = [scale_grid(grid, scale, self._merge) for grid in grids]
            num_tokens[tier] = sum(rows * columns // self._merge**2 for rows, columns in smaller)
        return num_tokens


def _encode(tokenizer: Tokenizer, text: str, image_token: int, images: int) -> Tensor:
    """Encode a rendered template and check its placeholders; returns [tokens] int64."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)
    num_placeholders = int((ids == image_token).sum())
    if num_placeholders != images:
        raise InputError(f"the template has {num_placeholders} placeholders for {images} images")
    return ids
