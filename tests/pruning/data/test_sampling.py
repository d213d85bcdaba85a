"""Sliding windows, frame selection, crops, resizing and normalization."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.pruning.data.sampling import (
    AREA,
    ASPECT,
    MEAN,
    STD,
    Crop,
    center_crop,
    compute_stride,
    crop_and_resize,
    jitter_start,
    list_sliding_windows,
    normalize_clip,
    sample_crop,
    select_frames,
)
from tests.pruning.data.tree import numbers_of, picture


@pytest.mark.parametrize(
    ("frames", "clip_lens", "stride_ratio", "expected"),
    [
        (21, (8, 16), 0.5, [(0, 8), (4, 8), (8, 8), (12, 8), (0, 16)]),
        (24, (8, 16), 0.5, [(0, 8), (4, 8), (8, 8), (12, 8), (16, 8), (0, 16), (8, 16)]),
        (8, (8,), 0.5, [(0, 8)]),
        (5, (8, 16), 0.5, [(0, 8), (0, 16)]),
        (10, (4,), 0.1, [(start, 4) for start in range(7)]),
        (9, (4,), 1.0, [(0, 4), (4, 4)]),
        (3, (1,), 0.5, [(0, 1), (1, 1), (2, 1)]),
    ],
)
def test_windows_slide_as_long_as_they_fit(
    frames: int, clip_lens: tuple[int, ...], stride_ratio: float, expected: list[tuple[int, int]]
) -> None:
    assert list_sliding_windows(frames, clip_lens, stride_ratio) == expected


@pytest.mark.parametrize(
    ("start", "clip_len", "num_frames", "frames", "expected"),
    [
        (0, 8, 8, 100, [0, 1, 2, 3, 4, 5, 6, 7]),
        (4, 16, 8, 100, [4, 6, 8, 10, 12, 14, 16, 19]),
        (0, 8, 8, 5, [0, 1, 2, 3, 4, 4, 4, 4]),
        (0, 16, 8, 5, [0, 2, 4, 4, 4, 4, 4, 4]),
        (2, 3, 5, 9, [2, 2, 3, 3, 4]),
        (7, 8, 1, 20, [7]),
    ],
)
def test_frames_are_spread_over_the_window(
    start: int, clip_len: int, num_frames: int, frames: int, expected: list[int]
) -> None:
    selected = select_frames(start, clip_len, num_frames, frames)
    assert selected.tolist() == expected
    assert selected.dtype == np.int64


@settings(max_examples=40)
@given(st.integers(0, 300), st.integers(1, 64), st.integers(2, 64), st.integers(1, 300))
def test_select_frames_matches_formula(start: int, clip_len: int, num_frames: int, frames: int) -> None:
    start = min(start, frames - 1)
    exact = [start + Fraction(clip_len - 1, num_frames - 1) * step for step in range(num_frames)]
    expected = [min(math.floor(step), frames - 1) for step in exact]
    assert select_frames(start, clip_len, num_frames, frames).tolist() == expected


def test_jitter_start_stays_within_half_a_stride() -> None:
    generator = np.random.default_rng(0)
    middle = {jitter_start(20, 8, 100, 4, generator) for _ in range(200)}
    assert middle == {18, 19, 20, 21, 22}
    assert {jitter_start(0, 8, 9, 4, generator) for _ in range(200)} == {0, 1}
    assert {jitter_start(0, 8, 5, 4, generator) for _ in range(20)} == {0}
    assert {jitter_start(7, 8, 100, 1, generator) for _ in range(20)} == {7}


def test_a_stride_is_at_least_one_frame() -> None:
    assert [compute_stride(*arguments) for arguments in ((8, 0.5), (3, 0.5), (1, 0.5), (16, 1))] == [
        4,
        1,
        1,
        16,
    ]


@pytest.mark.parametrize(
    ("frames", "clip_lens", "stride_ratio", "name"),
    [
        (0, (8,), 0.5, "frames"),
        (9, (), 0.5, "clip_lens"),
        (9, (8, 8), 0.5, "clip_lens"),
        (9, (0,), 0.5, "clip_len"),
        (9, (8,), 0.0, "stride_ratio"),
        (9, (8,), 1.5, "stride_ratio"),
        (9, (8,), math.nan, "stride_ratio"),
    ],
)
def test_invalid_windows_raise(
    frames: int, clip_lens: tuple[int, ...], stride_ratio: float, name: str
) -> None:
    with pytest.raises(InputError, match=f"`{name}`"):
        list_sliding_windows(frames, clip_lens, stride_ratio)


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
