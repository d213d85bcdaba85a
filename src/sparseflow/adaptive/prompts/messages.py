"""Messages, prompts, request limits and errors of the OpenAI-compatible API.

Clients map the HTTP status to an exception and show the message; programs compare `code`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from sparseflow.adaptive.plan.space import Tier
from sparseflow.errors import InputError, SparseFlowError

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(SparseFlowError):
    """Error response to a request.

    Args:
        status: HTTP status, 400 to 599.
        message: What was given, what is expected and what to do.
        code: Machine-readable error code.
        param: Invalid field of the request.
        retry_after_s: Seconds after which a retry may succeed.
        more: Additional fields of the error, next to `message`.
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
        """JSON body of the response."""
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
        """HTTP headers of the response.

        `Retry-After` is in whole seconds; OpenAI clients read `Retry-After-Ms` first.
        """
        if self.retry_after_s is None:
            return {}
        return {
            "Retry-After": str(max(1, math.ceil(self.retry_after_s))),
            "Retry-After-Ms": str(max(1, math.ceil(self.retry_after_s * 1000.0))),
        }


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value") -> ApiError:
    """Create the error of an invalid request (400)."""
    return ApiError(400, message, code=code, param=param)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits on the size of requests; a request above a limit is rejected.

    Attributes:
        body_bytes: Maximum size of a request with its images.
        total_body_bytes: Maximum size of all requests that are received or prepared.
        body_s: Maximum time to receive a request.
        messages: Maximum number of messages in a request.
        parts: Maximum number of content parts in a request.
        text_chars: Maximum number of characters of text in a request; by default what the context can hold.
        images: Maximum number of images in a request.
        image_bytes: Maximum size of an image file, after base64 decoding.
        image_pixels: Maximum number of pixels of an image, checked before decoding.
        new_tokens: Maximum answer length of a request that sets a budget and no length.
        max_new_tokens: Maximum answer length.
        max_queued: Maximum number of requests that are prepared or wait, in addition to the running ones.
        prepare_threads: Number of threads that decode images and tokenize.
    """

    body_bytes: int = 32 * 2**20
    total_body_bytes: int = 256 * 2**20
    body_s: float = 30.0
    messages: int = 1024
    parts: int = 2048
    text_chars: int | None = None
    images: int = 8
    image_bytes: int = 16 * 2**20
    image_pixels: int = 16_000_000
    new_tokens: int = 64
    max_new_tokens: int = 4096
    max_queued: int = 64
    prepare_threads: int = 2

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if value is None:
                continue
            if not (math.isfinite(value) and value > 0) and not (setting.name == "images" and value == 0):
                raise InputError(f"`{setting.name}` (={value}) must be positive and finite")
        if self.new_tokens > self.max_new_tokens:
            raise InputError(
                f"`new_tokens` (={self.new_tokens}) must not be above `max_new_tokens` "
                f"(={self.max_new_tokens})"
            )


class RequestModel(BaseModel):
    """Base model: fields are validated strictly, and unknown fields are refused.

    Null is the same as an absent field.

    Attributes:
        IGNORED: Fields that are accepted with any value, because they cannot change the answer.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    IGNORED: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, content: object) -> object:
        if not isinstance(content, dict):
            return content
        known = cls.model_fields
        return {
            name: value
            for name, value in content.items()
            if name in known or not (value is None or name in cls.IGNORED)
        }


class TextPart(RequestModel):
    """Text in the content of a message."""

    IGNORED = frozenset({"annotations", "cache_control"})

    type: Literal["text"]
    text: str


class ImageUrl(RequestModel):
    """URL of an image; `detail` is ignored because the plan selects the resolution."""

    IGNORED = frozenset({"detail", "format"})

    url: str


class ImagePart(RequestModel):
    """An image in the content of a message."""

    IGNORED = frozenset({"cache_control"})

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]
_TOOL_FIELDS = ("tool_calls", "function_call", "tool_call_id")
_TOOL_ROLES = ("tool", "function")


class Message(RequestModel):
    """One turn of a conversation."""

    IGNORED = frozenset({"name", "annotations", "cache_control", "provider_specific_fields"})

    role: Literal["system", "developer", "user", "assistant"]
    content: list[Part]

    @model_validator(mode="before")
    @classmethod
    def _refuse_tools(cls, content: object) -> object:
        if not isinstance(content, dict):
            return content
        role_is_tool = content.get("role") in _TOOL_ROLES
        if not role_is_tool and any(content.get(name) for name in _TOOL_FIELDS):
            raise ValueError("tool calls are not implemented; send text instead")
        return {name: value for name, value in content.items() if name not in _TOOL_FIELDS}

    @field_validator("role", mode="before")
    @classmethod
    def _refuse_tool_role(cls, role: object) -> object:
        if role in _TOOL_ROLES:
            raise ValueError("tool calls are not implemented; send system, user and assistant messages")
        return role

    @field_validator("content", mode="before")
    @classmethod
    def _parts(cls, content: object) -> object:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ValueError("must be a string or an array of parts of type text and image_url")
        return content

    @model_validator(mode="after")
    def _images_of_users(self) -> Message:
        if self.role != "user" and any(isinstance(part, ImagePart) for part in self.content):
            raise ValueError(f"images are allowed in user messages only (role={self.role})")
        return self


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """Model inputs of a conversation.

    Attributes:
        inputs: Inputs at the highest tier, one row: `input_ids` [1, tokens] int64 and pixels of images.
        text_tokens: Number of text tokens.
        images: Number of images.
        vision: Number of image tokens by tier; empty without images.
    """

    inputs: Mapping[str, Any]
    text_tokens: int
    images: int = 0
    vision: Mapping[Tier, int] = field(default_factory=dict)

    @property
    def vision_tokens(self) -> int:
        """Number of image tokens at the highest tier; 0 without images."""
        return max(self.vision.values(), default=0)

    @property
    def tokens(self) -> int:
        """Number of tokens at the highest tier."""
        return self.text_tokens + self.vision_tokens

    def count_tokens(self, tier: Tier | None) -> int:
        """Count the tokens at a tier; None counts the text only."""
        return self.text_tokens + (0 if tier is None else self.vision.get(tier, 0))
