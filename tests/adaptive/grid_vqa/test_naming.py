"""Naming cells: each level looks where the cell is, and blends count by their shares."""

from __future__ import annotations

import pytest
import torch

from sparseflow.adaptive.grid_vqa.naming import Naming, naming_loss, right


@pytest.mark.parametrize("grid", [2, 3])
def test_each_level_looks_where_the_cell_is(grid: int) -> None:
    torch.manual_seed(0)
    naming = Naming(2, 5, grid)
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
    assert naming(seen).shape == (3, 1, grid * grid, 5)
    middle = (torch.arange(grid) + 0.5) / grid
    wanted = torch.cartesian_prod(middle, middle)[None]
    for level in caught:
        torch.testing.assert_close(level, wanted)
    torch.testing.assert_close(naming(seen[:, :5]), naming(seen)[:2])


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
    torch.testing.assert_close(naming_loss(logits, cells, blends, shares), torch.stack(wanted).mean())
    alone = naming_loss(logits, cells)
    torch.testing.assert_close(naming_loss(logits, cells, cells, shares), alone)


def test_the_share_that_is_right_is_of_cells_with_something() -> None:
    cells = torch.tensor([[0, 1, 4, 4]])
    logits = torch.nn.functional.one_hot(
        torch.tensor([[[0, 1, 4, 4]], [[0, 0, 0, 4]], [[4, 4, 4, 4]]]), 5
    ).float()
    assert right(logits, cells, 4).tolist() == [1.0, 0.5, 0.0]
    assert right(logits[:, :, 2:], cells[:, 2:], 4).tolist() == [0.0, 0.0, 0.0]
