"""What a question says before the model has run: the mean of its words in the model's own table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.errors import InputError

_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Where configurations keep the token that an image's or a video's vectors replace."""


def language_features(adapter: Adapter, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The mean of the word embeddings of each row's text tokens.

    Args:
        adapter: Whose tokens these are.
        input_ids: [batch, tokens] int64, as the model's own tokenizer or processor gives them.
        attention_mask: [batch, tokens], 0 for padding; by default nothing is padding.

    Returns:
        [batch, d] float32, without gradients.

    Raises:
        InputError: Shapes differ, or a row has no text.
    """
    if input_ids.ndim != 2:
        raise InputError(f"`input_ids` must be [batch, tokens], not {list(input_ids.shape)}")
    text = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise InputError(
                f"`attention_mask` {list(attention_mask.shape)} must have the shape of `input_ids`, "
                f"{list(input_ids.shape)}"
            )
        text &= attention_mask.bool()
    for token in placeholders(adapter.model.config):
        text &= input_ids != token
    count = text.sum(1, keepdim=True)
    if bool((count == 0).any()):
        raise InputError(
            f"row {int((count == 0).nonzero()[0, 0])} of `input_ids` has no text tokens; ask something"
        )
    with torch.no_grad():
        # A placeholder may lie beyond the table.
        words = adapter.embed(input_ids.masked_fill(~text, 0)).float()
        return (words * text[..., None]).sum(1) / count


def placeholders(config: Any) -> tuple[int, ...]:
    """Tokens that stand for images or videos in a model's inputs."""
    found = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return tuple(dict.fromkeys(token for token in found if isinstance(token, int)))
