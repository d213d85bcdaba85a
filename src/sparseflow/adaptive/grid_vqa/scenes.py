"""Scenes and canvases: images placed on a grid.

`question_generator` samples the content of scenes. This module samples their appearance with NumPy, and
renders batches of canvases with torch on any device.

Shapes: B canvases, S cells (grid × grid, row by row), N items in all of them, c the side of a cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sparseflow.adaptive.grid_vqa.config import VqaSceneConfig
from sparseflow.adaptive.grid_vqa.images import ImageBank, Split

NOTHING = -1


@dataclass(frozen=True, kw_only=True, eq=False)
class SceneBatch:
    """Content of scenes.

    Attributes:
        names: Index of a bank's name, or `NOTHING`, [B, S] int64.
        small: Whether the item is small, [B, S] bool.
    """

    names: np.ndarray
    small: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class SceneAppearance:
    """Appearance of scenes.

    Attributes:
        images: Two indices into a bank for each item; the second image is blended in, [N, 2] int64.
        fractions: Weight of the first image, 0.5 to 1, [N] float32.
        cells: Cell of each item, as canvas · S + cell, [N] int64.
        warps: Affine maps from cell to image coordinates, both -1 to 1 from edge to edge, [N, 2, 3] float32.
        boxes: Center and half side of the part of a cell that an item covers, [N, 3] float32.
        tones: Added brightness, contrast and saturation, [N, 3] float32.
        holes: Center and half sides of a gray part of the image; none if a side is 0, [N, 4] float32.
        paper: Background color, 0 to 1, [B, 3] float32.
    """

    images: np.ndarray
    fractions: np.ndarray
    cells: np.ndarray
    warps: np.ndarray
    boxes: np.ndarray
    tones: np.ndarray
    holes: np.ndarray
    paper: np.ndarray

    def select(self, first: int, last: int, cells: int) -> SceneAppearance:
        """Appearance of canvases `first` to `last`, with `cells` cells each."""
        rows = (self.cells >= first * cells) & (self.cells < last * cells)
        return SceneAppearance(
            images=self.images[rows], fractions=self.fractions[rows], cells=self.cells[rows] - first * cells,
            warps=self.warps[rows], boxes=self.boxes[rows], tones=self.tones[rows], holes=self.holes[rows],
            paper=self.paper[first:last],
        )  # fmt: skip


def sample_appearance(
    scenes: SceneBatch,
    bank: ImageBank,
    split: Split,
    config: VqaSceneConfig,
    generator: np.random.Generator,
    *,
    augment: float = 0.0,
    blend: np.ndarray | None = None,
) -> SceneAppearance:
    """Sample the images and the appearance of items.

    Args:
        scenes: Content.
        bank: Images.
        split: Split of the images.
        config: Sizes of items.
        generator: Random generator.
        augment: Strength of rotation, shift, stretch, mirroring, tone and holes; 0 disables them.
        blend: Second name of each cell, to be blended in, or `NOTHING`, [B, S].
    """
    canvas, cell = np.nonzero(scenes.names != NOTHING)
    names, small = scenes.names[canvas, cell], scenes.small[canvas, cell]
    count = len(names)
    blended_names = np.full(count, NOTHING) if blend is None else blend[canvas, cell]
    first = _sample_images(bank, split, names, generator)
    second = _sample_images(bank, split, np.where(blended_names == NOTHING, names, blended_names), generator)
    fractions = np.where(blended_names == NOTHING, 1.0, generator.uniform(0.5, 1.0, count))

    low, high = np.where(small[:, None], config.small, config.item).T
    half = generator.uniform(low, high)
    centre = generator.uniform(-1.0, 1.0, (count, 2)) * (1.0 - half[:, None])
    turn, shear = generator.uniform(-1.0, 1.0, (2, count)) * augment * np.array([[0.25], [0.15]])
    stretch = np.exp(generator.uniform(-0.2, 0.2, (count, 2)) * augment)
    mirrored = np.array(bank.flips)[names] & (generator.random(count) < 0.5) & (augment > 0.0)
    shift = generator.uniform(-0.2, 0.2, (count, 2)) * augment
    cosine, sine = np.cos(turn), np.sin(turn)
    # Maps a point of the cell to the item: shift, scale, mirror, stretch, shear and rotation.
    inner = (
        np.stack([np.stack([cosine, -sine + shear], 1), np.stack([sine, cosine], 1)], 1) * stretch[:, :, None]
    )
    inner[:, 0] *= np.where(mirrored, -1.0, 1.0)[:, None]
    inner /= half[:, None, None]
    offset = shift - np.einsum("nij,nj->ni", inner, centre)

    tones = np.array([0.0, 1.0, 1.0]) + generator.uniform(-1.0, 1.0, (count, 3)) * augment * np.array(
        [0.2, 0.3, 0.4]
    )
    holed = (generator.random(count) < 0.5 * min(augment, 1.0))[:, None]
    hole = np.concatenate(
        [generator.uniform(-1.0, 1.0, (count, 2)), generator.uniform(0.15, 0.4, (count, 2)) * holed], axis=1
    )
    paper = np.clip(
        generator.uniform(0.2, 0.8, (len(scenes.names), 1))
        + generator.uniform(-0.1, 0.1, (len(scenes.names), 3)),
        0,
        1,
    )
    return SceneAppearance(
        images=np.stack([first, second], 1), fractions=_to_float32(fractions),
        cells=canvas * scenes.names.shape[1] + cell,
        warps=_to_float32(np.concatenate([inner, offset[:, :, None]], axis=2)),
        boxes=_to_float32(np.concatenate([centre, half[:, None]], axis=1)), tones=_to_float32(tones),
        holes=_to_float32(hole), paper=_to_float32(paper),
    )  # fmt: skip


def render(appearance: SceneAppearance, images: Tensor, config: VqaSceneConfig) -> Tensor:
    """Render canvases.

    Args:
        appearance: Appearance.
        images: Images of a bank, [n, 3, 32, 32] uint8, on the device of the rendering.
        config: Grid and sizes.

    Returns:
        [B, 3, side, side] uint8, as an image file contains them.
    """
    device, side, grid = images.device, config.cell_px, config.grid
    paper = torch.from_numpy(appearance.paper).to(device, non_blocking=True)
    cells = paper.repeat_interleave(config.cells, 0)[:, :, None, None].repeat(1, 1, side, side)
    if len(appearance.cells):
        items, covered = _render_items(appearance, images, side)
        indices = torch.from_numpy(appearance.cells).to(device, non_blocking=True)
        cells[indices] = torch.where(covered[:, None], items, cells[indices])
    rows = cells.view(len(paper), grid, grid, 3, side, side).permute(0, 3, 1, 4, 2, 5)
    return (rows.reshape(len(paper), 3, grid * side, grid * side) * 255.0).round().to(torch.uint8)


def _render_items(appearance: SceneAppearance, images: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Cells filled with their item, [N, 3, c, c] from 0 to 1, and the area of the item, [N, c, c] bool."""
    count, device = len(appearance.cells), images.device
    # One transfer instead of five.
    numbers = np.concatenate(
        [
            appearance.warps.reshape(count, 6),
            appearance.boxes,
            appearance.tones,
            appearance.holes,
            appearance.fractions[:, None],
        ],
        axis=1,
    )
    tensor = torch.from_numpy(numbers).to(device, non_blocking=True)
    warps, boxes, tones, holes, share = tensor.split([6, 3, 3, 4, 1], dim=1)
    both = images[torch.from_numpy(appearance.images).to(device, non_blocking=True)].float() / 255.0
    pixels = _adjust_tones(both[:, 1].lerp(both[:, 0], share[:, :, None, None]), tones)
    grids = functional.affine_grid(warps.view(-1, 2, 3), [count, 3, side, side], align_corners=False)
    items = functional.grid_sample(pixels, grids, padding_mode="border", align_corners=False)
    in_hole = ((grids - holes[:, None, None, :2]).abs() < holes[:, None, None, 2:]).all(-1)
    axis = (torch.arange(side, device=device, dtype=torch.float32) + 0.5) * (2.0 / side) - 1.0
    in_box = (axis - boxes[:, :2, None]).abs() <= boxes[:, 2:, None]
    return items.masked_fill(in_hole[:, None], 0.5), in_box[:, 1, :, None] & in_box[:, 0, None, :]


def _adjust_tones(pixels: Tensor, tones: Tensor) -> Tensor:
    bright, contrast, saturation = tones[:, :, None, None].split(1, dim=1)
    grey = pixels.mean(1, keepdim=True)
    pixels = grey + (pixels - grey) * saturation
    mean = grey.mean((2, 3), keepdim=True)
    return (mean + (pixels - mean) * contrast + bright).clamp(0.0, 1.0)


def _sample_images(
    bank: ImageBank, split: Split, names: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Sample an image of each name, uniformly."""
    indices = bank.splits[split]
    counts = np.array([len(name_indices) for name_indices in indices])
    starts = np.concatenate([[0], counts.cumsum()[:-1]])
    which = (generator.random(len(names)) * counts[names]).astype(np.int64)
    return np.concatenate(indices)[starts[names] + which]


def _to_float32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32)
