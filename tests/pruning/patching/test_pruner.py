"""Which tokens a stage keeps, and merging of tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseflow.errors import InputError
from sparseflow.pruning import ScoreConfig, get_kept_positions, patch
from sparseflow.pruning.patching.families import find_encoder
from sparseflow.pruning.selectors.ast import EntropyScore
from tests.pruning.patching.zoo import CASES


def capture_block_input(model: Any, index: int, inputs: dict[str, Tensor]) -> Tensor:
    """Tokens before a block of a model, [B, P + S, C]."""
    encoder, family, _ = find_encoder(model)
    captured: list[Tensor] = []
    handle = family.list_blocks(encoder)[index].register_forward_pre_hook(
        lambda _, args: captured.append(args[0])
    )
    model(**inputs)
    handle.remove()
    return captured[0]


@pytest.mark.parametrize("name", ["vit", "videomae", "timesformer"])
@torch.no_grad()
def test_ast_stage_keeps_tokens_of_highest_score(name: str) -> None:
    case = CASES[name]
    model, score = case.build(), ScoreConfig(levels=(2,), region=0.0)
    tokens = capture_block_input(model, 1, case.make_input())[:, case.num_prefix :]
    if name == "timesformer":  # by patch, then by frame
        tokens = tokens.unflatten(1, (16, 4)).transpose(1, 2)
    else:
        tokens = tokens.unflatten(1, (case.frames, 16))
    # Features that differ within cells, so that no scores are equal.
    values = EntropyScore(case.frames, (4, 4), score).double()(tokens)
    patch(model, stages={1: 0.5}, score=score)
    case.run(model)
    positions = get_kept_positions(model)[1]
    if name == "timesformer":
        values = values.mean(1)
        assert torch.equal(positions % 4, torch.arange(4).repeat(8).expand_as(positions))
        positions = positions[:, ::4] // 4
    values = values.flatten(1)
    kept_values = values.gather(1, positions)
    threshold = values.topk(positions.shape[1], dim=1).values[:, -1:]
    assert bool((kept_values >= threshold - 1e-9).all())
    assert bool((positions.diff(dim=1) > 0).all())


@torch.no_grad()
def test_attention_stage_keeps_tokens_that_the_class_token_attends_to() -> None:
    case = CASES["vit"]
    model = case.build()
    model.set_attn_implementation("eager")
    attentions = model(**case.make_input(), output_attentions=True).attentions
    received = attentions[1][:, :, 0, 1:].mean(1)
    patch(model, stages={1: 0.5}, selector="attention")
    case.run(model)
    assert torch.equal(get_kept_positions(model)[1], received.topk(8).indices.sort().values)


@torch.no_grad()
def test_vid_tldr_stage_keeps_tokens_of_sharp_attention() -> None:
    case = CASES["vit"]
    model = case.build()
    model.set_attn_implementation("eager")
    attention = model(**case.make_input(), output_attentions=True).attentions[1]
    sharpness = -torch.special.entr(attention).sum(-1).mean(1)[:, 1:]
    patch(model, stages={1: 0.5}, selector="vid_tldr")
    case.run(model)
    assert torch.equal(get_kept_positions(model)[1], sharpness.topk(8).indices.sort().values)


@torch.no_grad()
def test_evs_stage_keeps_the_first_frame_and_changed_patches() -> None:
    case = CASES["vjepa2"]  # without position embeddings before the blocks
    model = case.build()
    clip = torch.randn(2, 1, 3, 32, 32, dtype=torch.float64).expand(-1, 4, -1, -1, -1).clone()
    clip[:, 2:, :, 8:16, 16:] += 1.0  # patches 6 and 7 of the second half
    patch(model, stages={0: 18 / 32}, selector="evs")
    model(clip)
    assert get_kept_positions(model)[0].tolist() == [[*range(16), 22, 23]] * 2
    with pytest.raises(InputError, match="evs"):
        patch(CASES["vit"].build(), selector="evs")


@torch.no_grad()
def test_tome_merges_equal_tokens_without_changing_outputs() -> None:
    case = CASES["vit"]
    model: Any = case.build()
    model.vit.embeddings.position_embeddings[:, 1:] = 0.0
    pixels = case.make_input()["pixel_values"]
    columns = torch.stack([pixels[..., :8], pixels[..., :8], pixels[..., 16:24], pixels[..., 16:24]], -2)
    pixels = columns.flatten(-2)  # patches 0 and 1 of a row are equal, and so are patches 2 and 3
    expected = model(pixels).logits
    patch(model, stages={1: 0.5}, selector="tome")
    logits = model(pixels).logits
    assert torch.equal(model.vit.token_pruner.sizes[1], torch.full((3, 8), 2.0, dtype=torch.float64))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@torch.no_grad()
def test_tome_in_every_block_keeps_all_tokens_in_the_sizes() -> None:
    for name, case in CASES.items():
        if name == "timesformer":
            continue
        model, num_tokens = case.build(), 16 * case.frames
        patch(model, stages={1: 0.75, 2: 0.5, 3: 0.4}, selector="tome")
        assert case.run(model).isfinite().all()
        encoder: Any = find_encoder(model)[0]
        sizes = encoder.token_pruner.sizes
        assert [size.shape[1] for size in sizes.values()] == [
            num_tokens * 3 // 4, num_tokens // 2, round(num_tokens * 0.4)
        ]  # fmt: skip
        torch.testing.assert_close(sizes[3].sum(1), torch.full((3,), num_tokens, dtype=torch.float64))


def test_random_stage_keeps_other_tokens_in_each_training_step() -> None:
    case = CASES["vit"]
    model = case.build()
    patch(model, stages={1: 0.5}, selector="random")
    selected: list[Tensor] = []
    for training in (False, False, True, True):
        model.train(training)
        case.run(model)
        selected.append(copy.copy(get_kept_positions(model)[1]))
    assert torch.equal(selected[0], selected[1]) and not torch.equal(selected[2], selected[3])
    assert torch.equal(selected[0][0], selected[0][1]) and not torch.equal(selected[2][0], selected[2][1])
