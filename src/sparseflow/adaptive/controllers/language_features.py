"""Language feature of a prompt: the mean word embedding of its text tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.errors import InputError

_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
"""Config attributes with the placeholder tokens of images and videos."""


def mean_text_embedding(adapter: Adapter, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """Compute the mean word embedding of each row's text tokens.

    Args:
        adapter: Adapter of the model.
        input_ids: Tokens from the model's tokenizer or processor, [batch, tokens] int64.
        attention_mask: 0 for padding, [batch, tokens]; default: no padding.

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
    for token in get_placeholder_tokens(adapter.model.config):
        text &= input_ids != token
    count = text.sum(1, keepdim=True)
    if bool((count == 0).any()):
        raise InputError(f"row {int((count == 0).nonzero()[0, 0])} of `input_ids` has no text tokens")
    with torch.no_grad():
        # A placeholder may be outside the embedding table.
        words = adapter.embed(input_ids.masked_fill(~text, 0)).float()
        return (words * text[..., None]).sum(1) / count


def get_placeholder_tokens(config: Any) -> tuple[int, ...]:
    """Placeholder tokens of images and videos, from a model's config."""
    tokens = (getattr(config, name, None) for name in _PLACEHOLDERS)
    return tuple(dict.fromkeys(token for token in tokens if isinstance(token, int)))
