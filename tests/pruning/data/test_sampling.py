"""Crops, resizing and normalization."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseflow.pruning.data.sampling import (
    AREA,
    ASPECT,
    MEAN,
    STD,
    Crop,
    center_crop,
    crop_and_resize,
    normalize_clip,
    sample_crop,
)
from tests.pruning.data.tree import numbers_of, picture


@pytest.mark.parametrize(("height", "width"), [(240, 320), (48, 64), (7, 5)])
def test_a_random_crop_lies_in_the_frame(height: int, width: int) -> None:
    generator = np.random.default_rng(0)
    crops = [sample_crop(height, width, generator) for _ in range(300)]
    for crop in crops:
        assert crop.row >= 0 and crop.column >= 0
        assert crop.row + crop.height <= height and crop.column + crop.width <= width
    assert 100 < sum(crop.flip for crop in crops) < 200
    assert len({(crop.row, crop.column, crop.height, crop.width) for crop in crops}) > 20


def test_a_random_crop_keeps_its_bounds() -> None:
    generator = np.random.default_rng(1)
    for _ in range(300):
        crop = sample_crop(240, 320, generator)
        assert AREA[0] - 0.01 < crop.height * crop.width / (240 * 320) <= AREA[1]
        assert ASPECT[0] - 0.01 < crop.width / crop.height < ASPECT[1] + 0.01


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (1, 1)])
def test_sample_crop_falls_back_to_center(height: int, width: int) -> None:
    crop = sample_crop(height, width, np.random.default_rng(0))
    assert abs(2 * crop.row + crop.height - height) <= 1 and abs(2 * crop.column + crop.width - width) <= 1
    assert min(crop.height, crop.width) == min(height, width)


def test_crop_applies_to_all_frames() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (3, 20, 30, 3), np.uint8)
    plain = crop_and_resize(frames, Crop(row=2, column=5, height=16, width=16, flip=False), 16)
    assert plain.dtype == torch.uint8
    expected = torch.from_numpy(frames[:, 2:18, 5:21].copy()).permute(0, 3, 1, 2)
    assert torch.equal(plain, expected)
    mirrored = crop_and_resize(frames, Crop(row=2, column=5, height=16, width=16, flip=True), 16)
    assert torch.equal(mirrored, expected.flip(-1))


def test_a_crop_is_resized_without_aliasing() -> None:
    frames = np.zeros((1, 64, 64, 3), np.uint8)
    frames[:, ::2] = 200
    small = crop_and_resize(frames, Crop(row=0, column=0, height=64, width=64, flip=False), 16)
    assert small.shape == (1, 3, 16, 16)
    assert int((small[:, :, 1:-1].int() - 100).abs().max()) <= 15


@pytest.mark.parametrize(("height", "width"), [(48, 64), (64, 48), (96, 128), (24, 33)])
def test_center_crop_resizes_first(height: int, width: int) -> None:
    frames = np.zeros((2, height, width, 3), np.uint8)
    frames[:, height // 2 - 2 : height // 2 + 2, width // 2 - 2 : width // 2 + 2] = 255
    clip = center_crop(frames, 42)
    assert clip.shape == (2, 3, 42, 42)
    bright = (clip[0, 0] > 100).nonzero().float().mean(0)
    assert float((bright - 20.5).abs().max()) <= 1


def test_frames_of_the_right_size_are_only_cut() -> None:
    frames = np.stack([picture(5), picture(200)])
    clip = center_crop(frames, 42)
    np.testing.assert_array_equal(clip.permute(0, 2, 3, 1).numpy(), frames[:, 3:45, 11:53])
    assert numbers_of(clip.permute(0, 2, 3, 1).numpy()) == [5, 200]


def test_normalize_clip_scales_pixels() -> None:
    clip = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    normalized = normalize_clip(clip)
    expected = (clip.double() / 255 - torch.tensor(MEAN).double()[:, None, None]) / torch.tensor(
        STD
    ).double()[:, None, None]
    torch.testing.assert_close(normalized, expected.float())
    assert normalized.is_contiguous()
