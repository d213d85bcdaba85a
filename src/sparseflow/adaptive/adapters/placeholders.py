"""Image placeholders in prompts, and the base class of adapters of models that take images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.adapters.decoders import DecoderAdapter
from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.errors import PlanError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Span = tuple[int, int, int]
"""(row, start, length) of a run of placeholders."""

_FIXED = ("position_ids", "cache_position", "inputs_embeds", "past_key_values")
"""Inputs that a shortened prompt would invalidate."""
_OF_IMAGES = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes")


def get_input_ids(inputs: Inputs) -> Tensor:
    """Get the prompt, [batch, tokens] int64.

    Raises:
        PlanError: `input_ids` is missing or has another shape.
    """
    input_ids = inputs.get("input_ids")
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        shape = list(input_ids.shape) if isinstance(input_ids, Tensor) else None
        raise PlanError(f"a tier needs `input_ids` [batch, tokens], not {shape}")
    return input_ids


def find_spans(input_ids: Tensor, token: int) -> list[Span]:
    """Find runs of a token, in reading order."""
    result: list[Span] = []
    # NumPy, because this runs several times per request and its calls are ten times cheaper.
    for row, ids in enumerate(input_ids.numpy(force=True)):
        mask = ids == token
        edges: list[int] = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
        edges = [*([0] if mask[:1].any() else []), *edges, *([len(mask)] if mask[-1:].any() else [])]
        result += [(row, start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return result


class PlaceholderSpans:
    """Caches the runs of the last two prompts; several threads may use it."""

    def __init__(self) -> None:
        self._known: tuple[tuple[Tensor, tuple[int, int], list[Span]], ...] = ()

    def find(self, input_ids: Tensor, token: int) -> list[Span]:
        """Find runs of a token, like `find_spans`."""
        if input_ids.is_inference():  # has no version counter
            return find_spans(input_ids, token)
        cache_key = (input_ids._version, token)
        for known, known_key, result in self._known:
            if known is input_ids and known_key == cache_key:
                return list(result)
        result = find_spans(input_ids, token)
        # One assignment, for thread safety.
        self._known = ((input_ids, cache_key, result), *self._known[:1])
        return list(result)


class ImageAdapter(DecoderAdapter):
    """Adapter of a model whose prompts have a run of placeholders for each image.

    Attributes:
        image_token_field: Field of the model's config with the placeholder token.
    """

    tiers = TIERS
    image_token_field: str

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._spans = PlaceholderSpans()

    def find_images(self, inputs: Inputs) -> list[Span]:
        """Find the placeholders of each image."""
        return self._spans.find(get_input_ids(inputs), getattr(self.model.config, self.image_token_field))

    def count_vision_tokens(self, inputs: Inputs) -> int:
        """Number of vision tokens in all rows of an input."""
        return sum(length for _, _, length in self.find_images(inputs))

    def check_tier(self, inputs: Inputs, tier: Tier | None) -> None:
        """Check that every image has the vision tokens of a tier.

        Raises:
            PlanError: An image has another number, or tier and images do not match.
        """
        images = self.find_images(inputs)
        check_presence(inputs, images, tier)
        if tier is not None:
            self._check_lengths([length for _, _, length in images], tier)

    @abstractmethod
    def _check_lengths(self, lengths: Sequence[int], tier: Tier) -> None:
        """Check the vision tokens of each image."""


def check_presence(inputs: Inputs, images: Sequence[Span], tier: Tier | None) -> None:
    """Check that inputs have images if and only if there is a tier.

    Args:
        inputs: Inputs with pixels, or with the vision tower's output.
        images: Runs of placeholders in the prompt.
        tier: Tier of the plan.

    Raises:
        PlanError: They do not match.
    """
    encoded = (inputs.get("mm_encoder_outputs") or {}).get("image")
    has_pixels = inputs.get("pixel_values") is not None or encoded is not None
    if tier is None:
        if images or has_pixels:
            raise PlanError(f"`tier` is None, but the request has images; use one of {', '.join(TIERS)}")
    elif not images or not has_pixels:
        missing = "no `pixel_values`" if images else "no placeholder of an image"
        raise PlanError(f"`tier` is {tier!r}, but the request has {missing}; use tier None for text")


def shorten_inputs(inputs: Inputs, runs: Iterable[Span], lengths: Iterable[int]) -> dict[str, Any]:
    """Shorten runs of placeholders; the first tokens of each run stay.

    Every tensor with one entry per token is shortened, such as `input_ids` and `attention_mask`.

    Args:
        inputs: Inputs; unchanged.
        runs: Runs of placeholders, in reading order.
        lengths: New length of each run.

    Raises:
        PlanError: An input would become invalid, or rows would differ in length.
    """
    fixed = [name for name in _FIXED if inputs.get(name) is not None]
    if fixed:
        raise PlanError(
            f"{', '.join(fixed)} would not match a prompt with fewer vision tokens; leave them out"
        )
    input_ids = get_input_ids(inputs)
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        raise PlanError(
            f"`attention_mask` {list(mask.shape)} must have the shape of `input_ids`, {list(input_ids.shape)}"
        )
    rows, tokens = input_ids.shape
    ends = [0] * rows
    pieces: list[list[slice]] = [[] for _ in range(rows)]
    for (row, start, length), new_length in zip(runs, lengths, strict=True):
        if new_length < length:
            pieces[row].append(slice(ends[row], start + new_length))
            ends[row] = start + length
    if not any(pieces):
        return dict(inputs)
    for row_pieces, end in zip(pieces, ends, strict=True):
        row_pieces.append(slice(end, tokens))
    counts = [sum(piece.stop - piece.start for piece in row_pieces) for row_pieces in pieces]
    if len(set(counts)) > 1:
        raise PlanError(f"rows would have {counts} tokens, which differ; run them separately")

    def cut(name: str, value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == input_ids.shape
        if not per_token or name in _OF_IMAGES:
            return value
        return torch.stack(
            [torch.cat([value[row, piece] for piece in row_pieces]) for row, row_pieces in enumerate(pieces)]
        )

    return {name: cut(name, value) for name, value in inputs.items()}
