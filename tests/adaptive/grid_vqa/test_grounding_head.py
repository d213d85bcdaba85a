"""Grounding: which token shows which cell, and what each of the three losses looks at."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch.nn import functional

from sparseflow.adaptive.grid_vqa.auxiliary_heads import GroundingHead, compute_cell_coverage

NAMES, GRID, SIDE = 3, 2, 2
WORDS = (11, 13, 17)
ASKED = (2, 0)
SMALL = (6,)


def grounding() -> GroundingHead:
    return GroundingHead(8, WORDS, ASKED, SMALL, grid=GRID, crop_side=SIDE)


def test_tokens_show_cells_by_their_area() -> None:
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


def test_the_loss_is_that_of_its_parts_one_by_one() -> None:
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


def test_names_in_answers_do_not_count() -> None:
    heads = grounding()
    hidden, text, _, cells = sample()
    loss = heads(hidden, text, torch.tensor([1, 1]), cells)
    changed = hidden.clone()
    changed[:, 5:-3] += 1.0
    torch.testing.assert_close(heads(changed, text, torch.tensor([1, 1]), cells), loss)


def test_a_quiz_has_all_names_that_are_asked_about() -> None:
    heads, text = grounding(), torch.tensor([[5, 11], [5, 6]])
    torch.manual_seed(0)
    sampled = [heads.append_quiz(text) for _ in range(60)]
    assert all(torch.equal(item[:, :2], text) and torch.equal(item[0, 2:], item[1, 2:]) for item in sampled)
    assert {tuple(item[0, 2:].tolist()) for item in sampled} == set(permutations((11, 17, 6)))


@pytest.mark.parametrize("crops", [1, 5, 14])
def test_any_tier_is_looked_at(crops: int) -> None:
    heads = grounding()
    _, text, prompts, cells = sample()
    heads(torch.randn(2, 1 + crops * 4 + 9, 8), text, prompts, cells).sum().backward()
    assert all(value.grad is not None for value in heads.parameters())
