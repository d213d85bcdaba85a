"""Moving objects: synthetic clips that tell token selectors apart.

A small object, a handwritten digit of one of four classes, moves over a textured or photographic background
in one of eight directions. The label is class and direction, so that a model has to find the object and to
follow it. The camera stands still, pans or zooms, and distractors, digits of other classes, move in random
directions. Object, background, camera and start are independent of the direction, and the start is uniform
on a torus, so that a single frame does not show the direction.

Digits, textures and photographs of test clips do not appear in training clips: digits are split as in
`moving_digits`, textures have other random numbers, and a photograph is cut into two parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.core.checks import check_at_least, check_between, check_non_negative, check_one_of
from sparseflow.core.extras import require
from sparseflow.pruning.data.generated_clips import GeneratedClips
from sparseflow.pruning.data.moving_digits import CLASSES as DIRECTION_NAMES
from sparseflow.pruning.data.moving_digits import DIRECTIONS, split_digits

Background = Literal["texture", "photo"]
Camera = Literal["still", "pan", "zoom", "mixed"]
BACKGROUNDS, CAMERAS = get_args(Background), get_args(Camera)

OBJECT_CLASSES = (0, 1, 4, 7)
"""Digits with a label; distractors are the other digits."""

CLASSES = tuple(f"{digit} {direction}" for digit in OBJECT_CLASSES for direction in DIRECTION_NAMES)
"""Name by label, which is 8 * index of the digit + direction."""

MIN_COVER = 0.2
"""Share of a patch that the object's square covers, from which the patch belongs to the object."""

_TEXTURES = 256
"""Textures of each split."""
_MARGIN = 1.5
"""Side of a background relative to that of a frame, so that the camera can move."""
_SPECTRUM = 0.9
"""Exponent of the amplitude spectrum of textures, 1 / frequency."""
_PHOTO_SPLIT = 0.7
"""Part of the width of a photograph that training clips see."""
_TEXTURE_SEED = 411
_MEAN, _STD = 0.35, 0.15
"""Mean and standard deviation of textures; clips are normalized with them."""


@dataclass(frozen=True, kw_only=True)
class _Sprites:
    """Moving squares of a batch: entry 0 of B x (1 + distractors) is the object.

    Attributes:
        images: Ink of each square, float32, [B, S, side, side].
        corners: Row and column in each frame, int64, [B, S, T, 2].
    """

    images: np.ndarray
    corners: np.ndarray


