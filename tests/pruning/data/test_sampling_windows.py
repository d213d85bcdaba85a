"""Sliding windows and frame selection, against examples and the formula."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.errors import InputError
from sparseflow.pruning.data.sampling import compute_stride, jitter_start, list_sliding_windows, select_frames


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
    assert (
        compute_stride(8, 0.5),
        compute_stride(3, 0.5),
        compute_stride(1, 0.5),
        compute_stride(16, 1),
    ) == (4, 1, 1, 16)


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


@pytest.mark.parametrize("arguments", [(0, 0, 8, 9), (0, 8, 0, 9), (9, 8, 8, 9), (-1, 8, 8, 9), (0, 8, 8, 0)])
def test_invalid_frames_raise(arguments: tuple[int, int, int, int]) -> None:
    with pytest.raises(InputError):
        select_frames(*arguments)
