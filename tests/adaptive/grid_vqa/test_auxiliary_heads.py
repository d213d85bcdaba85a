"""Auxiliary heads: naming of cells, and grounding of tokens and words."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from torch.nn import functional

from sparseflow.adaptive.grid_vqa.auxiliary_heads import (
    GroundingHead,
    NamingHead,
    compute_cell_coverage,
    naming_accuracy,
    naming_loss,
    sample_crops,
)

ALL = torch.ones(3, 4, dtype=torch.bool)


@pytest.mark.parametrize("grid", [2, 3])
def test_naming_head_reads_tokens_of_cell(grid: int) -> None:
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


def test_naming_head_with_some_crops_names_visible_cells() -> None:
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


def test_sample_crops_of_each_level() -> None:
    random = np.random.default_rng(0)
    sampled = [sample_crops((1, 2, 3), random) for _ in range(200)]
    assert all(item == sorted(set(item)) and item[0] == 0 for item in sampled)
    assert all(
        [sum(1 <= crop < 5 for crop in item), sum(crop >= 5 for crop in item)] == [2, 3] for item in sampled
    )
    assert {crop for item in sampled for crop in item} == set(range(14))
    assert sample_crops((1, 4, 9), random) == list(range(14))


def test_naming_loss_of_blends() -> None:
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


def test_naming_accuracy_ignores_empty_cells() -> None:
    cells = torch.tensor([[0, 1, 4, 4]])
    logits = torch.nn.functional.one_hot(
        torch.tensor([[[0, 1, 4, 4]], [[0, 0, 0, 4]], [[4, 4, 4, 4]]]), 5
    ).float()
    assert naming_accuracy(logits, ALL, cells, 4).tolist() == [1.0, 0.5, 0.0]
    assert naming_accuracy(logits[:, :, 2:], ALL[:, 2:], cells[:, 2:], 4).tolist() == [0.0, 0.0, 0.0]


NAMES, GRID, SIDE = 3, 2, 2
WORDS = (11, 13, 17)
QUESTION_NAMES = (2, 0)
SMALL = (6,)


def grounding() -> GroundingHead:
    return GroundingHead(8, WORDS, QUESTION_NAMES, SMALL, grid=GRID, crop_side=SIDE)


def test_cell_coverage_is_fraction_of_area() -> None:
    actual = compute_cell_coverage(2, 2)
    assert actual.shape == (14 * 4, 4)
    torch.testing.assert_close(actual.sum(1), torch.ones(56))
    assert torch.equal(actual[:4], torch.eye(4)), "a token a cell"
    # Each crop of the second level shows one cell; the last level's middle crop shows all.
    assert torch.equal(actual[4:20].argmax(1), torch.arange(4).repeat_interleave(4))
    assert torch.equal(actual[20 + 4 * 4 : 20 + 5 * 4], torch.eye(4))
    # Four tokens along three cells: the second one is on two of them, a third and two thirds.
    torch.testing.assert_close(compute_cell_coverage(3, 4)[1, :3], torch.tensor([1 / 3, 2 / 3, 0.0]))


def sample() -> tuple[torch.Tensor, ...]:
    """Two samples of one crop: hidden states, text with a quiz after it, prompts, cells."""
    torch.manual_seed(0)
    text = torch.tensor([[5, 11, 6, 13, 4, 0, 11, 17, 6], [5, 17, 11, 4, 17, 2, 11, 17, 6]])
    # Of names 0 to 2, 3 to 5 where small, 6 where nothing is.
    cells = torch.tensor([[0, 6, 4, 0], [1, 1, 6, 5]])
    return torch.randn(2, 1 + SIDE**2 + 9, 8), text, torch.tensor([5, 4]), cells


def test_grounding_loss_equals_explicit_sum() -> None:
    heads = grounding()
    hidden, text, prompts, cells = sample()
    plain = functional.rms_norm(hidden, (8,))
    position, content = torch.zeros(()), torch.zeros(())
    for index in range(2):
        for token in range(4):
            mask = plain[index, 1 + token]
            position += functional.cross_entropy(heads.cell_head(mask), torch.tensor(token)) / 8
            content += functional.cross_entropy(heads.content_head(mask), cells[index, token]) / 8
    locations = [
        functional.cross_entropy(heads.location_head(plain[index, 5 + token]), torch.tensor(expected))
        for index, token, expected in (
            (0, 1, [0.5, 0.0, 0.0, 0.5, 0.0]),
            (0, 2, [0.0, 0.0, 1.0, 0.0, 0.0]),
            (0, 3, [0.0, 0.0, 1.0, 0.0, 0.0]),
            (1, 1, [0.0, 0.0, 0.0, 1.0, 0.0]),
            (1, 2, [0.0, 0.0, 0.0, 0.0, 1.0]),
            (0, 6, [0.5, 0.0, 0.0, 0.5, 0.0]),
            (0, 7, [0.0, 0.0, 0.0, 0.0, 1.0]),
            (1, 6, [0.0, 0.0, 0.0, 0.0, 1.0]),
            (1, 7, [0.0, 0.0, 0.0, 1.0, 0.0]),
            (0, 8, [0.0, 0.0, 1.0, 0.0, 0.0]),
            (1, 8, [0.0, 0.0, 0.0, 1.0, 0.0]),
        )
    ]
    expected = torch.stack([position, content, torch.stack(locations).mean()])
    torch.testing.assert_close(heads(hidden, text, prompts, cells), expected)


def test_grounding_loss_ignores_answer_names() -> None:
    heads = grounding()
    hidden, text, _, cells = sample()
    loss = heads(hidden, text, torch.tensor([1, 1]), cells)
    changed = hidden.clone()
    changed[:, 5:-3] += 1.0
    torch.testing.assert_close(heads(changed, text, torch.tensor([1, 1]), cells), loss)


def test_append_quiz_adds_question_names() -> None:
    heads, text = grounding(), torch.tensor([[5, 11], [5, 6]])
    torch.manual_seed(0)
    sampled = [heads.append_quiz(text) for _ in range(60)]
    assert all(torch.equal(item[:, :2], text) and torch.equal(item[0, 2:], item[1, 2:]) for item in sampled)
    assert {tuple(item[0, 2:].tolist()) for item in sampled} == set(permutations((11, 17, 6)))


@pytest.mark.parametrize("crops", [1, 5, 14])
def test_grounding_head_accepts_crops_of_each_tier(crops: int) -> None:
    heads = grounding()
    _, text, prompts, cells = sample()
    heads(torch.randn(2, 1 + crops * 4 + 9, 8), text, prompts, cells).sum().backward()
    assert all(value.grad is not None for value in heads.parameters())
