"""Scores by change: definition, first frame, absent predecessors."""

from __future__ import annotations

import pytest
import torch

from sparseflow.errors import InputError
from sparseflow.pruning.model.blocks import Attention
from sparseflow.pruning.selectors.change import ChangeScore
from sparseflow.pruning.selectors.partial_grid import score_partial_grid


def make_features(frames: int = 3) -> torch.Tensor:
    return torch.randn(2, frames, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_frame_difference_is_the_mean_squared_change() -> None:
    x = make_features()
    score = ChangeScore(3, (2, 2), "frame_difference")(x)
    for frame in (1, 2):
        for patch in range(4):
            change = x[1, frame, patch] - x[1, frame - 1, patch]
            assert score[1, frame, patch].item() == pytest.approx((change @ change).item() / 5)
    torch.testing.assert_close(score[:, 0], score[:, 1])
    assert (score[:, 0] > score[:, 1]).all(), "of equal changes, the earlier one is selected"


def test_evs_is_the_cosine_distance_and_keeps_the_first_frame() -> None:
    x = make_features()
    score = ChangeScore(3, (2, 2), "evs")(x)
    first, second = x[0, 1, 2], x[0, 2, 2]
    cosine = first @ second / (first.norm() * second.norm())
    assert score[0, 2, 2].item() == pytest.approx(1.0 - cosine.item())
    assert score[:, 0].amin() > score[:, 1:].amax()


@pytest.mark.parametrize("measure", ["frame_difference", "evs"])
def test_tokens_without_a_predecessor_have_the_largest_change(measure: str) -> None:
    x, change = make_features(), ChangeScore(3, (2, 2), measure)
    retained = torch.ones(2, 3, 4, dtype=torch.bool)
    retained[:, 1, 3] = False
    score, full = change(x, retained), change(x)
    largest = torch.cat([full[:, :, :3].flatten(1), full[:, :1, 3]], 1).amax(1)
    torch.testing.assert_close(score[:, 2, 3], largest)
    assert torch.equal(score[:, :, :3], full[:, :, :3])
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]).expand(2, -1)
    present = x.flatten(1, 2).gather(1, positions[..., None].expand(-1, -1, 5))
    partial = score_partial_grid(change, present, positions)
    assert torch.equal(partial[:, :3], score.flatten(1)[:, :3])
    torch.testing.assert_close(partial[:, -1], score[:, 2, 3])


def test_one_frame_has_no_change() -> None:
    score = ChangeScore(1, (2, 2), "evs")(make_features(1).float())
    assert score.abs().amax() < 1e-20 and torch.equal(score[0, 0].argsort(descending=True), torch.arange(4))
    with pytest.raises(InputError, match="measure"):
        ChangeScore(2, (2, 2), "motion")


def test_attention_entropy_is_that_of_each_row() -> None:
    torch.manual_seed(0)
    attention, x = Attention(8, 2, 4), torch.randn(1, 3, 8)
    bias = torch.tensor([[0.0, float("-inf"), 0.0]])
    entropy = attention.compute_attention_entropy(x, bias)
    q, k, _ = attention._project_qkv(x)
    for row in range(3):
        p = ((q[0, :, row, None] * k[0]).sum(-1) / 2.0)[:, [0, 2]].softmax(-1)
        assert entropy[0, row].item() == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-5)
