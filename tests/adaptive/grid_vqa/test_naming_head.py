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
        whole = torch.stack(torch.meshgrid(middle, middle, indexing="ij"), -1)
        tiles = whole.unflatten(0, (level, side)).unflatten(2, (level, side)).permute(0, 2, 1, 3, 4)
        tokens.append(tiles.flatten(2, 3).flatten(0, 1))
    seen = torch.cat(tokens)[None]
    assert seen.shape == (1, 14, 36, 2)
    caught: list[torch.Tensor] = []
    for head in naming.heads:
        head.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    logits, there = naming(seen)
    assert logits.shape == (3, 1, grid * grid, 5) and bool(there.all())
    middle = (torch.arange(grid) + 0.5) / grid
    wanted = torch.cartesian_prod(middle, middle)[None]
    for level in caught:
        torch.testing.assert_close(level, wanted)
    torch.testing.assert_close(naming(seen[:, :5])[0], logits[:2])


def test_some_crops_name_the_cells_that_they_show() -> None:
    torch.manual_seed(0)
    naming = NamingHead(4, 5, 3, 2)
    seen = torch.randn(2, 14, 4, 4)
    every, _ = naming(seen)
    # Those of two by two show a cell, two halves and a quarter; those of three by three show one cell.
    crops = [0, 2, 5, 13]
    some, there = naming(seen[:, crops], crops)
    assert there.tolist() == [
        [True] * 9,
        [False, True, True, False, False, True, False, False, False],
        [True, *[False] * 7, True],
    ]
    torch.testing.assert_close(some[0], every[0])
    torch.testing.assert_close(some[2][:, [0, 8]], every[2][:, [0, 8]])
    # A corner is seen whole by one crop of two by two.
    torch.testing.assert_close(some[1][:, 2], every[1][:, 2])
    cells = torch.randint(5, (2, 9))
    whole = torch.ones(3, 9, dtype=torch.bool)
    # Levels count alike, however few of their cells are seen; one of which none is seen does not count.
    each = [
        torch.nn.functional.cross_entropy(
            some[level][:, there[level]].flatten(0, 1), cells[:, there[level]].flatten()
        )
        for level in range(3)
    ]
    torch.testing.assert_close(naming_loss(some, there, cells), torch.stack(each).mean())
    there[1] = False
    torch.testing.assert_close(naming_loss(some, there, cells), (each[0] + each[2]) / 2)
    torch.testing.assert_close(
        naming_loss(every, whole, cells),
        torch.nn.functional.cross_entropy(every.flatten(0, 2), cells.expand(3, 2, 9).flatten()),
    )


def test_crops_are_drawn_of_each_level() -> None:
    random = np.random.default_rng(0)
    drawn = [sample_crops((1, 2, 3), random) for _ in range(200)]
    assert all(each == sorted(set(each)) and each[0] == 0 for each in drawn)
    assert all(
        [sum(1 <= crop < 5 for crop in each), sum(crop >= 5 for crop in each)] == [2, 3] for each in drawn
    )
    assert {crop for each in drawn for crop in each} == set(range(14))
    assert sample_crops((1, 4, 9), random) == list(range(14))


def test_the_loss_of_blends() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 2, 4, 5, dtype=torch.float64).float()
    cells, blends = torch.randint(5, (2, 2, 4))
    shares = torch.rand(2, 4)
    logs = logits.log_softmax(-1)
    wanted = [
        -shares[b, c] * logs[level, b, c, cells[b, c]] - (1 - shares[b, c]) * logs[level, b, c, blends[b, c]]
        for level in range(3) for b in range(2) for c in range(4)
    ]  # fmt: skip
    torch.testing.assert_close(naming_loss(logits, ALL, cells, blends, shares), torch.stack(wanted).mean())
    alone = naming_loss(logits, ALL, cells)
    torch.testing.assert_close(naming_loss(logits, ALL, cells, cells, shares), alone)


def test_the_share_that_is_right_is_of_cells_with_something() -> None:
    cells = torch.tensor([[0, 1, 4, 4]])
    logits = torch.nn.functional.one_hot(
        torch.tensor([[[0, 1, 4, 4]], [[0, 0, 0, 4]], [[4, 4, 4, 4]]]), 5
    ).float()
    assert naming_accuracy(logits, ALL, cells, 4).tolist() == [1.0, 0.5, 0.0]
    assert naming_accuracy(logits[:, :, 2:], ALL[:, 2:], cells[:, 2:], 4).tolist() == [0.0, 0.0, 0.0]
