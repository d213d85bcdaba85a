"""Crops: against an independent resize, nested, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.adaptive.adapters.crops import CROPS, expand_placeholders, make_nested_crops
from sparseflow.adaptive.plan.space import TIERS
from sparseflow.errors import InputError

PLAIN: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def image(height: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(seed)).byte()


def test_there_are_1_5_and_14() -> None:
    assert dict(CROPS) == {"low": 1, "medium": 5, "high": 14}


@pytest.mark.parametrize(("height", "width"), [(48, 48), (50, 31), (17, 90), (5, 7), (200, 150)])
def test_levels_are_those_of_pillow(height: int, width: int) -> None:
    picture = pytest.importorskip("PIL.Image")
    # Pillow cuts what overshoots after each of two passes, so contrast is expected_dtype low here.
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
                # It also rounds to whole steps, twice.
                assert np.abs(crops[index].permute(1, 2, 0).numpy() - expected).max() <= 1.6 / 255.0
                index += 1


def test_an_image_of_the_right_size_is_cut_unchanged_and_normalised() -> None:
    picture = image(24, 24)
    mean, std = (0.48, 0.45, 0.4), (0.26, 0.25, 0.27)
    crops = make_nested_crops(picture, 8, mean=mean, std=std)
    exact = (picture / 255.0 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.allclose(crops[5], exact[:, :8, :8], atol=1e-6)
    assert torch.allclose(crops[6], exact[:, :8, 8:16], atol=1e-6)
    assert torch.allclose(crops[8], exact[:, 8:16, :8], atol=1e-6)
    assert torch.allclose(crops[13], exact[:, 16:, 16:], atol=1e-6)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.integers(1, 3))
def test_tiers_are_nested_and_images_apart(height: int, width: int, size: int, count: int) -> None:
    pictures = torch.stack([image(height, width, seed) for seed in range(count)])
    full_image = make_nested_crops(pictures, size, **PLAIN).unflatten(0, (count, 14))
    assert float(full_image.min()) >= 0.0 and float(full_image.max()) <= 1.0
    for tier in TIERS:
        crops = make_nested_crops(pictures, size, tier=tier, **PLAIN).unflatten(0, (count, CROPS[tier]))
        assert torch.equal(crops, full_image[:, : CROPS[tier]])
    for single, item in zip(pictures, full_image, strict=True):
        assert torch.allclose(make_nested_crops(single, size, **PLAIN), item, atol=1e-6)


@pytest.mark.parametrize(
    ("given_as", "expected_dtype"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_floating_images(given_as: torch.dtype, expected_dtype: torch.dtype) -> None:
    bytes_ = image(20, 30)
    crops = make_nested_crops((bytes_ / 255.0).to(given_as), 4, **PLAIN)
    assert crops.dtype == expected_dtype
    assert torch.allclose(crops.float(), make_nested_crops(bytes_, 4, **PLAIN), atol=5e-3)


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        ({"images": torch.zeros(4, 4)}, ""),
        ({"images": torch.zeros(3, 0, 4)}, ""),
        ({"images": torch.zeros(1, 4, 4)}, ""),
        ({"images": torch.full((3, 4, 4), 7)}, ""),
        ({"images": torch.full((3, 4, 4), 1.5)}, ""),
        ({"images": torch.full((3, 4, 4), -0.1)}, ""),
        ({"images": torch.full((3, 4, 4), float("nan"))}, ""),
        ({"size": 0}, "`size`"),
        ({"tier": "all"}, ""),
        ({"std": (1.0, 0.0, 1.0)}, ""),
        ({"mean": (1.0,)}, "`mean`"),
    ],
)
def test_what_is_no_image(change: dict[str, Any], expected_text: str) -> None:
    arguments: dict[str, Any] = {"images": image(4, 4), "size": 2, **PLAIN} | change
    with pytest.raises(InputError, match=expected_text or None):
        make_nested_crops(arguments.pop("images"), arguments.pop("size"), **arguments)


@given(st.lists(st.sampled_from([1, 2, 9]), min_size=1, max_size=12), st.integers(1, 5))
def test_placeholders(words: list[int], count: int) -> None:
    adjacent = any(a == b == 9 for a, b in pairwise(words))
    ids = torch.tensor(words)
    if 9 not in words or adjacent:
        with pytest.raises(InputError):
            expand_placeholders(ids, 9, count)
        return
    by_hand = [token for word in words for token in [word] * (count if word == 9 else 1)]
    assert expand_placeholders(ids, 9, count).tolist() == by_hand
    assert expand_placeholders(ids.expand(3, -1), 9, count).tolist() == [by_hand] * 3


def test_prompts_that_are_none() -> None:
    with pytest.raises(InputError):
        expand_placeholders(torch.tensor([[9, 1, 1], [9, 1, 9]]), 9, 2)
    for ids, count in ((torch.zeros(1, 1, 1), 2), (torch.tensor([9]), 0)):
        with pytest.raises(InputError):
            expand_placeholders(ids, 9, count)
