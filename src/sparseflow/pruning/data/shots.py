"""Shots of videos: the frames between two cuts, decoded once and kept in memory.

A cut is a change between two frames that is large, and several times as large as the changes around it, so
that fast motion is no cut. Fades and dissolves are not recognized.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.pruning.data.video import VIDEO_SUFFIXES, is_video_name, iterate_frames

_THUMBNAIL_SIZE = 16
"""Side of the images whose changes are compared, pixels; small ones ignore noise and details."""

_MIN_CUT = 20.0
"""Smallest mean change of a pixel at a cut, of 255."""

_CUT_RATIO = 3.0
"""Smallest change at a cut divided by the mean change around it."""

_CUT_NEIGHBORS = 2
"""Changes before and after a cut that are compared with it."""

_MAX_LISTED = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Shot:
    """Frames of a video without a cut.

    Attributes:
        path: Video.
        frames: uint8, shape (n, 3, height, width), RGB.
    """

    path: Path
    frames: Tensor


def list_videos(paths: Sequence[Path]) -> list[Path]:
    """List videos; a directory contains video files at any depth, and hidden ones are ignored.

    Raises:
        InputError: A path does not exist, or a directory has no videos.
    """
    videos: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise InputError(f"{path} does not exist; expected a video file or a directory of videos")
        files = sorted(_list_files(path)) if path.is_dir() else [path]
        if not files:
            raise InputError(f"{path} has no videos; expected files such as {', '.join(VIDEO_SUFFIXES[:4])}")
        videos.update(dict.fromkeys(file.resolve() for file in files))
    return list(videos)


def _list_files(directory: Path) -> Iterator[Path]:
    for name, folders, files in os.walk(directory, followlinks=True):
        yield from (Path(name, file) for file in files if is_video_name(file) and not file.startswith("."))
        folders[:] = [folder for folder in folders if not folder.startswith(".")]


def read_shots(
    videos: Sequence[Path],
    *,
    size: int,
    min_frames: int,
    on_error: str = "raise",
    progress: Progress | None = None,
) -> list[Shot]:
    """Decode videos and cut them into shots; a process decodes each video once.

    Args:
        videos: Video files.
        size: Shorter side of the frames, pixels.
        min_frames: Frames of the shortest shot that is returned.
        on_error: `"raise"`, or `"skip"` for videos that do not decode or have no shot of `min_frames`.
        progress: Called after each video.

    Raises:
        InputError: The shots of a video are too short, or all videos were skipped.
        FileFormatError: A video does not decode and `on_error` is `"raise"`.
    """
    shots: list[Shot] = []
    reasons: list[str] = []
    for num_done, path in enumerate(videos, start=1):
        try:
            shots += _read_long_shots(path, size, min_frames)
        except InputError as error:
            if on_error == "raise":
                raise
            reasons.append(str(error))
        if progress is not None:
            progress(f"decoding videos, {num_done} of {len(videos)}", num_done / len(videos))
    if not shots:
        raise InputError(f"all {len(videos)} videos were skipped: {'; '.join(reasons[:_MAX_LISTED])}")
    return shots


def _read_long_shots(path: Path, size: int, min_frames: int) -> list[Shot]:
    status = path.stat()
    frames, cuts = _decode_video(path, size, status.st_size, status.st_mtime_ns)
    bounds = [0, *cuts, len(frames)]
    longest = max(np.diff(bounds).tolist())
    if longest < min_frames:
        raise InputError(
            f"the longest shot of {path} has {longest} frames, and a clip needs {min_frames}; choose fewer "
            'frames or a smaller stride, or skip short videos with on_error="skip"'
        )
    return [
        Shot(path=path, frames=frames[start:end])
        for start, end in pairwise(bounds)
        if end - start >= min_frames
    ]


@cache
def _decode_video(path: Path, size: int, num_bytes: int, mtime_ns: int) -> tuple[Tensor, list[int]]:
    """Frames of a video, uint8, shape (n, 3, height, width), and its cuts."""
    del num_bytes, mtime_ns  # A changed file is decoded again.
    images = np.stack(list(iterate_frames(path, size=size)))
    frames = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return frames, find_cuts(frames)


def find_cuts(frames: Tensor) -> list[int]:
    """Find the first frame of each shot but the first one.

    Args:
        frames: uint8, shape (n, 3, height, width).
    """
    size = (_THUMBNAIL_SIZE, _THUMBNAIL_SIZE)
    thumbnails = functional.interpolate(frames, size, mode="bilinear", antialias=True).short()
    changes = thumbnails.diff(dim=0).abs().float().mean((1, 2, 3)).numpy()
    cuts = []
    for index in np.flatnonzero(changes >= _MIN_CUT).tolist():
        start, end = max(0, index - _CUT_NEIGHBORS), index + 1 + _CUT_NEIGHBORS
        neighbors = np.concatenate([changes[start:index], changes[index + 1 : end]])
        if not len(neighbors) or changes[index] >= _CUT_RATIO * neighbors.mean():
            cuts.append(index + 1)
    return cuts


def split_shots(shots: Sequence[Shot], fraction: float, seed: int) -> tuple[list[Shot], list[Shot]]:
    """Select a fraction of the videos for the test, but at least one, and leave one.

    A single video is split by its shots.

    Args:
        shots: Shots of all videos.
        fraction: Fraction for the test.
        seed: Random seed of the selection.

    Returns:
        Training and test shots.

    Raises:
        InputError: There is one video with one shot.
    """
    paths = list(dict.fromkeys(shot.path for shot in shots))
    groups = [[shot for shot in shots if shot.path == path] for path in paths]
    if len(groups) == 1:
        groups = [[shot] for shot in shots]
    if len(groups) == 1:
        raise InputError(
            f"{paths[0]} has one shot that is long enough, which leaves none for the test; add videos or set "
            "`test`"
        )
    num_test = min(max(1, round(fraction * len(groups))), len(groups) - 1)
    selected = np.random.default_rng(seed).permutation(len(groups))[:num_test].tolist()
    train = [shot for index, group in enumerate(groups) if index not in selected for shot in group]
    return train, [shot for index in sorted(selected) for shot in groups[index]]
