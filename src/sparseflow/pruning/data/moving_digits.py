"""Moving digits: synthetic clips whose label is the direction of motion, which no single frame shows.

scikit-learn's 1,797 handwritten digits of 8 x 8 pixels move on a torus (a digit that leaves on one side
re-enters on the other) in one of eight directions, over static clutter made of pieces of other digits. Digit,
start and clutter are independent of the label, and the start is uniform, so that each frame on its own has
the same distribution for all labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from sparseflow.core.checks import check_at_least, check_non_negative
from sparseflow.core.extras import require
from sparseflow.errors import InputError
from sparseflow.pruning.data.generated_clips import GeneratedClips

CLASSES = ("right", "up-right", "up", "up-left", "left", "down-left", "down", "down-right")
"""Direction by label: label * 45 degrees counter-clockwise from right."""

DIRECTIONS = np.array([(0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1), (1, 0), (1, 1)])
"""Rows and columns of one step at speed 1, by label."""

DIGIT_SIZE = 8
"""Side of a digit, pixels."""

PIECE_SIZE = 5
"""Side of a piece of clutter, pixels."""

TRAIN_SHARE = 0.8
"""Fraction of the digits in training clips; test clips have the others."""

_SPLIT_SEED = 1797
_NUMBERS_PER_CLIP = 4
"""Random numbers of a clip before those of its pieces: label, digit, row, column."""
_NUMBERS_PER_PIECE = 5


@dataclass(frozen=True, kw_only=True)
class _ClipParameters:
    """Random parameters of a batch of B clips with P pieces of clutter each; integers.

    Attributes:
        labels: Shape (B,).
        digits: Digit of each clip, an index into the digits of the split, shape (B,).
        starts: Row and column of the digit's corner in frame 0, shape (B, 2).
        piece_digits: Digits from which the pieces are cut, shape (B, P).
        piece_corners: Corner of each piece in its digit, shape (B, P, 2).
        piece_positions: Corner of each piece in the frame, shape (B, P, 2).
    """

    labels: np.ndarray
    digits: np.ndarray
    starts: np.ndarray
    piece_digits: np.ndarray
    piece_corners: np.ndarray
    piece_positions: np.ndarray


class MovingDigits(GeneratedClips):
    """Clips of moving digits, generated on access.

    An item is `{"clip": float32 of shape (num_frames, 1, size, size), 0 for background and 1 for ink before
    noise, "label": int, "video": index}`. It depends only on `seed`, `train` and the index.

    Args:
        num_clips: Number of clips.
        train: Use the training digits; the split of the digits is the same for every seed.
        seed: Random seed.
        num_frames: Frames of a clip.
        size: Side of a frame, pixels.
        speed: Pixels per frame along each axis of motion.
        clutter: Number of static pieces of digits.
        noise: Standard deviation of the Gaussian noise of each pixel.
        frozen: Repeat the first frame: a control in which the motion cannot be recognized.

    Raises:
        InputError: An argument is out of range.
        MissingExtraError: scikit-learn is missing.
    """

    classes = CLASSES

    def __init__(
        self,
        *,
        num_clips: int,
        train: bool,
        seed: int = 0,
        num_frames: int = 8,
        size: int = 32,
        speed: int = 2,
        clutter: int = 8,
        noise: float = 0.05,
        frozen: bool = False,
    ) -> None:
        check_at_least(1, num_clips=num_clips)
        check_at_least(2, num_frames=num_frames)
        check_at_least(2 * DIGIT_SIZE, size=size)
        # At half the side, right and left would be the same motion.
        if not 0 < speed < size / 2:
            raise InputError(f"`speed` (={speed}) must be at least 1 and below half of `size` (={size})")
        check_at_least(0, clutter=clutter, seed=seed)
        check_non_negative(noise=noise)
        self.num_clips, self.train, self.seed = num_clips, train, seed
        self.num_frames, self.size, self.speed = num_frames, size, speed
        self.clutter, self.noise, self.frozen = clutter, noise, frozen
        self.source_digits = split_digits(train=train)
        self._digits = _load_digit_images()[self.source_digits]

    def make_batch(
        self, indices: Sequence[int] | np.ndarray, device: torch.device | str = "cpu"
    ) -> dict[str, torch.Tensor]:
        """Generate several clips.

        Args:
            indices: Indices of n clips.
            device: Device to which the clips are copied.

        Returns:
            `clip`, float32 of shape (n, num_frames, 1, size, size); `label` and `video`, int64 of shape (n,).

        Raises:
            IndexError: An index is out of range.
        """
        parameters, generators = self._sample_parameters(indices)
        batch = {
            "clip": torch.from_numpy(self._draw_clips(parameters, generators)).unsqueeze(2),
            "label": torch.from_numpy(parameters.labels),
            "video": torch.from_numpy(np.array(indices, np.int64)),
        }
        return {name: value.to(device) for name, value in batch.items()}

    def _sample_parameters(
        self, indices: Sequence[int] | np.ndarray
    ) -> tuple[_ClipParameters, list[np.random.Generator]]:
        """Parameters of clips, and the generators for their noise."""
        self.check_indices(indices)
        generators = [np.random.default_rng([self.seed, int(self.train), int(index)]) for index in indices]
        side, num_digits, num_corners = self.size, len(self._digits), DIGIT_SIZE - PIECE_SIZE + 1
        piece_limits = [num_digits, num_corners, num_corners, side, side]
        limits = [len(CLASSES), num_digits, side, side, *piece_limits * self.clutter]
        uniform = np.array([generator.random(len(limits)) for generator in generators])
        numbers = (uniform.reshape(-1, len(limits)) * limits).astype(np.int64)
        pieces = numbers[:, _NUMBERS_PER_CLIP:].reshape(len(numbers), self.clutter, _NUMBERS_PER_PIECE)
        parameters = _ClipParameters(
            labels=numbers[:, 0].copy(), digits=numbers[:, 1], starts=numbers[:, 2:4],
            piece_digits=pieces[..., 0], piece_corners=pieces[..., 1:3], piece_positions=pieces[..., 3:5],
        )  # fmt: skip
        return parameters, generators

    def _draw_clips(
        self, parameters: _ClipParameters, generators: Sequence[np.random.Generator]
    ) -> np.ndarray:
        """Clips with noise; float32, shape (B, num_frames, size, size)."""
        shape = (len(generators), self.num_frames, self.size, self.size)
        noise = np.zeros(shape, np.float32)
        if self.noise:
            for clip_noise, generator in zip(noise, generators, strict=True):
                generator.standard_normal(out=clip_noise, dtype=np.float32)
            noise *= self.noise
        clips = np.broadcast_to(self._draw_clutter(parameters)[:, None], shape).copy()
        index = self._index_digit_pixels(parameters)
        clips[index] = np.maximum(clips[index], self._digits[parameters.digits][:, None])
        clips += noise
        return clips[:, :1].repeat(self.num_frames, 1) if self.frozen else clips

    def _draw_clutter(self, parameters: _ClipParameters) -> np.ndarray:
        """Background of clips; float32, shape (B, size, size)."""
        clips = np.arange(len(parameters.labels))[:, None, None]
        background = np.zeros((len(parameters.labels), self.size, self.size), np.float32)
        for piece in range(self.clutter):
            rows, cols = _index_squares(parameters.piece_corners[:, piece], PIECE_SIZE)
            ink = self._digits[parameters.piece_digits[:, piece, None, None], rows, cols]
            rows, cols = _index_squares(parameters.piece_positions[:, piece], PIECE_SIZE)
            index = (clips, rows % self.size, cols % self.size)
            background[index] = np.maximum(background[index], ink)
        return background

    def _index_digit_pixels(self, parameters: _ClipParameters) -> tuple[np.ndarray, ...]:
        """Index of the digit's pixels in (B, T, size, size); selects (B, T, 8, 8)."""
        steps = DIRECTIONS[parameters.labels][:, None] * self.speed * np.arange(self.num_frames)[:, None]
        rows, cols = _index_squares(parameters.starts[:, None] + steps, DIGIT_SIZE)
        clips = np.arange(len(parameters.labels))[:, None, None, None]
        frames = np.arange(self.num_frames)[:, None, None]
        return clips, frames, rows % self.size, cols % self.size


def split_digits(*, train: bool) -> np.ndarray:
    """Indices of scikit-learn's digits in training or test clips; int64, ascending.

    Raises:
        MissingExtraError: scikit-learn is missing.
    """
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(_load_digit_images()))
    num_train = round(TRAIN_SHARE * len(order))
    return np.sort(order[:num_train] if train else order[num_train:])


@cache
def _load_digit_images() -> np.ndarray:
    """scikit-learn's digits; float32, shape (1797, 8, 8), in [0, 1]."""
    images = require("sklearn.datasets", "pruning").load_digits().images
    return (images / 16).astype(np.float32)


def _index_squares(corners: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (..., side, 1) and columns (..., 1, side) of squares with the given corners (..., 2)."""
    offsets = np.arange(side)
    return corners[..., 0, None, None] + offsets[:, None], corners[..., 1, None, None] + offsets
