"""From a conversation to a prompt: the tokenizer's chat template, and images at the highest tier.

Templates put one placeholder for each image. How many tokens an image has, and what its pixels become, is
known by one of two ways of seeing: `Crops` for LLaVA-style models, `Patches` for Qwen-VL; write another as
`Sight` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2 import TemplateError
from torch import Tensor

from sparseflow.adaptive.adapters.crops import CROPS, expanded, nested_crops
from sparseflow.adaptive.plan import TIERS, Tier
from sparseflow.adaptive.serve.backend import Prompt
from sparseflow.adaptive.serve.images import decode_file
from sparseflow.adaptive.serve.limits import Limits
from sparseflow.adaptive.serve.refusal import Refusal, invalid
from sparseflow.adaptive.serve.schema import ImagePart, Message
from sparseflow.errors import InputError


class Tokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    chat_template: Any

    def apply_chat_template(self, conversation: list[dict[str, Any]], **how: Any) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> str: ...


class Sight(Protocol):
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


class Crops:
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
        """As in `Sight`."""
        ids = _encoded(self._tokenizer, text, self._image_token, len(images))
        long = expanded(ids, self._image_token, CROPS[TIERS[-1]] * self._tokens_per_crop)[None]
        # One by one: images differ in size.
        crops = [nested_crops(image, self._size, mean=self._mean, std=self._std) for image in images]
        return {"input_ids": long, "attention_mask": torch.ones_like(long), "pixel_values": torch.cat(crops)}

    def tokens(self, inputs: Mapping[str, Any]) -> dict[Tier, int]:
        """As in `Sight`."""
        images = len(inputs["pixel_values"]) // CROPS[TIERS[-1]]
        return {tier: images * crops * self._tokens_per_crop for tier, crops in CROPS.items()}


class Patches:
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
        """As in `Sight`."""
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
        """As in `Sight`."""
        # It needs transformers, which whoever has an image processor has.
        from sparseflow.adaptive.adapters.qwen3_vl import SCALES, scaled

        grids = [(rows, columns) for _, rows, columns in inputs["image_grid_thw"].tolist()]
        found: dict[Tier, int] = {}
        for tier, scale in SCALES.items():
            smaller = [scaled(grid, scale, self._merge) for grid in grids]
            found[tier] = sum(rows * columns // self._merge**2 for rows, columns in smaller)
        return found


def _encoded(tokenizer: Tokenizer, text: str, image_token: int, images: int) -> Tensor:
    """Tokens of a rendered template that has a placeholder for each image: [tokens] int64."""
    ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)
    found = int((ids == image_token).sum())
    if found != images:
        raise InputError(f"the template has {found} placeholders of {images} images")
    return ids


class Prompts:
    """Makes prompts. Several threads may use it.

    Args:
        tokenizer: With a chat template.
        context: Most tokens of a prompt and its answer together.
        sight: How images get in; None for a model that takes none.
        stop: Tokens that end an answer.
        lowest: The lowest tier that prompts may run at: where they fit at that, they are not too long.

    Raises:
        InputError: The tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: int,
        sight: Sight | None = None,
        stop: Sequence[int] = (),
        lowest: Tier = TIERS[0],
    ) -> None:
        if not tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template, so a conversation cannot become a prompt; set its "
                "`chat_template`"
            )
        self.tokenizer = tokenizer
        self.context = context
        self.stop = frozenset(stop)
        self._sight = sight
        self._lowest: Tier = lowest

    @property
    def takes_images(self) -> bool:
        """Whether the model does."""
        return self._sight is not None

    def prompt(self, messages: Sequence[Message], images: Sequence[Tensor], new_tokens: int = 1) -> Prompt:
        """The prompt of a conversation.

        Args:
            messages: The conversation.
            images: Of its image parts, in their order: each [3, height, width] uint8.
            new_tokens: Tokens that the answer is to have room for.

        Raises:
            Refusal: 400; the model takes no images, the template refuses the conversation, or the prompt is
                too long even at the lowest tier.
        """
        text, vision = self._rendered(messages), {}
        if images and self._sight is not None:
            try:
                inputs = self._sight.inputs(text, images)
                vision = self._sight.tokens(inputs)
            except (InputError, ValueError) as error:
                raise invalid(f"the images do not fit the conversation: {error}", "messages") from error
        else:
            ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)], dtype=torch.int64)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        tokens = inputs["input_ids"].shape[1]
        if not tokens:
            raise invalid("the conversation is empty: the template makes no token of it", "messages")
        text_tokens = tokens - max(vision.values(), default=0)
        prompt = Prompt(inputs=inputs, text_tokens=text_tokens, images=len(images), vision=vision)
        if self.room(prompt) < new_tokens:
            least = prompt.at(self._lowest)
            coarse = f" with images at tier {self._lowest!r}, the lowest," if images else ""
            raise Refusal(
                400,
                f"this model's context is {self.context} tokens; the messages have {least}{coarse} and the "
                f"answer is to have {new_tokens}; shorten either",
                code="context_length_exceeded", param="messages", more={"prompt_tokens": least},
            )  # fmt: skip
        return prompt

    def of_user(self, text: str, images: Sequence[Path | str] = (), new_tokens: int = 1) -> Prompt:
        """The prompt of one user's message that is no client's: what is wrong with it is an `InputError`.

        Args:
            text: What is said.
            images: Files of images, which come before the text.
            new_tokens: As of `prompt`.

        Raises:
            InputError: An image cannot be read or used, the model takes none, or the prompt is too long.
        """
        if images and not self.takes_images:
            raise InputError("this model takes no images: leave them out, or name another model")
        pictures = []
        for path in map(Path, images):
            try:
                pictures.append(decode_file(path.read_bytes(), Limits()))
            except OSError as error:
                raise InputError(f"image {path} cannot be read: {error.strerror}") from error
            except Refusal as error:
                raise InputError(f"image {path}: {error}") from error
        parts = [{"type": "image_url", "image_url": {"url": "data:,"}}] * len(images)
        message = Message.model_validate(
            {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        )
        try:
            return self.prompt([message], pictures, new_tokens)
        except Refusal as error:
            raise InputError(str(error)) from error

    def room(self, prompt: Prompt) -> int:
        """Most tokens of an answer to a prompt, which runs at the lowest tier then."""
        return self.context - prompt.at(self._lowest)

    def _rendered(self, messages: Sequence[Message]) -> str:
        conversation = [
            # Templates know no developer; he says what the system says.
            {"role": "system" if each.role == "developer" else each.role, "content": self._content(each, at)}
            for at, each in enumerate(messages)
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise invalid(f"the model's template refuses this conversation: {error}", "messages") from error
        return text

    def _content(self, message: Message, at: int) -> str | list[Mapping[str, str]]:
        parts: list[Mapping[str, str]] = []
        for place, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                if self._sight is None:
                    raise no_images(f"messages.{at}.content.{place}")
                parts.append({"type": "image"})
                continue
            if self._sight is not None and self._sight.placeholder in part.text:
                raise invalid(
                    f"text must not hold {self._sight.placeholder!r}, which stands for an image; send images "
                    "as parts",
                    f"messages.{at}.content.{place}",
                )
            parts.append({"type": "text", "text": part.text})
        # Templates of models without images expect plain text.
        return "\n".join(part["text"] for part in parts) if self._sight is None else parts


def no_images(param: str) -> Refusal:
    """What is said to a request with images where the model takes none."""
    return invalid("this model takes no images", param, code="unsupported_content")