class MovingObjects(GeneratedClips):
    """Clips of moving objects, generated on access.

    An item is `{"clip": float32 of shape (num_frames, 1, size, size), normalized, "label": int, "video":
    index}`. It depends only on `seed`, `train` and the index.

    Args:
        num_clips: Number of clips.
        train: Use the digits and backgrounds of training clips.
        seed: Random seed.
        num_frames: Frames of a clip.
        size: Side of a frame, pixels.
        object_size: Side of the object and of the distractors, pixels.
        speed: Pixels per frame along each axis of the object's motion.
        background: `"texture"`, 1/f noise, or `"photo"`, scikit-learn's two photographs.
        camera: `"still"`, `"pan"`, `"zoom"`, or `"mixed"` for one of the three in each clip.
        camera_speed: Pixels per frame of a pan; a zoom moves the borders of the frame as much.
        distractors: Other moving digits.
        noise: Standard deviation of the Gaussian noise of each pixel, whose range without noise is 1.

    Raises:
        InputError: An argument is out of range.
        MissingExtraError: scikit-learn, or Pillow for photographs, is missing.
    """

    classes = CLASSES

    def __init__(
        self,
        *,
        num_clips: int,
        train: bool,
        seed: int = 0,
        num_frames: int = 8,
        size: int = 64,
        object_size: int = 12,
        speed: int = 3,
        background: Background = "texture",
        camera: Camera = "still",
        camera_speed: float = 1.0,
        distractors: int = 1,
        noise: float = 0.02,
    ) -> None:
        check_at_least(1, num_clips=num_clips)
        check_at_least(2, num_frames=num_frames)
        check_at_least(0, distractors=distractors, seed=seed)
        check_between(8, size // 2, object_size=object_size)
        # At half the side, right and left would be the same motion.
        check_between(1, (size - 1) // 2, speed=speed)
        check_between(0.0, (_MARGIN - 1.0) * size / num_frames, camera_speed=camera_speed)
        check_non_negative(noise=noise)
        check_one_of(BACKGROUNDS, background=background)
        check_one_of(CAMERAS, camera=camera)
        self.num_clips, self.train, self.seed = num_clips, train, seed
        self.num_frames, self.size, self.object_size, self.speed = num_frames, size, object_size, speed
        self.background, self.camera, self.camera_speed = background, camera, camera_speed
        self.distractors, self.noise = distractors, noise
        self._digits = _load_digits(object_size, train)

    def make_batch(self, indices: Sequence[int] | np.ndarray) -> dict[str, Tensor]:
        """Generate several clips.

        Args:
            indices: Indices of n clips.

        Returns:
            `clip`, float32 of shape (n, num_frames, 1, size, size); `label` and `video`, int64 of shape (n,);
            `corner`, row and column of the object in each frame, int64 of shape (n, num_frames, 2).

        Raises:
            IndexError: An index is out of range.
        """
        generators = [self._make_generator(index) for index in indices]
        labels = np.array([generator.integers(len(CLASSES)) for generator in generators])
        sprites = self._sample_sprites(labels, generators)
        clips = self._draw_backgrounds(generators)
        self._draw_sprites(clips, sprites)
        for clip, generator in zip(clips, generators, strict=True):
            clip += self.noise * generator.standard_normal(clip.shape, np.float32)
        return {
            "clip": torch.from_numpy((clips - _MEAN) / _STD).unsqueeze(2),
            "label": torch.from_numpy(labels),
            "video": torch.from_numpy(np.array(indices, np.int64)),
            "corner": torch.from_numpy(sprites.corners[:, 0]),
        }

    def find_object_tokens(self, corners: Tensor, patch_size: int, tubelet_size: int = 1) -> Tensor:
        """Find the tokens that belong to the object.

        Args:
            corners: `corner` of `make_batch`.
            patch_size: Side of a patch, pixels.
            tubelet_size: Frames of a token, which belongs to the object if it does in one of them.

        Returns:
            bool, shape (n, num_frames / tubelet_size, (size / patch_size) ** 2).
        """
        offsets = torch.arange(self.object_size)
        covered = [
            functional.one_hot((corners[..., axis, None] + offsets) % self.size, self.size).sum(-2)
            for axis in (0, 1)
        ]
        rows, columns = (part.float().unflatten(-1, (-1, patch_size)).mean(-1) for part in covered)
        cover = rows[..., :, None] * columns[..., None, :]
        return (cover > MIN_COVER).flatten(2).unflatten(1, (-1, tubelet_size)).any(2)

    def _make_generator(self, index: int) -> np.random.Generator:
        if not 0 <= index < self.num_clips:
            raise IndexError(f"clip {index} does not exist; there are {self.num_clips}")
        return np.random.default_rng([self.seed, int(self.train), int(index)])

    def _sample_sprites(self, labels: np.ndarray, generators: Sequence[np.random.Generator]) -> _Sprites:
        num_sprites, num_directions = 1 + self.distractors, len(DIRECTIONS)
        unlabeled = [digit for digit in range(10) if digit not in OBJECT_CLASSES]
        images = np.empty((len(labels), num_sprites, self.object_size, self.object_size), np.float32)
        corners = np.empty((len(labels), num_sprites, self.num_frames, 2), np.int64)
        frames = np.arange(self.num_frames)[:, None]
        for clip, (label, generator) in enumerate(zip(labels, generators, strict=True)):
            digits = [OBJECT_CLASSES[label // num_directions], *generator.choice(unlabeled, self.distractors)]
            directions = [label % num_directions, *generator.integers(num_directions, size=self.distractors)]
            for sprite, (digit, direction) in enumerate(zip(digits, directions, strict=True)):
                choices = self._digits[digit]
                images[clip, sprite] = choices[generator.integers(len(choices))]
                start = generator.integers(self.size, size=2)
                corners[clip, sprite] = (start + self.speed * frames * DIRECTIONS[direction]) % self.size
        return _Sprites(images=images, corners=corners)

    def _draw_sprites(self, clips: np.ndarray, sprites: _Sprites) -> None:
        """Draw the squares, the object last, so that distractors do not cover it."""
        offsets = np.arange(self.object_size)
        batch = np.arange(len(clips))[:, None, None, None]
        frames = np.arange(self.num_frames)[:, None, None]
        for sprite in reversed(range(sprites.images.shape[1])):
            corners = sprites.corners[:, sprite]
            rows = (corners[..., 0, None] + offsets)[..., :, None] % self.size
            columns = (corners[..., 1, None] + offsets)[..., None, :] % self.size
            ink = sprites.images[:, sprite, None]
            index = (batch, frames, rows, columns)
            clips[index] = clips[index] * (1.0 - ink) + ink

    def _draw_backgrounds(self, generators: Sequence[np.random.Generator]) -> np.ndarray:
        """Backgrounds as the moving camera sees them, float32, [B, T, size, size]."""
        side = round(_MARGIN * self.size)
        sources = (
            _load_textures(side, self.train) if self.background == "texture" else _load_photos(self.train)
        )
        images = np.empty((len(generators), 1, side, side), np.float32)
        transforms = np.empty((len(generators), self.num_frames, 2, 3), np.float32)
        for clip, generator in enumerate(generators):
            source = sources[generator.integers(len(sources))]
            row, column = (generator.integers(extent - side + 1) for extent in source.shape)
            images[clip, 0] = source[row : row + side, column : column + side]
            transforms[clip] = self._sample_camera(generator)
        grid = functional.affine_grid(
            torch.from_numpy(transforms).flatten(0, 1),
            [len(generators) * self.num_frames, 1, self.size, self.size],
            align_corners=False,
        )
        views = torch.from_numpy(images).repeat_interleave(self.num_frames, 0)
        frames = functional.grid_sample(views, grid, align_corners=False)
        return frames.view(len(generators), self.num_frames, self.size, self.size).numpy()

    def _sample_camera(self, generator: np.random.Generator) -> np.ndarray:
        """Affine transforms of the camera's frames to the background, float32, [T, 2, 3]."""
        cameras = CAMERAS[:3]
        camera = cameras[generator.integers(3)] if self.camera == "mixed" else self.camera
        angle, sign = generator.uniform(0.0, 2.0 * np.pi), generator.choice([-1.0, 1.0])
        # Time is centered, so that no frame leaves the background.
        moved = self.camera_speed * (np.arange(self.num_frames) - (self.num_frames - 1) / 2) / self.size
        scale = np.full(self.num_frames, 1.0 / _MARGIN)
        shift = np.zeros((self.num_frames, 2))
        if camera == "pan":
            shift = 2.0 / _MARGIN * moved[:, None] * np.array([np.cos(angle), np.sin(angle)])
        elif camera == "zoom":
            scale = scale * (1.0 + 2.0 * sign * moved)
        transforms = np.zeros((self.num_frames, 2, 3), np.float32)
        transforms[:, 0, 0] = transforms[:, 1, 1] = scale
        transforms[:, :, 2] = shift
        return transforms


@cache
def _load_digits(side: int, train: bool) -> dict[int, np.ndarray]:
    """Digit -> its images of one split, resized, float32, [n, side, side], 0 to 1."""
    data = require("sklearn.datasets", "pruning").load_digits()
    rows = split_digits(train=train)
    images = torch.from_numpy((data.images[rows] / 16.0).astype(np.float32))[:, None]
    images = functional.interpolate(images, (side, side), mode="bilinear", align_corners=False)[:, 0]
    return {digit: images[torch.from_numpy(data.target[rows] == digit)].numpy() for digit in range(10)}


@cache
def _load_textures(side: int, train: bool) -> np.ndarray:
    """1/f noise of one split, float32, [n, side, side], of `_MEAN` and `_STD`."""
    generator = np.random.default_rng([_TEXTURE_SEED, int(train)])
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(side), np.fft.fftfreq(side)))
    frequency[0, 0] = 1.0 / side
    spectra = np.fft.fft2(generator.standard_normal((_TEXTURES, side, side))) / frequency**_SPECTRUM
    textures = np.fft.ifft2(spectra).real
    textures -= textures.mean((1, 2), keepdims=True)
    textures /= textures.std((1, 2), keepdims=True)
    return (_MEAN + _STD * textures).astype(np.float32)


@cache
def _load_photos(train: bool) -> list[np.ndarray]:
    """Parts of scikit-learn's photographs of one split, gray, float32, 0 to 0.7."""
    photos = require("sklearn.datasets", "pruning").load_sample_images().images
    parts = []
    for photo in photos:
        gray = (0.7 / 255.0 * photo.astype(np.float32).mean(2)).astype(np.float32)
        cut = round(_PHOTO_SPLIT * gray.shape[1])
        parts.append(gray[:, :cut] if train else gray[:, cut:])
    return parts
