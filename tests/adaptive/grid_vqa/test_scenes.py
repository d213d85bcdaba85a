"""Canvases: items are where and as large as they were drawn, and show the images that were drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparseflow.adaptive.grid_vqa.config import VqaSceneConfig
from sparseflow.adaptive.grid_vqa.images import SPLITS, Split
from sparseflow.adaptive.grid_vqa.scenes import (
    NOTHING,
    SceneAppearance,
    SceneBatch,
    render,
    sample_appearance,
)
from tests.adaptive.grid_vqa.little import bank

BANK = bank()
IMAGES = torch.from_numpy(BANK.images)
WHOLE = VqaSceneConfig(grid=2, cell_px=32, item=(1.0, 1.0))


def scenes(count: int = 50, cells: int = 4, seed: int = 0) -> SceneBatch:
    random = np.random.default_rng(seed)
    names = random.integers(-1, len(BANK.names), (count, cells))
    return SceneBatch(names=names, small=random.random((count, cells)) < 0.3)


def sample_looks(
    config: VqaSceneConfig,
    scene_batch: SceneBatch,
    split: Split = "train",
    seed: int = 0,
    augment: float = 0.0,
) -> SceneAppearance:
    return sample_appearance(scene_batch, BANK, split, config, np.random.default_rng(seed), augment=augment)


def test_render_of_full_cell_is_image() -> None:
    scene_batch = replace(scenes(), small=np.zeros((50, 4), bool))
    appearance = sample_looks(WHOLE, scene_batch)
    canvases = render(appearance, IMAGES, WHOLE)
    assert canvases.shape == (50, 3, 64, 64) and canvases.dtype == torch.uint8
    cells = (
        canvases.unflatten(2, (2, 32))
        .unflatten(4, (2, 32))
        .permute(0, 2, 4, 1, 3, 5)
        .flatten(1, 2)
        .flatten(0, 1)
    )
    for index, position in zip(appearance.cells, appearance.images[:, 0], strict=True):
        assert BANK.labels[position] == scene_batch.names.flat[index]
        # Positions are rounded: by a hundredth of a pixel the neighbour shows through.
        assert (cells[index].int() - IMAGES[position].int()).abs().max() <= 1
    for index in np.flatnonzero(scene_batch.names.ravel() == NOTHING):
        assert (cells[index] == cells[index][:, :1, :1]).all(), "paper has one colour"


@pytest.mark.parametrize("split", SPLITS)
def test_sampled_images_belong_to_split(split: Split) -> None:
    appearance = sample_looks(WHOLE, scenes(), split)
    assert set(appearance.images.ravel()) <= set(np.concatenate(BANK.splits[split]))
    assert set(appearance.images.ravel()) == set(np.concatenate(BANK.splits[split])), "all of them come"


def test_boxes_stay_in_cells() -> None:
    config = VqaSceneConfig(grid=2, cell_px=40, item=(0.5, 0.9), small=(0.2, 0.3))
    scene_batch = scenes()
    appearance = sample_looks(config, scene_batch)
    centre, half = appearance.boxes[:, :2], appearance.boxes[:, 2]
    assert (np.abs(centre) + half[:, None] <= 1.0 + 1e-6).all()
    small = scene_batch.small.ravel()[appearance.cells]
    assert ((half >= 0.2) & (half <= 0.3))[small].all() and ((half >= 0.5) & (half <= 0.9))[~small].all()
    canvases = render(appearance, torch.full_like(IMAGES, 255), config).float()
    covered = (
        (canvases == 255.0).all(1).unflatten(1, (2, 40)).unflatten(3, (2, 40)).sum((2, 4)).ravel().numpy()
    )
    expected = np.zeros(200)
    expected[appearance.cells] = (half * 40) ** 2
    assert np.abs(np.sqrt(covered) - np.sqrt(expected)).max() <= 1.0, "a side is off by less than a pixel"


def test_appearance_without_augmentation_is_neutral() -> None:
    appearance = sample_looks(WHOLE, scenes())
    assert (
        (appearance.tones == [0.0, 1.0, 1.0]).all()
        and (appearance.holes[:, 2:] == 0.0).all()
        and (appearance.fractions == 1.0).all()
    )
    small = sample_looks(replace_item(WHOLE, (0.5, 0.8)), scenes())
    assert np.allclose(small.warps[:, 0, 1], 0.0) and (small.warps[:, 0, 0] > 0.0).all(), (
        "neither turned nor mirrored"
    )


def replace_item(config: VqaSceneConfig, item: tuple[float, float]) -> VqaSceneConfig:
    return config.model_copy(update={"item": item})


def test_augmentation_changes_appearance() -> None:
    scene_batch = scenes(400)
    appearance = sample_looks(WHOLE, scene_batch, augment=1.0)
    names = scene_batch.names.ravel()[appearance.cells]
    mirrored = np.linalg.det(appearance.warps[:, :, :2]) < 0.0
    flips = np.array(BANK.flips)[names]
    assert 0.4 < mirrored[flips].mean() < 0.6 and not mirrored[~flips].any(), "digits must not be mirrored"
    assert 0.4 < (appearance.holes[:, 2] > 0.0).mean() < 0.6
    assert render(appearance, IMAGES, WHOLE).shape == (400, 3, 64, 64)


def test_render_blends_two_images() -> None:
    scene_batch = SceneBatch(names=np.zeros((30, 4), np.int64), small=np.zeros((30, 4), bool))
    blend = np.where(np.arange(4) % 2, 1, NOTHING)[None].repeat(30, 0)
    appearance = sample_appearance(scene_batch, BANK, "train", WHOLE, np.random.default_rng(0), blend=blend)
    mixed = appearance.cells % 2 == 1
    assert (BANK.labels[appearance.images[:, 1]][mixed] == 1).all()
    assert (
        (appearance.fractions[~mixed] == 1.0).all()
        and (appearance.fractions[mixed] < 1.0).all()
        and (appearance.fractions >= 0.5).all()
    )
    canvas = render(appearance.select(0, 1, 4), IMAGES, WHOLE)[0, :, :32, 32:].float()
    first, two = IMAGES[appearance.images[1]].float()
    assert (canvas - (two + (first - two) * appearance.fractions[1])).abs().max() <= 1.0


def test_render_of_selection_equals_part() -> None:
    appearance = sample_looks(WHOLE, scenes(), augment=1.0)
    full = render(appearance, IMAGES, WHOLE)
    parts = [
        render(appearance.select(first, last, 4), IMAGES, WHOLE) for first, last in ((0, 7), (7, 8), (8, 50))
    ]
    assert torch.equal(torch.cat(parts), full)


def test_render_without_items_is_background() -> None:
    scene_batch = SceneBatch(names=np.full((2, 4), NOTHING), small=np.zeros((2, 4), bool))
    assert render(sample_looks(WHOLE, scene_batch), IMAGES, WHOLE).shape == (2, 3, 64, 64)
