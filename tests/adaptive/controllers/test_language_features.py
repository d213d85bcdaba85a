"""Language features of prompts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from sparseflow.adaptive.controllers.language_features import get_placeholder_tokens, mean_text_embedding
from sparseflow.adaptive.plan.adapter import Adapter
from sparseflow.errors import InputError

IMAGE = 50


class Words:
    """Adapter with word embeddings only."""

    def __init__(self, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        self.table = nn.Embedding(20, 4, dtype=dtype)
        with torch.no_grad():
            self.table.weight.copy_(torch.arange(80).view(20, 4) / 8)
        self.model = SimpleNamespace(config=SimpleNamespace(**config))

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.table(input_ids)


def features(words: Words, *rows: list[int], mask: list[list[int]] | None = None) -> torch.Tensor:
    return mean_text_embedding(
        cast(Adapter, words), torch.tensor(rows), None if mask is None else torch.tensor(mask)
    )


def test_feature_is_mean_word_embedding() -> None:
    words = Words()
    feature = features(words, [1, 2, 3], [4, 4, 7])
    torch.testing.assert_close(
        feature, torch.stack([words.table.weight[[1, 2, 3]].mean(0), words.table.weight[5]])
    )
    assert feature.dtype == torch.float32 and not feature.requires_grad


def test_placeholders_and_padding_are_ignored() -> None:
    # The image token may be outside the embedding table.
    words = Words(image_token_id=IMAGE)
    plain = features(words, [1, 2, 3])
    torch.testing.assert_close(features(words, [IMAGE, 1, IMAGE, 2, 3]), plain)
    mask = [[0, 0, 1, 1, 1, 1]]
    torch.testing.assert_close(features(words, [9, 9, IMAGE, 1, 2, 3], mask=mask), plain)


def test_half_precision_is_summed_in_float32() -> None:
    words = Words(torch.bfloat16)
    feature = features(words, [1] * 3000)
    torch.testing.assert_close(feature[0], words.table.weight[1].float())


def test_placeholder_tokens_are_read_from_config() -> None:
    assert get_placeholder_tokens(
        SimpleNamespace(image_token_index=3, image_token_id=3, video_token_id=4)
    ) == (3, 4)
    assert get_placeholder_tokens(SimpleNamespace(image_token_id=None)) == ()


def test_invalid_prompts_are_refused() -> None:
    words = Words(image_token_id=IMAGE)
    with pytest.raises(InputError):
        features(words, [1, 2], [IMAGE, IMAGE])
    with pytest.raises(InputError):
        features(words, [1, 2], mask=[[1]])
    with pytest.raises(InputError):
        mean_text_embedding(cast(Adapter, words), torch.tensor([1]))
