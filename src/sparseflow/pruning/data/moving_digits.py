"""Digits that move over clutter: clips whose label is the direction, of which no single frame says anything.

scikit-learn's 1,797 handwritten digits of 8 × 8 pixels move over a torus (what leaves on one side comes back
on the other) in one of eight directions, above clutter that stands still and is made of pieces of other
digits. Digit, start and clutter are drawn independently of the label, and the start uniformly, so that every
frame taken alone has the same distribution for all labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from sparseflow.core.extras import require
from sparseflow.errors import InputError

CLASSES = ("right", "up-right", "up", "up-left", "left", "down-left", "down", "down-right")
"""By label: the direction is the label times 45°, from right, counter-clockwise."""

STEPS = np.array([(0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1), (1, 0), (1, 1)])
"""By label: rows and columns that one step of speed 1 takes."""

DIGIT = 8
"""Side of a digit, in pixels."""

PIECE = 5
"""Side of a piece of clutter, in pixels."""

TRAIN_SHARE = 0.8
"""Of the digits, those that training clips are made of; test clips are made of the others."""

_SPLIT_SEED = 1797
_DRAWN_BEFORE_PIECES = 4
_DRAWN_EACH_PIECE = 5


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """What a batch of B clips with P pieces of clutter each is made of; all integers.

    Attributes:
        labels: Shape (B,).
        digits: Shape (B,): places among the digits of this side of the split.
        starts: Shape (B, 2): row and column of the digit's corner in frame 0.
        piece_digits: Shape (B, P): the digits that pieces are cut from.
        piece_corners: Shape (B, P, 2): where in those.
        piece_places: Shape (B, P, 2): where in the frame.
    """

    labels: np.ndarray
    digits: np.ndarray
    starts: np.ndarray
    piece_digits: np.ndarray
    piece_corners: np.ndarray
    piece_places: np.ndarray


class MovingDigits(Dataset[dict[str, Any]]):
    """Clips of moving digits, made when asked for.

    An item is `{"clip": float32 of shape (num_frames, in_chans, size, size), 0 is paper and 1 is ink, before
    noise, "label": int, "video": its place}`. It depends on `seed`, `train` and its place alone.

    Args:
        count: How many clips there are.
        train: Which side of the split of digits they are made of; the split is the same for every seed.
        seed: Of all that is drawn.
        num_frames: Of a clip.
        size: Side of a frame, in pixels.
        in_chans: 1, or 3 that are alike.
        speed: Pixels that a step takes along each axis that it moves along.
        clutter: Pieces of digits that stand still.
        noise: Standard deviation of the Gaussian noise that is added to every pixel of every frame.

    Raises:
        InputError: An argument is out of its range.
        MissingExtraError: scikit-learn is missing.
    """

    classes = CLASSES

    def __init__(
        self,
        *,
        count: int,
        train: bool,
        seed: int = 0,
        num_frames: int = 8,
        size: int = 32,
        in_chans: int = 1,
        speed: int = 2,
        clutter: int = 8,
        noise: float = 0.05,
    ) -> None:
        if count < 1 or num_frames < 2 or size < 2 * DIGIT:
            raise InputError(
                f"`count` (={count}) must be at least 1, `num_frames` (={num_frames}) at least 2, `size` "
                f"(={size}) at least {2 * DIGIT}"
            )
        if in_chans not in (1, 3):
            raise InputError(f"`in_chans` (={in_chans}) must be 1 or 3")
        # At half the side, right and left would be the same motion.
        if not 0 < speed < size / 2:
            raise InputError(f"`speed` (={speed}) must be at least 1 and below half of `size` (={size})")
        if clutter < 0 or not 0 <= noise < float("inf") or seed < 0:
            raise InputError(
                f"`clutter` (={clutter}), `noise` (={noise}) and `seed` (={seed}) must not be negative"
            )
        self.count, self.train, self.seed = count, train, seed
        self.num_frames, self.size, self.in_chans = num_frames, size, in_chans
        self.speed, self.clutter, self.noise = speed, clutter, noise
        self.sources = source_digits(train=train)
        self._digits = _images()[self.sources]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        # What a DataLoader calls with all places of a batch.
        made = self.batch(indices)
        labels, videos = made["label"].tolist(), made["video"].tolist()
        return [
            {"clip": clip, "label": label, "video": video}
            for clip, label, video in zip(made["clip"], labels, videos, strict=True)
        ]

    def batch(
        self, indices: Sequence[int] | np.ndarray, *, labels: Sequence[int] | np.ndarray | None = None
    ) -> dict[str, torch.Tensor]:
        """Many clips at once.

        Args:
            indices: Places, n of them.
            labels: Directions to move in, in place of those that were drawn; all else stays the same.

        Returns:
            `clip`, float32 of shape (n, num_frames, in_chans, size, size); `label` and `video`, int64 of
            shape (n,).

        Raises:
            IndexError: A place is not there.
            InputError: `labels` are not n labels.
        """
        drawn, generators = self._draw(indices, labels)
        shape = (len(generators), self.num_frames, self.size, self.size)
        noise = np.zeros(shape, np.float32)
        if self.noise:
            for some, generator in zip(noise, generators, strict=True):
                generator.standard_normal(out=some, dtype=np.float32)
            noise *= self.noise
        clips = np.broadcast_to(self._background(drawn)[:, None], shape).copy()
        at = self._digit_at(drawn)
        clips[at] = np.maximum(clips[at], self._digits[drawn.digits][:, None])
        clips += noise
        clip = torch.from_numpy(clips).unsqueeze(2)
        return {
            "clip": clip.expand(-1, -1, self.in_chans, -1, -1).contiguous(),
            "label": torch.from_numpy(drawn.labels),
            "video": torch.from_numpy(np.array(indices, np.int64)),
        }

    def moving_mask(self, index: int) -> torch.Tensor:
        """Where the digit has ink; bool, shape (num_frames, size, size)."""
        drawn, _ = self._draw([index], None)
        mask = np.zeros((1, self.num_frames, self.size, self.size), bool)
        mask[self._digit_at(drawn)] = self._digits[drawn.digits][:, None] > 0
        return torch.from_numpy(mask[0])

    def _draw(
        self, indices: Sequence[int] | np.ndarray, labels: Sequence[int] | np.ndarray | None
    ) -> tuple[_Drawn, list[np.random.Generator]]:
        """What clips are made of, and the generators that their noise is to be drawn from."""
        for index in indices:
            if not 0 <= index < self.count:
                raise IndexError(f"there is no clip {index}; there are {self.count}")
        generators = [np.random.default_rng([self.seed, int(self.train), int(index)]) for index in indices]
        side, digits, cuts = self.size, len(self._digits), DIGIT - PIECE + 1
        limits = [len(CLASSES), digits, side, side, *[digits, cuts, cuts, side, side] * self.clutter]
        uniform = np.array([generator.random(len(limits)) for generator in generators])
        numbers = (uniform.reshape(-1, len(limits)) * limits).astype(np.int64)
        pieces = numbers[:, _DRAWN_BEFORE_PIECES:].reshape(len(numbers), self.clutter, _DRAWN_EACH_PIECE)
        chosen = numbers[:, 0].copy() if labels is None else _checked_labels(labels, len(numbers))
        return (
            _Drawn(
                labels=chosen,
                digits=numbers[:, 1],
                starts=numbers[:, 2:4],
                piece_digits=pieces[..., 0],
                piece_corners=pieces[..., 1:3],
                piece_places=pieces[..., 3:5],
            ),
            generators,
        )

    def _background(self, drawn: _Drawn) -> np.ndarray:
        """The clutter; float32, shape (B, size, size)."""
        clips = np.arange(len(drawn.labels))[:, None, None]
        found = np.zeros((len(drawn.labels), self.size, self.size), np.float32)
        for piece in range(self.clutter):
            rows, cols = _square(drawn.piece_corners[:, piece], PIECE)
            ink = self._digits[drawn.piece_digits[:, piece, None, None], rows, cols]
            rows, cols = _square(drawn.piece_places[:, piece], PIECE)
            at = (clips, rows % self.size, cols % self.size)
            found[at] = np.maximum(found[at], ink)
        return found

    def _digit_at(self, drawn: _Drawn) -> tuple[np.ndarray, ...]:
        """The digit's pixels as an index of (B, T, size, size); it picks (B, T, 8, 8)."""
        steps = STEPS[drawn.labels][:, None] * self.speed * np.arange(self.num_frames)[:, None]
        rows, cols = _square(drawn.starts[:, None] + steps, DIGIT)
        clips = np.arange(len(drawn.labels))[:, None, None, None]
        frames = np.arange(self.num_frames)[:, None, None]
        return clips, frames, rows % self.size, cols % self.size


def source_digits(*, train: bool) -> np.ndarray:
    """Which of scikit-learn's digits clips are made of; int64, ascending.

    Raises:
        MissingExtraError: scikit-learn is missing.
    """
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(_images()))
    cut = round(TRAIN_SHARE * len(order))
    return np.sort(order[:cut] if train else order[cut:])


@cache
def _images() -> np.ndarray:
    """scikit-learn's digits; float32, shape (1797, 8, 8), in [0, 1]."""
    images = require("sklearn.datasets", "pruning").load_digits().images
    return (images / 16).astype(np.float32)


def _square(corners: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows, shape (…, side, 1), and columns, (…, 1, side), of squares whose corners have shape (…, 2)."""
    along = np.arange(side)
    return corners[..., 0, None, None] + along[:, None], corners[..., 1, None, None] + along


def _checked_labels(labels: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    chosen = np.array(labels)
    if (
        chosen.shape != (count,)
        or chosen.dtype.kind not in "iu"
        or not np.isin(chosen, range(len(CLASSES))).all()
    ):
        raise InputError(f"`labels` (={labels}) must be {count} integers from 0 to {len(CLASSES) - 1}")
    return chosen.astype(np.int64)
