"""What a server takes from one request, and from all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from sparseflow.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Limits:
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
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0) and not (field.name == "images" and value == 0):
                raise InputError(f"`{field.name}` (={value}) must be positive and finite")
        if self.new_tokens > self.most_new_tokens:
            raise InputError(
                f"`new_tokens` (={self.new_tokens}) must not be above `most_new_tokens` "
                f"(={self.most_new_tokens})"
            )
