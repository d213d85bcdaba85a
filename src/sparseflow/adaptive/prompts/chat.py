"""Builds prompts from conversations: the tokenizer's chat template, and images at the highest tier.

A template contains one placeholder per image. An `ImagePromptProcessor` expands it to the image's tokens:
`CropProcessor` for LLaVA-style models, `PatchProcessor` for Qwen-VL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from jinja2 import TemplateError
from torch import Tensor

from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.adaptive.prompts.images import decode_file
from sparseflow.adaptive.prompts.messages import ApiError, ImagePart, Message, Prompt, RequestLimits, invalid
from sparseflow.adaptive.prompts.processors import ImagePromptProcessor, Tokenizer
from sparseflow.errors import InputError

_MAX_TOKEN_CHARS = 32
"""Assumed maximum of characters per token. Longer tokens are runs of one character, such as spaces."""
_MIN_TEXT_CHARS = 16384
"""Text of this length is always tokenized, which takes milliseconds."""


class PromptBuilder:
    """Builds prompts. Thread-safe.

    Attributes:
        max_text_chars: Maximum number of characters of text that the context can hold.

    Args:
        tokenizer: Tokenizer with a chat template.
        context: Maximum number of tokens of a prompt and its answer together.
        image_processor: Builder of image inputs; None for a model without images.
        lowest: Lowest tier that prompts may run at; a prompt that fits at this tier is accepted.

    Raises:
        InputError: The tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context: int,
        image_processor: ImagePromptProcessor | None = None,
        lowest: Tier = TIERS[0],
    ) -> None:
        if not tokenizer.chat_template:
            raise InputError("the tokenizer has no chat template; set its `chat_template`")
        self.tokenizer = tokenizer
        self.context = context
        self._image_processor = image_processor
        self._lowest: Tier = lowest
        self.max_text_chars = max(context * _find_longest_token(tokenizer), _MIN_TEXT_CHARS)

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images."""
        return self._image_processor is not None

    def prompt(self, messages: Sequence[Message], images: Sequence[Tensor], new_tokens: int = 1) -> Prompt:
        """Build the prompt of a conversation.

        Args:
            messages: The conversation.
            images: Pixels of its image parts, in order: [3, height, width] uint8 each.
            new_tokens: Tokens reserved for the answer.

        Raises:
            ApiError: 400; the model takes no images, the template fails, or the prompt is too long even at
                the lowest tier.
        """
        text, vision = self._render(messages), {}
        if images and self._image_processor is not None:
            try:
                inputs = self._image_processor.inputs(text, images)
                vision = self._image_processor.tokens(inputs)
            except (InputError, ValueError) as error:
                raise invalid(f"the images do not fit the conversation: {error}", "messages") from error
        else:
            ids = torch.tensor([self.tokenizer.encode(text, add_special_tokens=False)], dtype=torch.int64)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        tokens = inputs["input_ids"].shape[1]
        if not tokens:
            raise invalid("the conversation is empty: the template returns no tokens", "messages")
        text_tokens = tokens - max(vision.values(), default=0)
        prompt = Prompt(inputs=inputs, text_tokens=text_tokens, images=len(images), vision=vision)
        if self.answer_capacity(prompt) < new_tokens:
            num_tokens = prompt.count_tokens(self._lowest)
            tier = f" with images at tier {self._lowest!r}, the lowest" if images else ""
            raise ApiError(
                400,
                f"the prompt has {num_tokens} tokens{tier}, and {new_tokens} are requested for the answer; "
                f"the context of this model has {self.context}; shorten either",
                code="context_length_exceeded", param="messages", more={"prompt_tokens": num_tokens},
            )  # fmt: skip
        return prompt

    def build_user_prompt(self, text: str, images: Sequence[Path | str] = (), new_tokens: int = 1) -> Prompt:
        """Build the prompt of one user message, with errors as `InputError`.

        Args:
            text: Text of the message.
            images: Image files, placed before the text.
            new_tokens: Tokens reserved for the answer.

        Raises:
            InputError: An image cannot be read or used, the model takes none, or the prompt is too long.
        """
        if images and not self.takes_images:
            raise InputError("this model takes no images; leave them out, or use another model")
        pictures = []
        for path in map(Path, images):
            try:
                pictures.append(decode_file(path.read_bytes(), RequestLimits()))
            except OSError as error:
                raise InputError(f"image {path} cannot be read: {error.strerror}") from error
            except ApiError as error:
                raise InputError(f"image {path}: {error}") from error
        parts = [{"type": "image_url", "image_url": {"url": "data:,"}}] * len(images)
        message = Message.model_validate(
            {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
        )
        try:
            return self.prompt([message], pictures, new_tokens)
        except ApiError as error:
            raise InputError(str(error)) from error

    def answer_capacity(self, prompt: Prompt) -> int:
        """Compute the maximum number of answer tokens, with images at the lowest tier."""
        return self.context - prompt.count_tokens(self._lowest)

    def default_answer_length(self, prompt: Prompt) -> int:
        """Compute the number of answer tokens that fit at the highest tier that has room, at least 1."""
        tiers = reversed(TIERS[TIERS.index(self._lowest) :])
        capacities = (self.context - prompt.count_tokens(tier) for tier in tiers)
        return next((capacity for capacity in capacities if capacity > 0), 1)

    def _render(self, messages: Sequence[Message]) -> str:
        conversation = [
            # Chat templates have no developer role.
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": self._convert_content(message, index),
            }
            for index, message in enumerate(messages)
        ]
        try:
            return self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise invalid(f"the chat template failed: {error}", "messages") from error

    def _convert_content(self, message: Message, index: int) -> str | list[Mapping[str, str]]:
        parts: list[Mapping[str, str]] = []
        for part_index, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                if self._image_processor is None:
                    raise no_images(f"messages.{index}.content.{part_index}")
                parts.append({"type": "image"})
                continue
            if self._image_processor is not None and self._image_processor.placeholder in part.text:
                raise invalid(
                    f"text must not contain {self._image_processor.placeholder!r}, the placeholder of an "
                    "image; send images as parts",
                    f"messages.{index}.content.{part_index}",
                )
            parts.append({"type": "text", "text": part.text})
        # Templates of models without images expect plain text.
        return "\n".join(part["text"] for part in parts) if self._image_processor is None else parts


def _find_longest_token(tokenizer: Tokenizer) -> int:
    """Return the number of characters of the longest token, at most `_MAX_TOKEN_CHARS`."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    tokens: Mapping[str, int] = {} if get_vocab is None else get_vocab()
    return min(max(map(len, tokens), default=_MAX_TOKEN_CHARS), _MAX_TOKEN_CHARS)


def no_images(param: str) -> ApiError:
    """Create the error of a request with images to a model without images."""
    return invalid("this model takes no images", param, code="unsupported_content")
