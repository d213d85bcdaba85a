"""The data that settings name: clips to learn from, in an order that a seed gives, and clips to judge by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sparseflow.pruning.config import MovingDigitsSettings, Settings
from sparseflow.pruning.data.moving_digits import MovingDigits
from sparseflow.pruning.data.ucf101 import UCF101

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """Both sides of a data set; items are `{"clip": [T, C, H, W], "label", "video"}`.

    Attributes:
        train: Clips to learn from.
        test: Clips to judge by, of other videos.
        classes: Names, by label.
        channels: Of a frame.
        epoch_clips: Clips of an epoch.
        fresh: Whether every epoch has clips of its own, one epoch's after the other's.
    """

    train: Dataset[dict[str, Any]]
    test: Dataset[dict[str, Any]]
    classes: tuple[str, ...]
    channels: int
    epoch_clips: int
    fresh: bool

    def order(self, epoch: int, seed: int) -> np.ndarray:
        """Places of an epoch's clips in the order in which they are learnt from, int64."""
        found = np.random.default_rng([seed, epoch]).permutation(self.epoch_clips)
        return found + epoch * self.epoch_clips if self.fresh else found

    def set_epoch(self, epoch: int) -> None:
        """What is drawn for training clips is that epoch's from now on."""
        if isinstance(self.train, UCF101):
            self.train.set_epoch(epoch)


class _Frozen(Dataset[dict[str, Any]]):
    """Clips that show their first frame over and over."""

    def __init__(self, clips: MovingDigits) -> None:
        self._clips = clips

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self._clips[index]
        return item | {"clip": item["clip"][:1].expand_as(item["clip"]).contiguous()}


def data_of(settings: Settings, *, progress: Callable[[int, int], None] | None = None) -> Data:
    """The data of some settings.

    Raises:
        InputError: A file is missing or a setting out of range.
        FileFormatError: A list, a cache or a video is damaged.
        MissingExtraError: A package is missing.
    """
    told, model = settings.data, settings.model
    if isinstance(told, MovingDigitsSettings):
        made = {
            train: MovingDigits(
                count=told.train_clips * settings.train.epochs if train else told.test_clips,
                train=train, seed=settings.train.seed if train else 0, num_frames=model.num_frames,
                size=model.img_size,
                speed=told.speed, clutter=told.clutter, noise=told.noise,
            )
            for train in (True, False)
        }  # fmt: skip
        shown = {train: _Frozen(each) if told.frozen else each for train, each in made.items()}
        return Data(
            train=shown[True], test=shown[False], classes=MovingDigits.classes, channels=1,
            epoch_clips=told.train_clips, fresh=True,
        )  # fmt: skip
    both = {
        train: UCF101(
            lists=told.lists, split=told.split, train=train, videos=told.videos, cache=told.cache,
            counts=told.counts, num_frames=model.num_frames, clip_lens=told.clip_lens,
            stride_ratio=told.stride_ratio, size=model.img_size, on_error=told.on_error,
            seed=settings.train.seed, progress=progress,
        )
        for train in (True, False)
    }  # fmt: skip
    return Data(
        train=both[True], test=both[False], classes=tuple(both[True].classes), channels=3,
        epoch_clips=len(both[True]), fresh=False,
    )  # fmt: skip


def batches(
    clips: Dataset[dict[str, Any]], places: np.ndarray, size: int, *, workers: int, device: torch.device
) -> Iterator[Batch]:
    """Clips in this order, `size` at a time; the last batch has what is left."""
    groups = [places[first : first + size].tolist() for first in range(0, len(places), size)]
    loader = DataLoader(
        clips, batch_sampler=groups, num_workers=workers, pin_memory=device.type == "cuda"
    )  # fmt: skip
    for batch in loader:
        yield {name: value.to(device, non_blocking=True) for name, value in batch.items()}
