"""Refusing a request, in the words that OpenAI's clients understand.

A client turns the status into one of its exceptions and shows the message; programs look at `code`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sparseflow.adaptive.plan.space import Tier
from sparseflow.errors import InputError, SparseFlowError

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(SparseFlowError):
    """A request that gets an error for an answer.

    Args:
        status: Of HTTP, 400 to 599.
        message: What was given, what is expected and what to do.
        code: What went wrong, in a word that programs compare.
        param: The field to blame.
        retry_after_s: When another try may help.
        more: Numbers that programs need; they stand beside `message`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.more = dict(more or {})

    @property
    def body(self) -> dict[str, Any]:
        """What the client gets, as JSON keeps it."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
                **self.more,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Of the response. `Retry-After` knows whole seconds only; OpenAI's clients read milliseconds
        first."""
        if self.retry_after_s is None:
            return {}
        return {
            "Retry-After": str(max(1, math.ceil(self.retry_after_s))),
            "Retry-After-Ms": str(max(1, math.ceil(self.retry_after_s * 1000.0))),
        }


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value") -> ApiError:
    """A request that no try can make work as it is."""
    return ApiError(400, message, code=code, param=param)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Bounds that keep one request from hurting the others; over them it is refused.

    Attributes:
        body_bytes: Of a request, images included.
        body_s: Seconds in which all of a request must have come in.
        images: In one request.
        image_bytes: Of one image as it is sent, decoded from base64.
        image_pixels: Of one image, known before it is decoded.
        new_tokens: Of an answer whose request does not say.
        most_new_tokens: Of any answer.
        places: Requests that may be prepared or wait, beside those that run.
        preparing: Threads that decode images and tokenise.
    """

    body_bytes: int = 32 * 2**20
    body_s: float = 30.0
    images: int = 8
    image_bytes: int = 16 * 2**20
    image_pixels: int = 16_000_000
    new_tokens: int = 64
    most_new_tokens: int = 4096
    places: int = 64
    preparing: int = 2

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if not (math.isfinite(value) and value > 0) and not (setting.name == "images" and value == 0):
                raise InputError(f"`{setting.name}` (={value}) must be positive and finite")
        if self.new_tokens > self.most_new_tokens:
            raise InputError(
                f"`new_tokens` (={self.new_tokens}) must not be above `most_new_tokens` "
                f"(={self.most_new_tokens})"
            )


class RequestModel(BaseModel):
    """Fields that are not named are let pass; those that are must have the type that they say."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(RequestModel):
    """Text in the content of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(RequestModel):
    """Where an image is; `detail` is let pass, for the plan says how closely it is looked at."""

    url: str


class ImagePart(RequestModel):
    """An image in the content of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(RequestModel):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: list[Part]

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, content: object) -> object:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ValueError("it must be a string, or an array of parts of type text and image_url")
        return content

    @model_validator(mode="after")
    def _images_of_users(self) -> Message:
        if self.role != "user" and any(isinstance(part, ImagePart) for part in self.content):
            raise ValueError(f"images may stand in messages of the user only, not of the {self.role}")
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """A conversation as a model takes it.

    Attributes:
        inputs: Those of the highest tier, one row: `input_ids` [1, tokens] int64 and, with images, their
            pixels.
        text_tokens: Of its tokens, those that are not of images.
        images: How many.
        vision: Tokens of all images, at each tier; empty without images.
    """

    inputs: Mapping[str, Any]
    text_tokens: int
    images: int = 0
    vision: Mapping[Tier, int] = field(default_factory=dict)

    @property
    def vision_tokens(self) -> int:
        """Tokens of all images at the highest tier; 0 without images."""
        return max(self.vision.values(), default=0)

    @property
    def tokens(self) -> int:
        """Of all of it, at the highest tier."""
        return self.text_tokens + self.vision_tokens

    def at(self, tier: Tier | None) -> int:
        """Tokens of all of it at a tier; without images tiers do not matter."""
        return self.text_tokens + (0 if tier is None else self.vision.get(tier, 0))
