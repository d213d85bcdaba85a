"""Placeholders of images in a prompt: where they stand, and a prompt without some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparseflow.adaptive.plan.adapter import Inputs
from sparseflow.adaptive.plan.space import TIERS, Tier
from sparseflow.errors import PlanError

Span = tuple[int, int, int]
"""A run of placeholders that stand side by side: row, first token, how many."""

_FIXED = ("position_ids", "cache_position", "inputs_embeds", "past_key_values")
"""Arguments that would no longer fit tokens of which some are gone."""
_OF_IMAGES = ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes")


def ids_of(inputs: Inputs) -> Tensor:
    """The prompt of inputs, [batch, tokens].

    Raises:
        PlanError: There is none.
    """
    input_ids = inputs.get("input_ids")
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        shape = list(input_ids.shape) if isinstance(input_ids, Tensor) else None
        raise PlanError(f"a tier needs `input_ids` [batch, tokens], to find images in; they are {shape}")
    return input_ids


def spans(input_ids: Tensor, token: int) -> list[Span]:
    """Runs of a placeholder in a prompt [batch, tokens], in reading order. Of a prompt on a GPU it waits."""
    found: list[Span] = []
    # NumPy, as this is done some times for each request, and its calls cost a tenth.
    for row, ids in enumerate(input_ids.numpy(force=True)):
        mask = ids == token
        edges: list[int] = (np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist()
        edges = [*([0] if mask[:1].any() else []), *edges, *([len(mask)] if mask[-1:].any() else [])]
        found += [(row, start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return found


class PlaceholderSpans:
    """Runs of a placeholder in prompts. The last prompts are remembered, as one is asked about several times:
    when it comes, and before and after it is shortened."""

    def __init__(self) -> None:
        self._known: tuple[tuple[Tensor, tuple[int, int], list[Span]], ...] = ()

    def of(self, input_ids: Tensor, token: int) -> list[Span]:
        """As `spans` gives them."""
        if input_ids.is_inference():  # nobody counts its changes
            return spans(input_ids, token)
        asked = (input_ids._version, token)
        for known, then, found in self._known:
            if known is input_ids and then == asked:
                return list(found)
        found = spans(input_ids, token)
        # Put in place as a whole: several threads ask.
        self._known = ((input_ids, asked, found), *self._known[:1])
        return list(found)


def check_presence(inputs: Inputs, images: Sequence[Span], tier: Tier | None) -> None:
    """That inputs have images where there is a tier, and none where there is none.

    Args:
        inputs: With pixels, or with what the vision tower made of them.
        images: Placeholders in the prompt.
        tier: That of the plan.

    Raises:
        PlanError: They have not.
    """
    encoded = (inputs.get("mm_encoder_outputs") or {}).get("image")
    pictures = inputs.get("pixel_values") is not None or encoded is not None
    if tier is None:
        if images or pictures:
            raise PlanError(f"`tier` is None, but the request has images; give one of {', '.join(TIERS)}")
    elif not images or not pictures:
        missing = "no `pixel_values`" if images else "no placeholder of an image"
        raise PlanError(f"`tier` is {tier!r}, but the request has {missing}; a text alone has tier None")


def shortened(inputs: Inputs, runs: Iterable[Span], lengths: Iterable[int]) -> dict[str, Any]:
    """Inputs in which runs of placeholders have fewer tokens; the first of each stay.

    Everything with an entry for each token is shortened: `input_ids`, `attention_mask` and the like.

    Args:
        inputs: Those to shorten; they stay as they are.
        runs: Runs of placeholders, in reading order.
        lengths: How many tokens are to stay of each.

    Raises:
        PlanError: An argument would no longer fit, or rows would come to differ in length.
    """
    fixed = [name for name in _FIXED if inputs.get(name) is not None]
    if fixed:
        raise PlanError(
            f"{', '.join(fixed)} would not fit a prompt of fewer vision tokens; leave them to the model"
        )
    input_ids = ids_of(inputs)
    mask = inputs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        raise PlanError(
            f"`attention_mask` {list(mask.shape)} must have the shape of `input_ids`, {list(input_ids.shape)}"
        )
    rows, tokens = input_ids.shape
    ends = [0] * rows
    pieces: list[list[slice]] = [[] for _ in range(rows)]
    for (row, start, length), kept in zip(runs, lengths, strict=True):
        if kept < length:
            pieces[row].append(slice(ends[row], start + kept))
            ends[row] = start + length
    if not any(pieces):
        return dict(inputs)
    for mine, end in zip(pieces, ends, strict=True):
        mine.append(slice(end, tokens))
    counts = [sum(piece.stop - piece.start for piece in mine) for mine in pieces]
    if len(set(counts)) > 1:
        raise PlanError(
            f"rows would have {counts} tokens, as their images shrink by unlike counts; run them alone"
        )

    def cut(name: str, value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[:2] == input_ids.shape
        if not per_token or name in _OF_IMAGES:
            return value
        return torch.stack(
            [torch.cat([value[row, piece] for piece in mine]) for row, mine in enumerate(pieces)]
        )

    return {name: cut(name, value) for name, value in inputs.items()}
