"""UCF-101 as clips: windows of several lengths over every video of an official list.

A clip is `num_frames` frames of one window. For training its start is shifted at random and its frames are
cropped and mirrored, all alike; what is drawn depends on seed, epoch and place alone, so that the number of
workers changes nothing. For tests nothing is drawn, and a video's score is the mean over its clips.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from sparseflow.errors import InputError
from sparseflow.pruning.data.cache import VideoCache
from sparseflow.pruning.data.frame_counts import check_on_error, count_frames
from sparseflow.pruning.data.sampling import (
    centre_crop,
    crop_resized,
    draw_crop,
    frame_indices,
    jittered,
    normalised,
    sliding_windows,
    stride_of,
)
from sparseflow.pruning.data.splits import Entry, read_split
from sparseflow.pruning.data.video import Video, find_video, open_video

_NAMED = 3
"""Missing videos that a message names."""


@dataclass(frozen=True, kw_only=True)
class Clip:
    """A window of a video.

    Attributes:
        video: Place in `UCF101.entries`.
        start: Its first frame.
        clip_len: Its length, in frames.
    """

    video: int
    start: int
    clip_len: int


class UCF101(Dataset[dict[str, Any]]):
    """The clips of one side of a split.

    An item is `{"clip": float32 of shape (num_frames, 3, size, size), normalised as for ImageNet, "label":
    int, "video": int}`, where the video is a place in `entries`.

    Args:
        lists: The folder of the official lists.
        split: 1, 2 or 3.
        train: Whether to take the training list, else the test list.
        videos: The folder of videos, files or folders of frames; not looked at with `cache`.
        cache: A folder that `build_cache` filled, to read from in place of decoding.
        counts: A file that remembers how many frames videos have, made when absent; without it they are
            counted anew each time. Not looked at with `cache`.
        num_frames: Of a clip.
        clip_lens: Lengths of windows, in frames.
        stride_ratio: From one window to the next, over the window's length.
        size: Side of the square that a network sees, in pixels.
        augment: Whether to shift, crop and mirror at random; as `train` says when None.
        on_error: `"raise"`, or `"skip"` to leave out videos that are missing or do not decode.
        seed: Of what is drawn.
        progress: Called while frames are counted, with how many videos are done and their number.

    Attributes:
        classes: Names, by label.
        entries: The videos that are there.
        skipped: Name of a video that was left out -> why.

    Raises:
        InputError: An argument is out of its range, videos are missing, or none is left.
        FileFormatError: A list is malformed, a video does not decode, or the cache is damaged. Reading an
            item raises it, too, whatever `on_error` says.
    """

    def __init__(
        self,
        *,
        lists: Path | str,
        split: int,
        train: bool,
        videos: Path | str | None = None,
        cache: Path | str | None = None,
        counts: Path | str | None = None,
        num_frames: int = 8,
        clip_lens: Sequence[int] = (8, 16),
        stride_ratio: float = 0.5,
        size: int = 224,
        augment: bool | None = None,
        on_error: str = "raise",
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_on_error(on_error)
        if num_frames < 1 or size < 1 or seed < 0:
            raise InputError(
                f"`num_frames` (={num_frames}) and `size` (={size}) must be at least 1, `seed` (={seed}) at "
                "least 0"
            )
        # Before frames are counted: that takes long.
        sliding_windows(1, clip_lens, stride_ratio)
        chosen = read_split(lists, split)
        listed = chosen.train if train else chosen.test
        if cache is not None:
            found = _in_cache(VideoCache.open(cache), listed)
        elif videos is not None:
            found = _in_folder(Path(videos), listed, counts, on_error, progress)
        else:
            raise InputError("name the folder of `videos`, or a `cache` of them")
        self.skipped = found.skipped
        if self.skipped and on_error == "raise":
            raise _missing(self.skipped, len(listed))
        self.classes = chosen.classes
        self.entries: tuple[Entry, ...] = tuple(entry for entry in listed if entry.video in found.sources)
        if not self.entries:
            raise InputError(f"all {len(listed)} videos of the list were left out: {_few(self.skipped)}")
        self._sources = [found.sources[entry.video] for entry in self.entries]
        windows = [sliding_windows(frames, clip_lens, stride_ratio) for _, frames in self._sources]
        self._clips = np.array(
            [(video, *window) for video, some in enumerate(windows) for window in some], np.int64
        )
        self.num_frames, self.stride_ratio, self.size, self.seed = num_frames, stride_ratio, size, seed
        self.augment = train if augment is None else augment
        # Shared, so that workers that live on see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int) -> dict[str, Any]:
        clip = self.clip(index)
        generator = self._generator(index)
        frames = self._read(clip, self._indices(clip, generator))
        if self.augment:
            height, width = frames.shape[1:3]
            pixels = crop_resized(frames, draw_crop(height, width, generator), self.size)
        else:
            pixels = centre_crop(frames, self.size)
        return {"clip": normalised(pixels), "label": self.entries[clip.video].label, "video": clip.video}

    def clip(self, index: int) -> Clip:
        """The window of an item, before it is shifted.

        Raises:
            IndexError: There is no such item.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there is no clip {index}; there are {len(self)}")
        video, start, clip_len = self._clips[index].tolist()
        return Clip(video=video, start=start, clip_len=clip_len)

    def indices(self, index: int) -> np.ndarray:
        """Which frames of its video an item shows in this epoch; shape (num_frames,), int64."""
        return self._indices(self.clip(index), self._generator(index))

    def set_epoch(self, epoch: int) -> None:
        """What is drawn from now on is that epoch's, in workers that are running, too.

        Raises:
            InputError: `epoch` is negative.
        """
        if epoch < 0:
            raise InputError(f"`epoch` (={epoch}) must be at least 0")
        self._epoch.fill_(epoch)

    def _generator(self, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, int(self._epoch), int(index)])

    def _indices(self, clip: Clip, generator: np.random.Generator) -> np.ndarray:
        """The frames of a window; the first thing that is drawn for an item is its shift."""
        frames = self._sources[clip.video][1]
        start = clip.start
        if self.augment:
            stride = stride_of(clip.clip_len, self.stride_ratio)
            start = jittered(start, clip.clip_len, frames, stride, generator)
        return frame_indices(start, clip.clip_len, self.num_frames, frames)

    def _read(self, clip: Clip, indices: np.ndarray) -> np.ndarray:
        source, frames = self._sources[clip.video]
        video: Video = open_video(source, frames=frames) if isinstance(source, Path) else source
        return video.read(indices)


