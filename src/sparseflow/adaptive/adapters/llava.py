"""LLaVA-style models: a vision tower of fixed size, a projector, a stack of blocks with or without experts.

Tiers are nested crops (`crops.py`). A prompt of the highest tier has 14 crops for each image, and a
placeholder for each token of each crop; between two images stands at least one other token. A lower tier has
the first crops of each image, and their placeholders.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparseflow.adaptive.adapters.crops import CROPS
from sparseflow.adaptive.adapters.decoders import DecoderAdapter
from sparseflow.adaptive.adapters.placeholders import (
    PlaceholderSpans,
    Span,
    check_presence,
    ids_of,
    shortened,
)
from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.errors import ModelError, PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CLASS_TOKENS: MappingProxyType[str, int] = MappingProxyType(
    {"clip_vision_model": 1, "siglip_vision_model": 0}
)
"""Vision tower -> its tokens that stand for no patch."""


class LlavaAdapter(DecoderAdapter):
    """Adapter of `LlavaForConditionalGeneration`.

    Args:
        model: The model.

    Attributes:
        tokens_per_crop: Vision tokens of a crop.

    Raises:
        ModelError: The vision tower is of a kind whose crops have no fixed number of tokens.
    """

    tiers = TIERS

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        config: Any = model.config
        vision = config.vision_config
        if vision.model_type not in _CLASS_TOKENS:
            raise ModelError(
                f"vision towers of {vision.model_type!r} are not known here (known: "
                f"{', '.join(sorted(_CLASS_TOKENS))}); subclass LlavaAdapter to say how many tokens a crop "
                "has"
            )
        patches = (vision.image_size // vision.patch_size) ** 2
        # As the model does: the first token is dropped whether or not it stands for a patch.
        dropped = config.vision_feature_select_strategy == "default"
        self._runs = PlaceholderSpans()
        self.tokens_per_crop = patches + _CLASS_TOKENS[vision.model_type] - dropped

    def vision_tokens(self, inputs: Inputs) -> int:
        """How many tokens of an input are of images, in all rows."""
        return sum(length for _, _, length in self._images(inputs))

    def at_tier(self, inputs: Inputs, tier: Tier | None) -> dict[str, Any]:
        """Inputs with the first crops of each image only.

        Args:
            inputs: `input_ids` [batch, tokens] and `pixel_values` [images * 14, channels, height, width], the
                images of the first row before those of the second; whatever has an entry for each token is
                shortened.
            tier: The tier to reduce them to; None where there is no image.

        Returns:
            New inputs; those given stay as they are.

        Raises:
            PlanError: Images are not of the highest tier, or not where a prompt says, or there are none; or
                rows would come to differ in length.
        """
        images, pixels = self._images(inputs), inputs.get("pixel_values")
        check_presence(inputs, images, tier)
        if tier is None:
            return dict(inputs)
        self.check_tier(inputs, TIERS[-1])
        if not isinstance(pixels, Tensor) or len(pixels) != CROPS[TIERS[-1]] * len(images):
            crops = len(pixels) if isinstance(pixels, Tensor) else "no"
            raise PlanError(
                f"`pixel_values` are of {crops} crops, the prompt is of {len(images)} images with "
                f"{CROPS[TIERS[-1]]} each; make them with sparseflow.adaptive.adapters.crops.nested_crops"
            )
        found = shortened(inputs, images, [CROPS[tier] * self.tokens_per_crop] * len(images))
        found["pixel_values"] = pixels.unflatten(0, (len(images), -1))[:, : CROPS[tier]].flatten(0, 1)
        return found

    def check_tier(self, inputs: Inputs, tier: Tier | None) -> None:
        """That each image of a call has the placeholders of a tier.

        Raises:
            PlanError: One has others, or there are images without a tier or a tier without images.
        """
        images = self._images(inputs)
        check_presence(inputs, images, tier)
        if tier is None:
            return
        size = self.tokens_per_crop
        wrong = next((length for _, _, length in images if length != CROPS[tier] * size), None)
        if wrong is not None:
            raise PlanError(
                f"an image has {wrong} placeholders in a row; at tier {tier!r} it has {CROPS[tier]} crops of "
                f"{size} tokens, {CROPS[tier] * size}. {self._advice(wrong, tier)}"
            )

    def _images(self, inputs: Inputs) -> list[Span]:
        config: Any = self.model.config
        return self._runs.of(ids_of(inputs), config.image_token_index)

    def _advice(self, length: int, tier: Tier) -> str:
        crops, rest = divmod(length, self.tokens_per_crop)
        if tier == TIERS[-1] and crops == 1 and not rest:
            return (
                "This prompt was made for one crop an image: make `pixel_values` with "
                "sparseflow.adaptive.adapters.crops.nested_crops and the prompt with crops.expanded"
            )
        if not rest and crops and crops % CROPS[tier] == 0:
            return "Put a token between two images"
        of = next((name for name, count in CROPS.items() if count == crops and not rest), None)
        if of is not None:
            return f"These inputs are of tier {of!r}: reduce those of tier {TIERS[-1]!r} by `at_tier`"
        return "Make the prompt with sparseflow.adaptive.adapters.crops.expanded"
