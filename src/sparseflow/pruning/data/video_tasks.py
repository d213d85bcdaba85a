"""Tasks on unlabeled videos: the label of a clip is how its frames were taken from a shot.

===========  ============================================  ===================================================
task         classes                                       source
===========  ============================================  ===================================================
`direction`  forwards, backwards                           Wei et al., Learning and using the arrow of time,
                                                           CVPR 2018
`speed`      every frame, every 2nd and every 4th frame    Benaim et al., SpeedNet, CVPR 2020
`order`      permutations of three chunks                  Xu et al., Self-supervised spatiotemporal learning
                                                           via video clip order prediction, CVPR 2019
===========  ============================================  ===================================================

All classes of a task take their frames from the same windows of the shots: those of `direction` and `order`
have the same frames, and those of `speed` the same center. A clip never contains a cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from sparseflow.core.checks import check_at_least
from sparseflow.errors import InputError
from sparseflow.pruning.data.generated_clips import GeneratedClips
from sparseflow.pruning.data.sampling import normalize_clip
from sparseflow.pruning.data.shots import Shot

Task = Literal["direction", "speed", "order"]

SPEEDS = (1, 2, 4)
"""Strides of the classes of `speed`, in units of the argument `stride`."""

_CHUNKS = 3
_ORDERS = tuple(permutations(range(_CHUNKS)))


def compute_frame_size(size: int) -> int:
    """Shorter side of the frames from which clips of `size` pixels are cropped; see `center_crop`."""
    return round(size * 256 / 224)


class VideoTaskClips(GeneratedClips, ABC):
    """Clips of shots, sampled on access, with a label that follows from their frames.

    An item is `{"clip": float32 of shape (num_frames, 3, size, size), normalized as for ImageNet, "label":
    int, "video": index}`. It depends only on `seed`, `train`, the index and the shots. Training clips are
    cropped and flipped at random, test clips are cropped at the center.

    Args:
        shots: Shots of `compute_frame_size` with enough frames, see `count_window_frames`.
        num_clips: Number of clips.
        train: Crop and flip at random.
        seed: Random seed.
        num_frames: Frames of a clip.
        size: Side of a frame, pixels.
        stride: Frames of the video from one frame of a clip to the next.
        subtract_mean: Subtract from each pixel its mean over the clip, which leaves what changes. Otherwise
            what does not change is most of a clip, and a small model learns slowly.

    Attributes:
        shots: Shots of the clips.

    Raises:
        InputError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        shots: Sequence[Shot],
        num_clips: int,
        train: bool,
        seed: int = 0,
        num_frames: int = 12,
        size: int = 64,
        stride: int = 1,
        subtract_mean: bool = False,
    ) -> None:
        check_at_least(1, num_clips=num_clips, size=size)
        check_at_least(0, seed=seed)
        window = self.count_window_frames(num_frames, stride)
        self.shots, self.num_clips, self.train, self.seed = tuple(shots), num_clips, train, seed
        self.size, self.subtract_mean = size, subtract_mean
        self._offsets = self.list_offsets(num_frames, stride)
        self._device_shots: dict[torch.device | str, list[Tensor]] = {}
        # First window of each shot, and the number of all windows.
        self._window_bounds = np.cumsum([0] + [len(shot.frames) - window + 1 for shot in self.shots])

    @classmethod
    def count_window_frames(cls, num_frames: int, stride: int) -> int:
        """Frames of a shot that a clip needs.

        Raises:
            InputError: An argument is out of range.
        """
        check_at_least(2, num_frames=num_frames)
        check_at_least(1, stride=stride)
        return int(cls.list_offsets(num_frames, stride).max()) + 1

    @staticmethod
    @abstractmethod
    def list_offsets(num_frames: int, stride: int) -> np.ndarray:
        """List the frames of each class from the start of the window; int64, shape (classes, num_frames)."""

    def make_batch(
        self, indices: Sequence[int] | np.ndarray, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Sample several clips.

        Args:
            indices: Indices of n clips.
            device: Device of the clips; the frames of the shots are copied to it once.

        Returns:
            `clip`, float32 of shape (n, num_frames, 3, size, size); `label` and `video`, int64 of shape (n,).

        Raises:
            IndexError: An index is out of range.
        """
        self.check_indices(indices)
        uniform = np.array(
            [np.random.default_rng([self.seed, int(self.train), int(index)]).random(5) for index in indices]
        )
        labels = (uniform[:, 0] * len(self.classes)).astype(np.int64)
        windows = (uniform[:, 1] * self._window_bounds[-1]).astype(np.int64)
        shot_numbers = np.searchsorted(self._window_bounds, windows, side="right") - 1
        frames = (windows - self._window_bounds[shot_numbers])[:, None] + self._offsets[labels]
        shots, device_frames = self._copy_shots(device), torch.from_numpy(frames).to(device)
        clips = []
        for number, clip_frames, position in zip(shot_numbers, device_frames, uniform[:, 2:4], strict=True):
            shot = shots[number]
            row, column = map(self._place_crop, shot.shape[2:], position)
            clips.append(shot[:, :, row : row + self.size, column : column + self.size][clip_frames])
        clip = torch.stack(clips)
        if self.train:
            is_flipped = torch.from_numpy(uniform[:, 4] < 0.5).to(device)[:, None, None, None, None]
            clip = torch.where(is_flipped, clip.flip(-1), clip)
        clip = normalize_clip(clip)
        if self.subtract_mean:
            clip -= clip.mean(1, keepdim=True)
        return {
            "clip": clip,
            "label": torch.from_numpy(labels).to(device),
            "video": torch.from_numpy(np.array(indices, np.int64)).to(device),
        }

    def _copy_shots(self, device: torch.device | str) -> list[Tensor]:
        if device not in self._device_shots:
            self._device_shots[device] = [shot.frames.to(device) for shot in self.shots]
        return self._device_shots[device]

    def _place_crop(self, extent: int, position: float) -> int:
        """First row or column of a crop: at a random position between 0 and 1, or at the center."""
        return int(position * (extent - self.size + 1)) if self.train else (extent - self.size) // 2


class DirectionClips(VideoTaskClips):
    """Clips that play forwards or backwards."""

    classes = ("forwards", "backwards")

    @staticmethod
    def list_offsets(num_frames: int, stride: int) -> np.ndarray:
        forwards = stride * np.arange(num_frames)
        return np.stack([forwards, forwards[::-1]])


class SpeedClips(VideoTaskClips):
    """Clips of every frame, of every second and of every fourth frame."""

    classes = tuple(f"{speed}x" for speed in SPEEDS)

    @staticmethod
    def list_offsets(num_frames: int, stride: int) -> np.ndarray:
        clips = np.outer(SPEEDS, stride * np.arange(num_frames))
        return clips + (clips.max() - clips[:, -1:]) // 2


class OrderClips(VideoTaskClips):
    """Clips of three chunks in one of six orders."""

    classes = tuple("".join(str(chunk + 1) for chunk in order) for order in _ORDERS)

    @staticmethod
    def list_offsets(num_frames: int, stride: int) -> np.ndarray:
        if num_frames % _CHUNKS:
            raise InputError(
                f"`num_frames` (={num_frames}) must be divisible by {_CHUNKS} for the task order, which cuts "
                f"a clip into {_CHUNKS} chunks"
            )
        chunks = stride * np.arange(num_frames).reshape(_CHUNKS, -1)
        return np.stack([chunks[list(order)].reshape(-1) for order in _ORDERS])


VIDEO_TASKS: Mapping[Task, type[VideoTaskClips]] = {
    "direction": DirectionClips,
    "speed": SpeedClips,
    "order": OrderClips,
}
