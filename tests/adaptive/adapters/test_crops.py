"""Nested crops, compared with Pillow, and expansion of placeholders."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.adaptive.adapters.crops import CROPS, expand_placeholders, make_nested_crops
from sparseflow.adaptive.plan.space import TIERS
from sparseflow.errors import InputError

PLAIN: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def image(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(seed)).byte()


def test_tiers_have_1_5_and_14_crops() -> None:
    assert dict(CROPS) == {"low": 1, "medium": 5, "high": 14}


@pytest.mark.parametrize(("height", "width"), [(48, 48), (50, 31), (17, 90), (5, 7), (200, 150)])
def test_crops_match_pillow_resize(height: int, width: int) -> None:
    picture = pytest.importorskip("PIL.Image")
    # Pillow clips overshoots after each of two passes, so the contrast is low.
    size, given_image = 16, 64 + image(height, width) // 2
    crops = make_nested_crops(given_image, size, **PLAIN)
    assert crops.shape == (14, 3, size, size) and crops.dtype == torch.float32
    full_image = picture.fromarray(given_image.permute(1, 2, 0).numpy())
    index = 0
    for level in (1, 2, 3):
        resized = (
            np.asarray(full_image.resize((level * size, level * size), picture.Resampling.BICUBIC)) / 255.0
        )
        for top in range(level):
            for column in range(level):
                expected = resized[top * size : (top + 1) * size, column * size : (column + 1) * size]
                # Pillow rounds to integers twice.
                assert np.abs(crops[index].permute(1, 2, 0).numpy() - expected).max() <= 1.6 / 255.0
                index += 1


def test_image_of_exact_size_is_cut_and_normalized() -> None:
    picture = image(24, 24)
    mean, std = (0.48, 0.45, 0.4), (0.26, 0.25, 0.27)
    crops = make_nested_crops(picture, 8, mean=mean, std=std)
    exact = (picture / 255.0 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.allclose(crops[5], exact[:, :8, :8], atol=1e-6)
    assert torch.allclose(crops[6], exact[:, :8, 8:16], atol=1e-6)
    assert torch.allclose(crops[8], exact[:, 8:16, :8], atol=1e-6)
    assert torch.allclose(crops[13], exact[:, 16:, 16:], atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 3))
def test_crops_of_tiers_are_nested_and_images_independent(
    height: int, width: int, size: int, count: int
) -> None:
    pictures = torch.stack([image(height, width, seed) for seed in range(count)])
    full_crops = make_nested_crops(pictures, size, **PLAIN).unflatten(0, (count, 14))
    assert float(full_crops.min()) >= 0.0 and float(full_crops.max()) <= 1.0
    for tier in TIERS:
        crops = make_nested_crops(pictures, size, tier=tier, **PLAIN).unflatten(0, (count, CROPS[tier]))
        assert torch.equal(crops, full_crops[:, : CROPS[tier]])
    for picture, crops in zip(pictures, full_crops, strict=True):
        assert torch.allclose(make_nested_crops(picture, size, **PLAIN), crops, atol=1e-6)


@pytest.mark.parametrize(
    ("given_as", "expected_dtype"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_floating_images_match_bytes(given_as: torch.dtype, expected_dtype: torch.dtype) -> None:
    byte_image = image(20, 30)
    crops = make_nested_crops((byte_image / 255.0).to(given_as), 4, **PLAIN)
    assert crops.dtype == expected_dtype
    assert torch.allclose(crops.float(), make_nested_crops(byte_image, 4, **PLAIN), atol=5e-3)


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        ({"images": torch.zeros(4, 4)}, None),
        ({"images": torch.zeros(3, 0, 4)}, None),
        ({"images": torch.zeros(1, 4, 4)}, None),
        ({"images": torch.full((3, 4, 4), 7)}, None),
        ({"images": torch.full((3, 4, 4), 1.5)}, None),
        ({"images": torch.full((3, 4, 4), -0.1)}, None),
        ({"images": torch.full((3, 4, 4), float("nan"))}, None),
        ({"size": 0}, "`size`"),
        ({"tier": "all"}, None),
        ({"std": (1.0, 0.0, 1.0)}, None),
        ({"mean": (1.0,)}, "`mean`"),
    ],
)
def test_invalid_images_and_arguments_are_refused(change: dict[str, Any], expected_text: str | None) -> None:
    arguments: dict[str, Any] = {"images": image(4, 4), "size": 2, **PLAIN} | change
    with pytest.raises(InputError, match=expected_text):
        make_nested_crops(arguments.pop("images"), arguments.pop("size"), **arguments)


@given(st.lists(st.sampled_from([1, 2, 9]), min_size=1, max_size=12), st.integers(1, 5))
def test_expand_placeholders_repeats_each_placeholder(words: list[int], count: int) -> None:
    adjacent = any(a == b == 9 for a, b in pairwise(words))
    ids = torch.tensor(words)
    if 9 not in words or adjacent:
        with pytest.raises(InputError):
            expand_placeholders(ids, 9, count)
        return
    expected = [token for word in words for token in [word] * (count if word == 9 else 1)]
    assert expand_placeholders(ids, 9, count).tolist() == expected
    assert expand_placeholders(ids.expand(3, -1), 9, count).tolist() == [expected] * 3


def test_expand_placeholders_invalid_prompts_are_refused() -> None:
    with pytest.raises(InputError):
        expand_placeholders(torch.tensor([[9, 1, 1], [9, 1, 9]]), 9, 2)
    for ids, count in ((torch.zeros(1, 1, 1), 2), (torch.tensor([9]), 0)):
        with pytest.raises(InputError):
            expand_placeholders(ids, 9, count)
