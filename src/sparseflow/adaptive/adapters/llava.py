"""Adapter for LLaVA-style models: vision tower, projector and a stack of blocks.

Tiers are nested crops (`crops`). A prompt of the highest tier has 14 crops per image and a placeholder for
each token of each crop; at least one other token separates two images. A lower tier keeps the first crops of
each image and their placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.adapters.placeholders import ImageAdapter, check_presence, shorten_inputs
from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.errors import ModelError, PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CLASS_TOKENS: MappingProxyType[str, int] = MappingProxyType(
    {"clip_vision_model": 1, "siglip_vision_model": 0}
)
"""Vision tower -> number of tokens that do not belong to a patch."""


class LlavaAdapter(ImageAdapter):
    """Adapter of `LlavaForConditionalGeneration`.

    Args:
        model: The model.

    Attributes:
        tokens_per_crop: Vision tokens per crop.

    Raises:
        ModelError: The vision tower is of an unknown type.
    """

    image_token_field = "image_token_index"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        config: Any = model.config
        vision = config.vision_config
        if vision.model_type not in _CLASS_TOKENS:
            raise ModelError(
                f"unknown vision tower {vision.model_type!r} (known: "
                f"{', '.join(sorted(_CLASS_TOKENS))}); subclass LlavaAdapter"
            )
        patches = (vision.image_size // vision.patch_size) ** 2
        # Like the model, which drops the first token even if it belongs to a patch.
        dropped = config.vision_feature_select_strategy == "default"
        self.tokens_per_crop = patches + _CLASS_TOKENS[vision.model_type] - dropped

    def reduce_to_tier(self, inputs: Inputs, tier: Tier | None) -> dict[str, Any]:
        """Keep the first crops of each image.

        Args:
            inputs: `input_ids` [batch, tokens] and `pixel_values` [images * 14, channels, height, width], in
                row order. Every tensor with one entry per token is shortened.
            tier: Target tier; None without images.

        Returns:
            New inputs; the given ones are unchanged.

        Raises:
            PlanError: Images are missing, not of the highest tier, or do not match the placeholders, or rows
                would differ in length.
        """
        images, pixels = self.find_images(inputs), inputs.get("pixel_values")
        check_presence(inputs, images, tier)
        if tier is None:
            return dict(inputs)
        self.check_tier(inputs, TIERS[-1])
        if not isinstance(pixels, Tensor) or len(pixels) != CROPS[TIERS[-1]] * len(images):
            crops = len(pixels) if isinstance(pixels, Tensor) else "no"
            raise PlanError(
                f"`pixel_values` have {crops} crops, but the prompt has {len(images)} images with "
                f"{CROPS[TIERS[-1]]} each; create them with "
                "sparseflow.adaptive.adapters.crops.make_nested_crops"
            )
        reduced = shorten_inputs(inputs, images, [CROPS[tier] * self.tokens_per_crop] * len(images))
        reduced["pixel_values"] = pixels.unflatten(0, (len(images), -1))[:, : CROPS[tier]].flatten(0, 1)
        return reduced

    def _check_lengths(self, lengths: Sequence[int], tier: Tier) -> None:
        size = self.tokens_per_crop
        wrong = next((length for length in lengths if length != CROPS[tier] * size), None)
        if wrong is not None:
            raise PlanError(
                f"an image has {wrong} placeholders; at tier {tier!r} it has {CROPS[tier]} crops of "
                f"{size} tokens, {CROPS[tier] * size} in total. {self._suggest_fix(wrong, tier)}"
            )

    def _suggest_fix(self, length: int, tier: Tier) -> str:
        crops, remainder = divmod(length, self.tokens_per_crop)
        if tier == TIERS[-1] and crops == 1 and not remainder:
            return (
                "The prompt is for one crop per image: create `pixel_values` with `crops.make_nested_crops` "
                "and the prompt with `crops.expand_placeholders`"
            )
        if not remainder and crops and crops % CROPS[tier] == 0:
            return "Separate images by another token"
        tier_name = next((name for name, count in CROPS.items() if count == crops and not remainder), None)
        if tier_name is not None:
            return f"The inputs are of tier {tier_name!r}; reduce those of tier {TIERS[-1]!r} instead"
        return "Create the prompt with `crops.expand_placeholders`"
