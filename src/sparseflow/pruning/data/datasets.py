"""Datasets of a configuration: training clips in a seeded order, and test clips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sparseflow.core.progress import Progress
from sparseflow.errors import InputError
from sparseflow.pruning.config import (
    DataConfig,
    MovingDigitsConfig,
    MovingObjectsConfig,
    PruningConfig,
    UCF101Config,
    VideoFolderConfig,
    VideoTasksConfig,
)
from sparseflow.pruning.data.clips import VideoClips
from sparseflow.pruning.data.generated_clips import GeneratedClips
from sparseflow.pruning.data.moving_digits import MovingDigits
from sparseflow.pruning.data.moving_objects import MovingObjects
from sparseflow.pruning.data.shots import Shot, list_videos, read_shots, split_shots
from sparseflow.pruning.data.splits import DatasetSplit, read_split
from sparseflow.pruning.data.video_folder import read_video_folder
from sparseflow.pruning.data.video_tasks import VIDEO_TASKS, compute_frame_size

Batch = dict[str, Tensor]

SYNTHETIC_DATASETS: Mapping[str, type[MovingDigits] | type[MovingObjects]] = {
    "moving_digits": MovingDigits,
    "moving_objects": MovingObjects,
}
"""`kind` of a configuration -> dataset of gray clips that are generated on access."""

_UCF101_CLASSES = 101


@dataclass(frozen=True, kw_only=True, eq=False)
class VideoDataset:
    """Training and test clips; items are `{"clip": [T, C, H, W], "label", "video"}`.

    Attributes:
        train: Training clips.
        test: Test clips of other videos.
        classes: Class names by label.
        num_channels: Channels of a frame.
        epoch_clips: Clips of an epoch.
        new_clips_per_epoch: Whether each epoch has its own clips, stored epoch by epoch.
    """

    train: Dataset[dict[str, Any]]
    test: Dataset[dict[str, Any]]
    classes: tuple[str, ...]
    num_channels: int
    epoch_clips: int
    new_clips_per_epoch: bool

    def shuffle_epoch(self, epoch: int, seed: int) -> np.ndarray:
        """Indices of the clips of an epoch in training order, int64."""
        order = np.random.default_rng([seed, epoch]).permutation(self.epoch_clips)
        return order + epoch * self.epoch_clips if self.new_clips_per_epoch else order

    def set_epoch(self, epoch: int) -> None:
        """Select the random augmentations of an epoch."""
        if isinstance(self.train, VideoClips):
            self.train.set_epoch(epoch)


def load_video_dataset(config: PruningConfig, *, progress: Progress | None = None) -> VideoDataset:
    """Open the dataset of a configuration.

    Raises:
        InputError: A file is missing or a setting is out of range.
        FileFormatError: A list, a cache or a video is damaged.
        MissingExtraError: A package is missing.
    """
    data, model = config.data, config.model
    if isinstance(data, MovingDigitsConfig | MovingObjectsConfig):
        dataset = SYNTHETIC_DATASETS[data.kind]
        settings = data.model_dump(exclude={"kind", "train_clips", "test_clips"})
        clips = {
            train: dataset(
                num_clips=data.train_clips * config.train.epochs if train else data.test_clips,
                train=train, seed=config.train.seed if train else 0, num_frames=model.num_frames,
                size=model.img_size, **settings,
            )
            for train in (True, False)
        }  # fmt: skip
        return VideoDataset(
            train=clips[True], test=clips[False], classes=dataset.classes, num_channels=1,
            epoch_clips=data.train_clips, new_clips_per_epoch=True,
        )  # fmt: skip
    if isinstance(data, VideoTasksConfig):
        return _load_video_tasks(config, data, progress)
    split, videos_dir = _read_split(data)
    clips = {
        train: VideoClips(
            split=split, train=train, videos_dir=videos_dir, cache_dir=data.cache, counts_path=data.counts,
            num_frames=model.num_frames, clip_lens=data.clip_lens, stride_ratio=data.stride_ratio,
            size=model.img_size, on_error=data.on_error, seed=config.train.seed, progress=progress,
        )
        for train in (True, False)
    }  # fmt: skip
    return VideoDataset(
        train=clips[True], test=clips[False], classes=split.classes, num_channels=3,
        epoch_clips=len(clips[True]), new_clips_per_epoch=False,
    )  # fmt: skip


def _load_video_tasks(
    config: PruningConfig, data: VideoTasksConfig, progress: Progress | None
) -> VideoDataset:
    model, dataset = config.model, VIDEO_TASKS[data.task]
    min_frames = dataset.count_window_frames(model.num_frames, data.stride)

    def read(videos: list[Path]) -> list[Shot]:
        return read_shots(
            videos, size=compute_frame_size(model.img_size), min_frames=min_frames, on_error=data.on_error,
            progress=progress,
        )  # fmt: skip

    videos = _list_videos(data.videos)
    if data.test is None:
        train, test = split_shots(read(videos), data.test_fraction, data.split_seed)
    else:
        test_videos = _list_videos(data.test)
        train_videos = [video for video in videos if video not in test_videos]
        if not train_videos:
            raise InputError("all `videos` are also in `test`; add other videos for the training")
        train, test = read(train_videos), read(test_videos)
    clips = {
        is_train: dataset(
            shots=train if is_train else test, train=is_train, seed=config.train.seed if is_train else 0,
            num_clips=data.train_clips * config.train.epochs if is_train else data.test_clips,
            num_frames=model.num_frames, size=model.img_size, stride=data.stride,
            subtract_mean=data.subtract_mean,
        )
        for is_train in (True, False)
    }  # fmt: skip
    return VideoDataset(
        train=clips[True], test=clips[False], classes=dataset.classes, num_channels=3,
        epoch_clips=data.train_clips, new_clips_per_epoch=True,
    )  # fmt: skip


def _list_videos(paths: Path | Sequence[Path]) -> list[Path]:
    return list_videos([paths] if isinstance(paths, Path) else paths)


def count_classes(data: DataConfig) -> tuple[int, int]:
    """Return the classes and channels of a dataset; without its lists, UCF-101 has all its classes."""
    if isinstance(data, MovingDigitsConfig | MovingObjectsConfig):
        return len(SYNTHETIC_DATASETS[data.kind].classes), 1
    if isinstance(data, VideoTasksConfig):
        return len(VIDEO_TASKS[data.task].classes), 3
    if isinstance(data, UCF101Config) and not data.lists.is_dir():
        return _UCF101_CLASSES, 3
    return len(_read_split(data)[0].classes), 3


def _read_split(data: UCF101Config | VideoFolderConfig) -> tuple[DatasetSplit, Path | None]:
    """Read the training and test videos, and the directory of the videos."""
    if isinstance(data, UCF101Config):
        return read_split(data.lists, data.split), data.videos
    return read_video_folder(
        data.train, data.test, videos_dir=data.videos, classes_path=data.classes, split=data.split,
        test_fraction=data.test_fraction, split_seed=data.split_seed,
    )  # fmt: skip


def load_batches(
    clips: Dataset[dict[str, Any]],
    indices: np.ndarray,
    batch_size: int,
    *,
    workers: int,
    device: torch.device,
) -> Iterator[Batch]:
    """Yield batches of clips in the order of `indices`; the last batch may be smaller.

    Without `workers`, generated clips are made on the device.
    """
    groups = [indices[start : start + batch_size].tolist() for start in range(0, len(indices), batch_size)]
    if isinstance(clips, GeneratedClips) and workers == 0:
        for group in groups:
            yield clips.make_batch(group, device)
        return
    loader = DataLoader(clips, batch_sampler=groups, num_workers=workers, pin_memory=device.type == "cuda")
    for batch in loader:
        yield {name: value.to(device, non_blocking=True) for name, value in batch.items()}
