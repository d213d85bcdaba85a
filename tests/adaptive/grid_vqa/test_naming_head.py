"""Naming cells: each level looks where the cell is, and blends count by their shares."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sparseflow.adaptive.grid_vqa.auxiliary_heads import (
    NamingHead,
    naming_accuracy,
    naming_loss,
    sample_crops,
)

ALL = torch.ones(3, 4, dtype=torch.bool)


@pytest.mark.parametrize("grid", [2, 3])
def test_each_level_looks_where_the_cell_is(grid: int) -> None:
    torch.manual_seed(0)
    naming = NamingHead(2, 5, grid, 6)
    # Tokens that say where on the canvas they are: row and column of their middle, 0 to 1.
    side, tokens = 6, []
    for level in (1, 2, 3):
        middle = (torch.arange(level * side) + 0.5) / (level * side)
        full = torch.stack(torch.meshgrid(middle, middle, indexing="ij"), -1)
        tiles = full.unflatten(0, (level, side)).unflatten(2, (level, side)).permute(0, 2, 1, 3, 4)
        tokens.append(tiles.flatten(2, 3).flatten(0, 1))
    features = torch.cat(tokens)[None]
    assert features.shape == (1, 14, 36, 2)
    caught: list[torch.Tensor] = []
    for head in naming.heads:
        head.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    logits, visible = naming(features)
    assert logits.shape == (3, 1, grid * grid, 5) and bool(visible.all())
    middle = (torch.arange(grid) + 0.5) / grid
    expected = torch.cartesian_prod(middle, middle)[None]
    for level in caught:
        torch.testing.assert_close(level, expected)
    torch.testing.assert_close(naming(features[:, :5])[0], logits[:2])


def test_some_crops_name_the_cells_that_they_show() -> None:
    torch.manual_seed(0)
    naming = NamingHead(4, 5, 3, 2)
    features = torch.randn(2, 14, 4, 4)
    all_items, _ = naming(features)
    # Those of two by two show a cell, two halves and a quarter; those of three by three show one cell.
    crops = [0, 2, 5, 13]
    subset, visible = naming(features[:, crops], crops)
    assert visible.tolist() == [
        [True] * 9,
        [False, True, True, False, False, True, False, False, False],
        [True, *[False] * 7, True],
    ]
    torch.testing.assert_close(subset[0], all_items[0])
    torch.testing.assert_close(subset[2][:, [0, 8]], all_items[2][:, [0, 8]])
    # A corner is seen whole by one crop of two by two.
    torch.testing.assert_close(subset[1][:, 2], all_items[1][:, 2])
    cells = torch.randint(5, (2, 9))
    full = torch.ones(3, 9, dtype=torch.bool)
    # Levels count alike, however few of their cells are seen; one of which none is seen does not count.
    item = [
        torch.nn.functional.cross_entropy(
            subset[level][:, visible[level]].flatten(0, 1), cells[:, visible[level]].flatten()
        )
        for level in range(3)
    ]
    torch.testing.assert_close(naming_loss(subset, visible, cells), torch.stack(item).mean())
    visible[1] = False
    torch.testing.assert_close(naming_loss(subset, visible, cells), (item[0] + item[2]) / 2)
    torch.testing.assert_close(
        naming_loss(all_items, full, cells),
        torch.nn.functional.cross_entropy(all_items.flatten(0, 2), cells.expand(3, 2, 9).flatten()),
    )


def test_crops_are_drawn_of_each_level() -> None:
    random = np.random.default_rng(0)
    sampled = [sample_crops((1, 2, 3), random) for _ in range(200)]
    assert all(item == sorted(set(item)) and item[0] == 0 for item in sampled)
    assert all(
        [sum(1 <= crop < 5 for crop in item), sum(crop >= 5 for crop in item)] == [2, 3] for item in sampled
    )
    assert {crop for item in sampled for crop in item} == set(range(14))
    assert sample_crops((1, 4, 9), random) == list(range(14))


def test_the_loss_of_blends() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 4, 5, dtype=torch.float64).float()
    cells, blends = torch.randint(5, (2, 2, 4))
    shares = torch.rand(2, 4)
    logs = logits.log_softmax(-1)
    expected = [
        -shares[b, c] * logs[level, b, c, cells[b, c]] - (1 - shares[b, c]) * logs[level, b, c, blends[b, c]]
        for level in range(3) for b in range(2) for c in range(4)
    ]  # fmt: skip
    torch.testing.assert_close(naming_loss(logits, ALL, cells, blends, shares), torch.stack(expected).mean())
    single = naming_loss(logits, ALL, cells)
    torch.testing.assert_close(naming_loss(logits, ALL, cells, cells, shares), single)


def test_the_share_that_is_right_is_of_cells_with_something() -> None:
    cells = torch.tensor([[0, 1, 4, 4]])
    logits = torch.nn.functional.one_hot(
        torch.tensor([[[0, 1, 4, 4]], [[0, 0, 0, 4]], [[4, 4, 4, 4]]]), 5
    ).float()
    assert naming_accuracy(logits, ALL, cells, 4).tolist() == [1.0, 0.5, 0.0]
    assert naming_accuracy(logits[:, :, 2:], ALL[:, 2:], cells[:, 2:], 4).tolist() == [0.0, 0.0, 0.0]
