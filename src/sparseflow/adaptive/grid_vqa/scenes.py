"""Canvases: images laid on a grid.

What lies where is drawn by `questions`; here it is drawn how it looks, and painted. Drawing is NumPy's, from
a generator that is handed in; painting is torch's, for a whole batch at once, on any device.

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
    """What lies where.

    Attributes:
        names: Index of a bank's name, or `NOTHING`: [B, S] int64.
        small: Whether it is small: [B, S] bool.
    """

    names: np.ndarray
    small: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class SceneAppearance:
    """How scenes look.

    Attributes:
        images: Two places in a bank for each item, the second to be blended in: [N, 2] int64.
        share: Of the first image in each item, 0.5 to 1: [N] float32.
        cells: Where each item is, as canvas · S + cell: [N] int64.
        warps: From a cell's coordinates to its image's, both -1 to 1 from edge to edge: [N, 2, 3] float32.
        boxes: The part of a cell that an item covers, as centre and half side: [N, 3] float32.
        tones: Brightness added, contrast, saturation: [N, 3] float32.
        holes: A part of the image that is greyed, as centre and half sides; none where a side is 0:
            [N, 4] float32.
        paper: Colour beside the items, 0 to 1: [B, 3] float32.
    """

    images: np.ndarray
    share: np.ndarray
    cells: np.ndarray
    warps: np.ndarray
    boxes: np.ndarray
    tones: np.ndarray
    holes: np.ndarray
    paper: np.ndarray

    def part(self, first: int, last: int, cells: int) -> SceneAppearance:
        """Those of canvases `first` to `last`, of `cells` cells each."""
        mine = (self.cells >= first * cells) & (self.cells < last * cells)
        return SceneAppearance(
            images=self.images[mine], share=self.share[mine], cells=self.cells[mine] - first * cells,
            warps=self.warps[mine], boxes=self.boxes[mine], tones=self.tones[mine], holes=self.holes[mine],
            paper=self.paper[first:last],
        )  # fmt: skip


def looks_of(
    scenes: SceneBatch,
    bank: ImageBank,
    split: Split,
    settings: VqaSceneConfig,
    random: np.random.Generator,
    *,
    augment: float = 0.0,
    blend: np.ndarray | None = None,
) -> SceneAppearance:
    """Draw which images show a scene's items, and how.

    Args:
        scenes: What lies where.
        bank: The images.
        split: Which of them to take.
        settings: Sizes of items.
        random: What is drawn from.
        augment: How strongly images are turned, moved, stretched, mirrored, toned and greyed; 0 leaves them.
        blend: A second name for each cell, to be blended in, or `NOTHING`: [B, S].
    """
    canvas, cell = np.nonzero(scenes.names != NOTHING)
    names, small = scenes.names[canvas, cell], scenes.small[canvas, cell]
    count = len(names)
    others = np.full(count, NOTHING) if blend is None else blend[canvas, cell]
    first = _pick(bank, split, names, random)
    second = _pick(bank, split, np.where(others == NOTHING, names, others), random)
    share = np.where(others == NOTHING, 1.0, random.uniform(0.5, 1.0, count))

    low, high = np.where(small[:, None], settings.small, settings.item).T
    half = random.uniform(low, high)
    centre = random.uniform(-1.0, 1.0, (count, 2)) * (1.0 - half[:, None])
    turn, shear = random.uniform(-1.0, 1.0, (2, count)) * augment * np.array([[0.25], [0.15]])
    stretch = np.exp(random.uniform(-0.2, 0.2, (count, 2)) * augment)
    mirrored = np.array(bank.flips)[names] & (random.random(count) < 0.5) & (augment > 0.0)
    shift = random.uniform(-0.2, 0.2, (count, 2)) * augment
    cosine, sine = np.cos(turn), np.sin(turn)
    # A point of the cell is moved and scaled to the item, mirrored, stretched, sheared and turned.
    inner = (
        np.stack([np.stack([cosine, -sine + shear], 1), np.stack([sine, cosine], 1)], 1) * stretch[:, :, None]
    )
    inner[:, 0] *= np.where(mirrored, -1.0, 1.0)[:, None]
    inner /= half[:, None, None]
    offset = shift - np.einsum("nij,nj->ni", inner, centre)

    tones = np.array([0.0, 1.0, 1.0]) + random.uniform(-1.0, 1.0, (count, 3)) * augment * np.array(
        [0.2, 0.3, 0.4]
    )
    holed = (random.random(count) < 0.5 * min(augment, 1.0))[:, None]
    hole = np.concatenate(
        [random.uniform(-1.0, 1.0, (count, 2)), random.uniform(0.15, 0.4, (count, 2)) * holed], axis=1
    )
    paper = np.clip(
        random.uniform(0.2, 0.8, (len(scenes.names), 1)) + random.uniform(-0.1, 0.1, (len(scenes.names), 3)),
        0,
        1,
    )
    return SceneAppearance(
        images=np.stack([first, second], 1), share=_single(share),
        cells=canvas * scenes.names.shape[1] + cell,
        warps=_single(np.concatenate([inner, offset[:, :, None]], axis=2)),
        boxes=_single(np.concatenate([centre, half[:, None]], axis=1)), tones=_single(tones),
        holes=_single(hole), paper=_single(paper),
    )  # fmt: skip


def paint(looks: SceneAppearance, images: Tensor, settings: VqaSceneConfig) -> Tensor:
    """Paint canvases.

    Args:
        looks: How they look.
        images: A bank's images, [n, 3, 32, 32] uint8, on the device to paint on.
        settings: Rows and sizes.

    Returns:
        [B, 3, side, side] uint8, as a file would hold them.
    """
    device, side, grid = images.device, settings.cell_px, settings.grid
    paper = torch.from_numpy(looks.paper).to(device, non_blocking=True)
    cells = paper.repeat_interleave(settings.cells, 0)[:, :, None, None].repeat(1, 1, side, side)
    if len(looks.cells):
        items, covered = _items(looks, images, side)
        at = torch.from_numpy(looks.cells).to(device, non_blocking=True)
        cells[at] = torch.where(covered[:, None], items, cells[at])
    rows = cells.view(len(paper), grid, grid, 3, side, side).permute(0, 3, 1, 4, 2, 5)
    return (rows.reshape(len(paper), 3, grid * side, grid * side) * 255.0).round().to(torch.uint8)


def _items(looks: SceneAppearance, images: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Cells full of their item, [N, 3, c, c] of 0 to 1, and where the item is, [N, c, c] bool."""
    count, device = len(looks.cells), images.device
    # One transfer in place of five.
    numbers = np.concatenate(
        [looks.warps.reshape(count, 6), looks.boxes, looks.tones, looks.holes, looks.share[:, None]], axis=1
    )
    drawn = torch.from_numpy(numbers).to(device, non_blocking=True)
    warps, boxes, tones, holes, share = drawn.split([6, 3, 3, 4, 1], dim=1)
    both = images[torch.from_numpy(looks.images).to(device, non_blocking=True)].float() / 255.0
    pixels = _toned(both[:, 1].lerp(both[:, 0], share[:, :, None, None]), tones)
    grids = functional.affine_grid(warps.view(-1, 2, 3), [count, 3, side, side], align_corners=False)
    items = functional.grid_sample(pixels, grids, padding_mode="border", align_corners=False)
    in_hole = ((grids - holes[:, None, None, :2]).abs() < holes[:, None, None, 2:]).all(-1)
    axis = (torch.arange(side, device=device, dtype=torch.float32) + 0.5) * (2.0 / side) - 1.0
    beside = (axis - boxes[:, :2, None]).abs() <= boxes[:, 2:, None]
    return items.masked_fill(in_hole[:, None], 0.5), beside[:, 1, :, None] & beside[:, 0, None, :]


def _toned(pixels: Tensor, tones: Tensor) -> Tensor:
    bright, contrast, saturation = tones[:, :, None, None].split(1, dim=1)
    grey = pixels.mean(1, keepdim=True)
    pixels = grey + (pixels - grey) * saturation
    mean = grey.mean((2, 3), keepdim=True)
    return (mean + (pixels - mean) * contrast + bright).clamp(0.0, 1.0)


def _pick(bank: ImageBank, split: Split, names: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """An image of each name, all of a name's as likely."""
    places = bank.splits[split]
    counts = np.array([len(each) for each in places])
    starts = np.concatenate([[0], counts.cumsum()[:-1]])
    which = (random.random(len(names)) * counts[names]).astype(np.int64)
    return np.concatenate(places)[starts[names] + which]


def _single(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32)
