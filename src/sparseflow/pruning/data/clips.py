"""Clips of listed videos: windows of several lengths.

A clip has `num_frames` frames of one window. In training its start is shifted and its frames are cropped and
flipped at random; the randomness depends on seed, epoch and index only, so that the number of workers does
not change the clips. In tests nothing is random, and the score of a video is the mean over its clips.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from sparseflow.core.checks import check_at_least, check_one_of
from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.pruning.data.cache import VideoCache
from sparseflow.pruning.data.frame_counts import ON_ERROR, count_frames
from sparseflow.pruning.data.sampling import (
    center_crop,
    compute_stride,
    crop_and_resize,
    jitter_start,
    list_sliding_windows,
    normalize_clip,
    sample_crop,
    select_frames,
)
from sparseflow.pruning.data.splits import DatasetSplit, VideoEntry
from sparseflow.pruning.data.video import Video, find_video, open_video

_MAX_LISTED = 3
"""Missing videos that an error message lists."""


@dataclass(frozen=True, kw_only=True)
class ClipWindow:
    """A window of a video.

    Attributes:
        video: Index in `VideoClips.entries`.
        start: First frame.
        clip_len: Length, frames.
    """

    video: int
    start: int
    clip_len: int


class VideoClips(Dataset[dict[str, Any]]):
    """Clips of the training or the test videos of a dataset.

    An item is `{"clip": float32 of shape (num_frames, 3, size, size), normalized as for ImageNet, "label":
    int, "video": int}`; the video is an index in `entries`.

    Args:
        split: Training and test videos.
        train: Use the training videos, otherwise the test videos.
        videos_dir: Directory of the videos: files, directories of frames, or tar files; not used with
            `cache_dir`.
        cache_dir: Directory of `build_cache`, to read decoded frames.
        counts_path: File of frame counts, created if absent; without it frames are counted each time. Not
            used with `cache_dir`.
        num_frames: Frames of a clip.
        clip_lens: Lengths of windows, frames.
        stride_ratio: Stride divided by the length of the window.
        size: Side of the square clips, pixels.
        on_error: `"raise"`, or `"skip"` for videos that are missing or do not decode.
        seed: Random seed.
        progress: Called while frames are counted.

    Attributes:
        augment: Whether clips are shifted, cropped and flipped at random, as for training.
        classes: Class names by label.
        entries: Available videos.
        skipped: Name of a skipped video -> reason.

    Raises:
        InputError: An argument is out of range, videos are missing, or no video is available.
        FileFormatError: A video does not decode, or the cache is damaged. Reading an item can raise it, too,
            even with `on_error="skip"`.
    """

    def __init__(
        self,
        *,
        split: DatasetSplit,
        train: bool,
        videos_dir: Path | str | None = None,
        cache_dir: Path | str | None = None,
        counts_path: Path | str | None = None,
        num_frames: int = 8,
        clip_lens: Sequence[int] = (8, 16),
        stride_ratio: float = 0.5,
        size: int = 224,
        on_error: str = "raise",
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        check_one_of(ON_ERROR, on_error=on_error)
        check_at_least(1, num_frames=num_frames, size=size)
        check_at_least(0, seed=seed)
        # Checks the arguments before frames are counted, which takes long.
        list_sliding_windows(1, clip_lens, stride_ratio)
        listed = split.train if train else split.test
        if cache_dir is not None:
            sources, skipped = _find_in_cache(VideoCache.open(cache_dir), listed)
        elif videos_dir is not None:
            sources, skipped = _find_in_directory(Path(videos_dir), listed, counts_path, on_error, progress)
        else:
            raise InputError("either `videos_dir` or `cache_dir` is required")
        self.skipped = skipped
        if self.skipped and on_error == "raise":
            raise _make_missing_error(self.skipped, len(listed))
        self.classes = split.classes
        self.entries = tuple(entry for entry in listed if entry.video in sources)
        if not self.entries:
            raise InputError(f"all {len(listed)} listed videos were skipped: {_format_skipped(self.skipped)}")
        self._sources = [sources[entry.video] for entry in self.entries]
        self._windows = np.array(
            [
                (video, *window)
                for video, (_, frames) in enumerate(self._sources)
                for window in list_sliding_windows(frames, clip_lens, stride_ratio)
            ],
            np.int64,
        )
        self.num_frames, self.stride_ratio, self.size, self.seed = num_frames, stride_ratio, size, seed
        self.augment = train
        # Shared memory, so that persistent workers see a new epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        window = self.get_window(index)
        generator = self._make_generator(index)
        frames = self._read_frames(window, self._select_frames(window, generator))
        if self.augment:
            height, width = frames.shape[1:3]
            pixels = crop_and_resize(frames, sample_crop(height, width, generator), self.size)
        else:
            pixels = center_crop(frames, self.size)
        return {
            "clip": normalize_clip(pixels), "label": self.entries[window.video].label, "video": window.video
        }  # fmt: skip

    def get_window(self, index: int) -> ClipWindow:
        """Window of an item, before the random shift.

        Raises:
            IndexError: The index is out of range.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"clip {index} does not exist; there are {len(self)}")
        video, start, clip_len = self._windows[index].tolist()
        return ClipWindow(video=video, start=start, clip_len=clip_len)

    def set_epoch(self, epoch: int) -> None:
        """Use the randomness of an epoch, also in running workers.

        Raises:
            InputError: `epoch` is negative.
        """
        check_at_least(0, epoch=epoch)
        self._epoch.fill_(epoch)

    def _make_generator(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, int(self._epoch), int(index)])

    def _select_frames(self, window: ClipWindow, generator: np.random.Generator) -> np.ndarray:
        """Frames of a window; its shift is the first random number of an item."""
        frames = self._sources[window.video][1]
        start = window.start
        if self.augment:
            stride = compute_stride(window.clip_len, self.stride_ratio)
            start = jitter_start(start, window.clip_len, frames, stride, generator)
        return select_frames(start, window.clip_len, self.num_frames, frames)

    def _read_frames(self, window: ClipWindow, indices: np.ndarray) -> np.ndarray:
        source, frames = self._sources[window.video]
        video: Video = open_video(source, frames=frames) if isinstance(source, Path) else source
        return video.read(indices)


