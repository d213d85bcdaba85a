"""Qwen3-VL-MoE adapter: tiers are image resolutions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from sparseflow.adaptive.adapters import Qwen3VLMoeAdapter, get_adapter
from sparseflow.adaptive.adapters.qwen3_vl import SCALES
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import TIERS, Plan, Tier
from sparseflow.errors import PlanError
from tests.adaptive import tiny

MODEL = tiny.build_qwen3_vl_moe()
ADAPTER = get_adapter(MODEL)
MERGED = 2 * tiny.PATCH
"""Side of a token, in pixels."""

sides = st.integers(1, 9)


def pixels(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Normalized image of `rows` x `columns` tokens."""
    shape = (3, rows * MERGED, columns * MERGED)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def patchified(image: Tensor) -> Tensor:
    """Patches of an image: tokens row by row, their patches row by row, each [channels, 2, height, width]."""
    side, patches = tiny.PATCH, []
    for top in range(0, image.shape[1], MERGED):
        for column in range(0, image.shape[2], MERGED):
            for down in (0, side):
                for across in (0, side):
                    y, x = top + down, column + across
                    patch = image[:, y : y + side, x : x + side]
                    patches.append(torch.stack([patch, patch], 1).flatten())
    return torch.stack(patches)


def inputs_of(rows: list[list[Tensor]], text: int = 4) -> dict[str, Tensor]:
    """Inputs of rows of images, built independently of the adapter."""
    ids = []
    for images in rows:
        ids.append([7])
        for image in images:
            tokens = image.shape[1] * image.shape[2] // MERGED**2
            ids[-1] += [tiny.VISION_START, *[tiny.IMAGE] * tokens, tiny.VISION_END]
        ids[-1] += range(20, 20 + text)
    images_ = [image for images in rows for image in images]
    input_ids = torch.tensor(ids)
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == tiny.IMAGE).int(),
        "pixel_values": torch.cat([patchified(image) for image in images_]),
        "image_grid_thw": torch.tensor([[1, image.shape[1] // 4, image.shape[2] // 4] for image in images_]),
    }


def resize_to_tier(image: Tensor, tier: Tier) -> Tensor:
    """Image at the resolution of a tier."""
    size = tuple(max(1, int(side // MERGED * SCALES[tier] + 0.5)) * MERGED for side in image.shape[1:])
    if size == tuple(image.shape[1:]):
        return image
    resized = functional.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0]
    low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    return resized.clamp(low, high)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=3), st.integers(1, 2), st.sampled_from(TIERS))
def test_reduce_to_tier_matches_inputs_made_for_tier(shapes: Any, rows: int, tier: Tier) -> None:
    images = [pixels(*shape, seed=index) for index, shape in enumerate(shapes)]
    high = inputs_of([images] * rows)
    before = {name: value.clone() for name, value in high.items()}
    reduced = ADAPTER.reduce_to_tier(high, tier)
    expected = inputs_of([[resize_to_tier(image, tier) for image in images]] * rows)
    assert list(reduced) == list(expected)
    for name, value in expected.items():
        assert torch.equal(reduced[name], value), name
        assert torch.equal(high[name], before[name])
    assert ADAPTER.count_vision_tokens(reduced) == int(expected["mm_token_type_ids"].sum())
    ADAPTER.check_tier(reduced, tier)


def test_tiers_have_quarter_half_and_all_tokens() -> None:
    high = inputs_of([[pixels(16, 24)]])
    counts = {tier: ADAPTER.count_vision_tokens(ADAPTER.reduce_to_tier(high, tier)) for tier in TIERS}
    assert counts == {"low": 96, "medium": 187, "high": 384}


def test_image_of_one_token_is_not_reduced() -> None:
    high = inputs_of([[pixels(1, 1)]])
    assert all(torch.equal(value, high[name]) for name, value in ADAPTER.reduce_to_tier(high, "low").items())


def test_reduced_inputs_match_processor_of_transformers() -> None:
    picture = pytest.importorskip("PIL.Image")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    arguments: dict[str, Any] = {"patch_size": tiny.PATCH, "merge_size": 2, "temporal_patch_size": 2}
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1, "longest_edge": 10**6}, image_mean=mean, image_std=std, **arguments
    )
    # Smooth waves do not overshoot the byte range.
    index = torch.arange(96)
    waves = 128 + 60 * torch.sin(index[None, :, None] / 7 + torch.arange(3)) * torch.cos(
        index[:64, None, None] / 9
    )
    full_image = picture.fromarray(waves.byte().numpy())

    def make_inputs(image: Any) -> dict[str, Tensor]:
        reduced = processor(images=[image], return_tensors="pt")
        rows, columns = reduced["image_grid_thw"][0, 1:].tolist()
        ids = torch.tensor([[60, *[tiny.IMAGE] * (rows * columns // 4), 61, 5, 6]])
        return {"input_ids": ids, "mm_token_type_ids": (ids == tiny.IMAGE).int(), **reduced}

    high = make_inputs(full_image)
    assert high["image_grid_thw"].tolist() == [[1, 16, 24]]
    exact = (waves.byte() / 255.0 - torch.tensor(mean)) / torch.tensor(std)
    assert torch.allclose(high["pixel_values"], patchified(exact.permute(2, 0, 1)), atol=1e-6)
    for tier in TIERS:
        reduced = ADAPTER.reduce_to_tier(high, tier)
        rows, columns = reduced["image_grid_thw"][0, 1:].tolist()
        size = (columns * tiny.PATCH, rows * tiny.PATCH)
        expected = make_inputs(full_image.resize(size, picture.Resampling.BICUBIC))
        for name in ("input_ids", "mm_token_type_ids", "image_grid_thw"):
            assert torch.equal(reduced[name], expected[name])
        # Pillow rounds to integers twice.
        difference = (reduced["pixel_values"] - expected["pixel_values"]).abs() * min(std)
        assert float(difference.max()) <= 1.6 / 255.0
    assert np.prod(high["image_grid_thw"][0].tolist()) == len(high["pixel_values"])


def test_reduced_pixels_keep_dtype() -> None:
    high = inputs_of([[pixels(4, 6)]])
    for dtype in (torch.float32, torch.bfloat16):
        case = high | {"pixel_values": high["pixel_values"].to(dtype)}
        reduced = ADAPTER.reduce_to_tier(case, "low")["pixel_values"]
        assert reduced.dtype == dtype
        assert torch.allclose(
            reduced.double(), ADAPTER.reduce_to_tier(high, "low")["pixel_values"], atol=0.03
        )


@pytest.mark.parametrize("tier", TIERS)
def test_positions_match_model(tier: Tier) -> None:
    model = copy.deepcopy(MODEL)
    adapter = get_adapter(model)
    rows = [[pixels(3, 5), pixels(4, 2)], [pixels(4, 2), pixels(3, 5)]]
    inputs = adapter.reduce_to_tier(inputs_of(rows), tier)
    expected = model(**inputs)
    positions, after = adapter.compute_positions(inputs)
    assert torch.equal(model(**inputs, position_ids=positions).logits, expected.logits)
    token = torch.tensor([[9], [8]])
    follows = model(input_ids=token, past_key_values=copy.deepcopy(expected.past_key_values)).logits
    model.model.rope_deltas = None
    outputs = model(input_ids=token, past_key_values=expected.past_key_values, position_ids=after[:, None])
    assert torch.equal(outputs.logits, follows)


def test_positions_of_text_and_padded_rows_match_model() -> None:
    words = tiny.make_text_prompt(rows=2)
    positions, after = ADAPTER.compute_positions(words)
    assert positions.shape == (3, 2, 9) and after.tolist() == [9, 9]
    assert torch.equal(MODEL(**words, position_ids=positions).logits, MODEL(**words).logits)
    inputs = inputs_of([[pixels(2, 3)]])
    padded = {
        name: functional.pad(inputs[name], (3, 0))
        for name in ("input_ids", "attention_mask", "mm_token_type_ids")
    }
    positions, after = ADAPTER.compute_positions({**inputs, **padded})
    expected, then = ADAPTER.compute_positions(inputs)
    assert torch.equal(positions[:, :, 3:], expected) and torch.equal(after, then)


def test_request_keeps_rope_offsets_across_other_requests() -> None:
    model = tiny.build_qwen3_vl_moe(seed=2)
    runtime = PlanRuntime(get_adapter(model))
    assert isinstance(runtime.adapter, Qwen3VLMoeAdapter)
    plan = Plan(tier="low", insertion_position=1, top_k=3, blocks=(0, 1, 4))
    other = Plan(tier=None, insertion_position=1, top_k=6, blocks=(0, 1, 2))
    inputs = runtime.adapter.reduce_to_tier(inputs_of([[pixels(6, 8)]]), "low")
    token = torch.tensor([[9]])
    with runtime.use_plan(plan):
        first = model(**inputs)
        copied_cache = copy.deepcopy(first.past_key_values)
        expected = model(input_ids=token, past_key_values=first.past_key_values).logits
    with runtime.use_plan(other):
        model(**tiny.make_text_prompt(rows=3))
    model.model.rope_deltas = None
    with runtime.use_plan(plan):
        assert torch.equal(model(input_ids=token, past_key_values=copied_cache).logits, expected)


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        ({"pixel_values": None}, "`pixel_values`"),
        ({"image_grid_thw": None}, None),
        ({"image_grid_thw": torch.tensor([[1, 8, 8]])}, None),
        ({"image_grid_thw": torch.tensor([[1, 8, 12], [1, 8, 12]])}, None),
        ({"image_grid_thw": torch.tensor([[2, 8, 6]])}, None),
        ({"image_grid_thw": torch.tensor([[1, 96, 1]])}, None),
        ({"pixel_values": torch.zeros(95, 96)}, None),
        ({"input_ids": torch.full((1, 31), 9)}, None),
        ({"video_grid_thw": torch.tensor([[1, 2, 2]])}, None),
        ({"position_ids": torch.zeros(3, 1, 31)}, None),
    ],
)
def test_reduce_to_tier_invalid_inputs_are_refused(change: dict[str, Any], expected_text: str | None) -> None:
    high = inputs_of([[pixels(4, 6)]])
    with pytest.raises(PlanError, match=expected_text):
        ADAPTER.reduce_to_tier(high | change, "low")


def test_rows_of_different_reduced_length_are_refused() -> None:
    # 4 and 6 vision tokens, reduced to 1 and 2; further text makes the rows equally long.
    high = inputs_of([[pixels(1, 3), pixels(1, 3)], [pixels(2, 3), pixels(1, 3)]][:1])
    wide = inputs_of([[pixels(2, 3)]], text=4 + 2)
    both = {name: torch.cat([high[name], wide[name]]) for name in high}
    assert both["input_ids"].shape == (2, 15)
    with pytest.raises(PlanError):
        ADAPTER.reduce_to_tier(both, "low")


def test_check_tier_inputs_that_were_not_reduced_are_refused() -> None:
    model = tiny.build_qwen3_vl_moe(seed=3)
    adapter, high = get_adapter(model), inputs_of([[pixels(4, 6)]])
    with pytest.raises(PlanError):
        adapter.check_tier(high, "low")
    low = adapter.reduce_to_tier(high, "low")
    # Another adapter of the same model knows them.
    get_adapter(model).check_tier(low, "low")
    adapter.check_tier(high, "high")
    with pytest.raises(PlanError):
        adapter.check_tier(low, "medium")
    words = tiny.make_text_prompt()
    with pytest.raises(PlanError, match="`tier`"):
        adapter.reduce_to_tier(high, None)
    with pytest.raises(PlanError, match="`tier`"):
        adapter.reduce_to_tier(words, "low")
    assert adapter.reduce_to_tier(words, None) == words
