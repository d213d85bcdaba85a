"""What a predictor is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sparseflow.adaptive.plan import Plan
from sparseflow.errors import InputError

After = Literal["receipt", "vision", "insertion"]
"""How far a request has come: nothing has run, its image was seen, or the blocks before the insertion ran."""
AFTERS: tuple[After, ...] = get_args(After)


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request, and how it would be run.

    Attributes:
        plan: Without a tier for a request without image.
        text_tokens: Of the prompt, those that are not of images.
        images: How many, counted in images of the profile's size (`About.images`): one with a quarter of the
            tokens is 0.25. They become tokens in proportion. Smaller ones than the profile's take as long to
            be seen as that one: how far below it a vision tower's time falls was not measured.
        new_tokens: To be generated, at least 1; the first comes from the prefill.
        batch: Requests that run when its turn comes, itself included.
        load: Share of the device that others want, 0 to 1; of an engine, `Engine.load`.
        queued_ms: What it waited, or will.
        after: How far it has come; what is predicted is what remains from there, and what it waited.

    Raises:
        InputError: A figure is NaN, negative or otherwise out of range.
    """

    plan: Plan
    text_tokens: int
    images: float
    new_tokens: int
    batch: int = 1
    load: float = 0.0
    queued_ms: float = 0.0
    after: After = "receipt"

    def __post_init__(self) -> None:
        check_sizes(self.text_tokens, self.images, self.new_tokens, self.batch, self.load, self.queued_ms)
        if (self.plan.tier is None) != (self.images == 0):
            raise InputError(
                f"`images` (={self.images}) and the plan's tier (={self.plan.tier!r}) do not fit: a request "
                "without image has no tier, one with images has"
            )
        if self.after not in AFTERS:
            raise InputError(f"`after` (={self.after!r}) must be one of {', '.join(AFTERS)}")


def check_sizes(
    text_tokens: int, images: float, new_tokens: int, batch: int, load: float, queued_ms: float
) -> None:
    """That a request can be of this size.

    Raises:
        InputError: It cannot.
    """
    for name, value, least in (
        ("text_tokens", text_tokens, 0), ("new_tokens", new_tokens, 1), ("batch", batch, 1),
    ):  # fmt: skip
        if type(value) is not int or value < least:
            raise InputError(f"`{name}` (={value!r}) must be a whole number of at least {least}")
    number = isinstance(images, int | float) and not isinstance(images, bool)
    if not (number and math.isfinite(images) and images >= 0.0):
        raise InputError(
            f"`images` (={images!r}) must be a finite number, not negative: how many of the profile's images"
        )
    if not 0.0 <= load <= 1.0:
        raise InputError(f"`load` (={load}) must be a share of the device, in [0, 1]")
    if not (math.isfinite(queued_ms) and queued_ms >= 0.0):
        raise InputError(f"`queued_ms` (={queued_ms}) must be a finite number of milliseconds, not negative")