_Available = tuple[dict[str, tuple[Path | Video, int]], dict[str, str]]
"""Name -> source and number of frames of available videos; name -> reason for the others."""


def _find_in_cache(cache: VideoCache, listed: Sequence[VideoEntry]) -> _Available:
    names = [entry.video for entry in listed]
    sources: dict[str, tuple[Path | Video, int]] = {
        name: (cache[name], cache[name].frames) for name in names if name in cache
    }
    return sources, {
        name: cache.skipped.get(name, f"not in {cache.path}") for name in names if name not in cache
    }


def _find_in_directory(
    root: Path,
    listed: Sequence[VideoEntry],
    counts_path: Path | str | None,
    on_error: str,
    progress: Progress | None,
) -> _Available:
    paths = {entry.video: find_video(root, entry.video) for entry in listed}
    missing = {name: f"not in {root}" for name, path in paths.items() if path is None}
    # Before frames are counted, which takes long.
    if missing and on_error == "raise":
        raise _make_missing_error(missing, len(listed))
    existing = [(name, path) for name, path in paths.items() if path is not None]
    counts = count_frames(existing, counts_path=counts_path, on_error=on_error, progress=progress)
    sources: dict[str, tuple[Path | Video, int]] = {
        name: (path, counts.frames[name]) for name, path in existing if name in counts.frames
    }
    return sources, missing | counts.skipped


def _make_missing_error(skipped: dict[str, str], num_listed: int) -> InputError:
    return InputError(
        f"{len(skipped)} of {num_listed} listed videos cannot be read: {_format_skipped(skipped)}; download "
        'them, or skip them with on_error="skip"'
    )


def _format_skipped(skipped: dict[str, str]) -> str:
    videos = [f"{name} ({reason})" for name, reason in list(skipped.items())[:_MAX_LISTED]]
    return ", ".join(videos) + (", …" if len(skipped) > _MAX_LISTED else "")