def video_average(logits: torch.Tensor, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of videos: the mean over each one's clips of their softmax.

    Args:
        logits: Shape (n, classes), floating point: a row a clip.
        video: Shape (n,), integers: which video each clip is of, in any order.

    Returns:
        Scores of shape (videos, classes), dtype of `logits`, whose rows sum to 1; and the videos, shape
        (videos,), ascending.

    Raises:
        InputError: The shapes or dtypes are others.
    """
    fits = logits.ndim == 2 and logits.is_floating_point() and video.shape == logits.shape[:1]
    if not fits or video.is_floating_point() or video.dtype == torch.bool:
        raise InputError(
            f"`logits` ({logits.dtype}, shape {tuple(logits.shape)}) must be floats of shape (n, classes) "
            f"and `video` ({video.dtype}, shape {tuple(video.shape)}) integers of shape (n,)"
        )
    videos, place, clips = torch.unique(video, return_inverse=True, return_counts=True)
    sums = logits.new_zeros(len(videos), logits.shape[1]).index_add_(0, place, logits.softmax(dim=1))
    return sums / clips.unsqueeze(1), videos


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Name -> where to read it from and how many frames it has, and name -> why it cannot be read."""

    sources: dict[str, tuple[Path | Video, int]]
    skipped: dict[str, str]


def _in_cache(cache: VideoCache, listed: Sequence[Entry]) -> _Found:
    names = [entry.video for entry in listed]
    return _Found(
        sources={name: (cache[name], cache[name].frames) for name in names if name in cache},
        skipped={
            name: cache.skipped.get(name, f"not in {cache.folder}") for name in names if name not in cache
        },
    )


def _in_folder(
    root: Path,
    listed: Sequence[Entry],
    counts: Path | str | None,
    on_error: str,
    progress: Callable[[int, int], None] | None,
) -> _Found:
    paths = {entry.video: find_video(root, entry.video) for entry in listed}
    missing = {name: f"not in {root}" for name, path in paths.items() if path is None}
    # Before frames are counted: that takes long.
    if missing and on_error == "raise":
        raise _missing(missing, len(listed))
    there = [(name, path) for name, path in paths.items() if path is not None]
    counted = count_frames(there, file=counts, on_error=on_error, progress=progress)
    sources = {name: (path, counted.frames[name]) for name, path in there if name in counted.frames}
    return _Found(sources=dict(sources), skipped={**missing, **counted.skipped})


def _missing(skipped: dict[str, str], listed: int) -> InputError:
    return InputError(
        f"{len(skipped)} of {listed} listed videos cannot be read: {_few(skipped)}; get them, or leave them "
        'out with on_error="skip"'
    )


def _few(skipped: dict[str, str]) -> str:
    named = [f"{name} ({why})" for name, why in list(skipped.items())[:_NAMED]]
    return ", ".join(named) + (", …" if len(skipped) > _NAMED else "")
