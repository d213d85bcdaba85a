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
from functools import cache, cached_property
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
_NOISES = 2**22
"""Clips of noise, which are parts of one long sequence."""
_NUMBERS_PER_CLIP, _NUMBERS_PER_SPRITE = 8, 5
"""Random numbers of a clip and of each of its sprites."""
_MEAN, _STD = 0.35, 0.15
"""Mean and standard deviation of textures; clips are normalized with them."""


@dataclass(frozen=True, kw_only=True)
class _ClipParameters:
    """Random parameters of a batch of B clips with S sprites each, of which sprite 0 is the object.

    Attributes:
        labels: int64, [B].
        backgrounds: Index of the source of each background, int64, [B].
        background_corners: Row and column of the background in its source, 0 to 1, [B, 2].
        cameras: Index into `CAMERAS` without `"mixed"`, int64, [B].
        pans: Direction of a pan as a unit vector, (x, y), [B, 2].
        zooms: 1 for a zoom that widens the view, -1 for the reverse, [B].
        noises: Offset in the noise, int64, [B].
        images: Index of the image of each sprite, int64, [B, S].
        corners: Row and column of each sprite in each frame, int64, [B, S, T, 2].
    """

    labels: np.ndarray
    backgrounds: np.ndarray
    background_corners: np.ndarray
    cameras: np.ndarray
    pans: np.ndarray
    zooms: np.ndarray
    noises: np.ndarray
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
        digits = _load_digits(object_size, train)
        self._images = torch.from_numpy(np.concatenate([digits[digit] for digit in range(10)]))
        self._num_images = np.array([len(digits[digit]) for digit in range(10)])

    def make_batch(
        self, indices: Sequence[int] | np.ndarray, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """Generate several clips.

        Args:
            indices: Indices of n clips.
            device: Device on which the clips are drawn.

        Returns:
            `clip`, float32 of shape (n, num_frames, 1, size, size); `label` and `video`, int64 of shape (n,);
            `corner`, row and column of the object in each frame, int64 of shape (n, num_frames, 2).

        Raises:
            IndexError: An index is out of range.
        """
        parameters = self._compute_parameters(np.asarray(indices, np.int64), device)
        clips = self._draw_backgrounds(parameters, device)
        self._draw_sprites(clips, parameters)
        if self.noise:
            num_pixels = clips[0].numel()
            noises = _load_noise(num_pixels, device).unfold(0, num_pixels, 1)
            clips += self.noise * noises[torch.from_numpy(parameters.noises).to(device)].view_as(clips)
        batch = {
            "label": torch.from_numpy(parameters.labels),
            "video": torch.from_numpy(np.array(indices, np.int64)),
            "corner": torch.from_numpy(parameters.corners[:, 0]),
        }
        clips = ((clips - _MEAN) / _STD).unsqueeze(2)
        return {"clip": clips, **{name: value.to(device) for name, value in batch.items()}}

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

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Random numbers from 0 to 1 of all clips; those of a clip do not depend on the number of clips."""
        num_numbers = _NUMBERS_PER_CLIP + (1 + self.distractors) * _NUMBERS_PER_SPRITE
        generator = np.random.default_rng([self.seed, int(self.train)])
        return generator.random((self.num_clips, num_numbers), np.float32)

    def _compute_parameters(self, indices: np.ndarray, device: torch.device | str) -> _ClipParameters:
        self.check_indices(indices)
        numbers = self._numbers[indices]
        label, background, row, column, camera, angle, sign, noise = numbers[:, :_NUMBERS_PER_CLIP].T
        sprites = numbers[:, _NUMBERS_PER_CLIP:].reshape(len(indices), -1, _NUMBERS_PER_SPRITE)

        def scale(values: np.ndarray, limit: np.ndarray | int) -> np.ndarray:
            return np.minimum((values * limit).astype(np.int64), limit - 1)

        labels, num_directions = scale(label, len(CLASSES)), len(DIRECTIONS)
        unlabeled = np.array([digit for digit in range(10) if digit not in OBJECT_CLASSES])
        digits = unlabeled[scale(sprites[..., 0], len(unlabeled))]
        directions = scale(sprites[..., 4], num_directions)
        digits[:, 0] = np.array(OBJECT_CLASSES)[labels // num_directions]
        directions[:, 0] = labels % num_directions
        first_images = np.cumsum(self._num_images) - self._num_images
        starts = scale(sprites[..., 2:4], self.size)
        steps = self.speed * np.arange(self.num_frames)[:, None] * DIRECTIONS[directions][:, :, None]
        cameras, angles = scale(camera, len(CAMERAS) - 1), 2.0 * np.pi * angle
        if self.camera != "mixed":
            cameras[:] = CAMERAS.index(self.camera)
        return _ClipParameters(
            labels=labels,
            backgrounds=scale(background, len(self._load_sources(device))),
            background_corners=np.stack([row, column], 1),
            cameras=cameras,
            pans=np.stack([np.cos(angles), np.sin(angles)], 1),
            zooms=np.where(sign < 0.5, -1.0, 1.0),
            noises=scale(noise, _NOISES),
            images=first_images[digits] + scale(sprites[..., 1], self._num_images[digits]),
            corners=(starts[:, :, None] + steps) % self.size,
        )

    def _load_sources(self, device: torch.device | str) -> tuple[Tensor, ...]:
        """Images from which backgrounds are cut."""
        if self.background == "photo":
            return _load_photos(self.train, device)
        return tuple(_load_textures(round(_MARGIN * self.size), self.train, device))

    def _draw_sprites(self, clips: Tensor, parameters: _ClipParameters) -> None:
        """Draw the squares, the object last, so that distractors do not cover it."""
        device, (num_clips, num_sprites) = clips.device, parameters.images.shape
        images = self._images[torch.from_numpy(parameters.images)].to(device)
        corners = torch.from_numpy(parameters.corners).to(device)
        offsets = torch.arange(self.object_size, device=device)
        batch = torch.arange(num_clips, device=device)[:, None, None, None]
        frames = torch.arange(self.num_frames, device=device)[:, None, None]
        for sprite in reversed(range(num_sprites)):
            rows = (corners[:, sprite, :, 0, None] + offsets)[..., :, None] % self.size
            columns = (corners[:, sprite, :, 1, None] + offsets)[..., None, :] % self.size
            index, ink = (batch, frames, rows, columns), images[:, sprite, None]
            clips[index] = clips[index] * (1.0 - ink) + ink

    def _draw_backgrounds(self, parameters: _ClipParameters, device: torch.device | str) -> Tensor:
        """Backgrounds as the moving camera sees them, float32, [B, T, size, size]."""
        side, sources = round(_MARGIN * self.size), self._load_sources(device)
        images = []
        for background, (row, column) in zip(
            parameters.backgrounds, parameters.background_corners, strict=True
        ):
            source = sources[background]
            first_row, first_column = (
                int(share * (extent - side + 1))
                for share, extent in zip((row, column), source.shape, strict=True)
            )
            images.append(source[first_row : first_row + side, first_column : first_column + side])
        views = torch.stack(images)[:, None].repeat_interleave(self.num_frames, 0)
        transforms = torch.from_numpy(self._compute_transforms(parameters)).to(device)
        shape = [len(views), 1, self.size, self.size]
        grid = functional.affine_grid(transforms.flatten(0, 1), shape, align_corners=False)
        frames = functional.grid_sample(views, grid, align_corners=False)
        return frames.view(len(images), self.num_frames, self.size, self.size)

    def _compute_transforms(self, parameters: _ClipParameters) -> np.ndarray:
        """Affine transforms of the cameras' frames to the backgrounds, float32, [B, T, 2, 3]."""
        # Time is centered, so that no frame leaves the background.
        moved = self.camera_speed * (np.arange(self.num_frames) - (self.num_frames - 1) / 2) / self.size
        is_pan, is_zoom = (parameters.cameras == CAMERAS.index(camera) for camera in ("pan", "zoom"))
        scale = (1.0 + 2.0 * (is_zoom * parameters.zooms)[:, None] * moved) / _MARGIN
        shift = 2.0 / _MARGIN * moved[:, None] * (is_pan[:, None] * parameters.pans)[:, None]
        transforms = np.zeros((*scale.shape, 2, 3), np.float32)
        transforms[..., 0, 0] = transforms[..., 1, 1] = scale
        transforms[..., 2] = shift
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
def _load_textures(side: int, train: bool, device: torch.device | str) -> Tensor:
    """1/f noise of one split, float32, [n, side, side], of `_MEAN` and `_STD`."""
    generator = np.random.default_rng([_TEXTURE_SEED, int(train)])
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(side), np.fft.fftfreq(side)))
    frequency[0, 0] = 1.0 / side
    spectra = np.fft.fft2(generator.standard_normal((_TEXTURES, side, side))) / frequency**_SPECTRUM
    textures = np.fft.ifft2(spectra).real
    textures -= textures.mean((1, 2), keepdims=True)
    textures /= textures.std((1, 2), keepdims=True)
    return torch.from_numpy((_MEAN + _STD * textures).astype(np.float32)).to(device)


@cache
def _load_photos(train: bool, device: torch.device | str) -> tuple[Tensor, ...]:
    """Parts of scikit-learn's photographs of one split, gray, float32, 0 to 0.7."""
    photos = require("sklearn.datasets", "pruning").load_sample_images().images
    parts = []
    for photo in photos:
        gray = torch.from_numpy(photo.astype(np.float32)).mean(2) * (0.7 / 255.0)
        cut = round(_PHOTO_SPLIT * gray.shape[1])
        parts.append((gray[:, :cut] if train else gray[:, cut:]).to(device))
    return tuple(parts)


@cache
def _load_noise(num_pixels: int, device: torch.device | str) -> Tensor:
    """Gaussian noise with `_NOISES` offsets for a clip of `num_pixels`, float32, [n]."""
    generator = torch.Generator().manual_seed(_TEXTURE_SEED)
    return torch.randn(_NOISES + num_pixels - 1, generator=generator).to(device)
