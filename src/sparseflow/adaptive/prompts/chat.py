"""From a conversation to a prompt: the tokenizer's chat template, and images at the highest tier.

Templates put one placeholder for each image. How many tokens an image has, and what its pixels become, is
known by one of two ways of seeing: `CropProcessor` for LLaVA-style models, `PatchProcessor` for Qwen-VL;
write another as `ImagePromptProcessor` says.
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


class PromptBuilder:
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
        sight: ImagePromptProcessor | None = None,
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
            raise ApiError(
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


def no_images(param: str) -> ApiError:
    """What is said to a request with images where the model takes none."""
    return invalid("this model takes no images", param, code="unsupported_content")
