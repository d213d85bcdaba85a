"""Qwen3-VL-MoE: tiers are resolutions, as the model's own processor would have made them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
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


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def pixels(rows: int, columns: int, seed: int = 0) -> Tensor:
    """An image of so many tokens down and across, normalised."""
    shape = (3, rows * MERGED, columns * MERGED)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def patchified(image: Tensor) -> Tensor:
    """Patches of an image, one by one: tokens row by row, in each its patches row by row, each of them
    [channels, 2 frames, height, width]."""
    side, actual = tiny.PATCH, []
    for top in range(0, image.shape[1], MERGED):
        for column in range(0, image.shape[2], MERGED):
            for down in (0, side):
                for across in (0, side):
                    y, x = top + down, column + across
                    patch = image[:, y : y + side, x : x + side]
                    actual.append(torch.stack([patch, patch], 1).flatten())
    return torch.stack(actual)


def inputs_of(rows: list[list[Tensor]], text: int = 4) -> dict[str, Tensor]:
    """Inputs of rows of images, made by hand."""
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


def scale_grid(image: Tensor, tier: Tier) -> Tensor:
    """An image as it is at a tier."""
    size = tuple(max(1, int(side // MERGED * SCALES[tier] + 0.5)) * MERGED for side in image.shape[1:])
    if size == tuple(image.shape[1:]):
        return image
    scaled_grid = functional.interpolate(image[None], size=size, mode="bicubic", antialias=True)[0]
    low, high = image.amin((1, 2), keepdim=True), image.amax((1, 2), keepdim=True)
    return scaled_grid.clamp(low, high)


@given(st.lists(st.tuples(sides, sides), min_size=1, max_size=3), st.integers(1, 2), st.sampled_from(TIERS))
def test_a_tier_is_what_would_have_been_made_for_it(shapes: Any, rows: int, tier: Tier) -> None:
    images = [pixels(*shape, seed=index) for index, shape in enumerate(shapes)]
    high = inputs_of([images] * rows)
    before = {name: value.clone() for name, value in high.items()}
    reduced = ADAPTER.reduce_to_tier(high, tier)
    expected = inputs_of([[scale_grid(image, tier) for image in images]] * rows)
    assert list(reduced) == list(expected)
    for name, value in expected.items():
        assert torch.equal(reduced[name], value), name
        assert torch.equal(high[name], before[name])
    assert ADAPTER.count_vision_tokens(reduced) == int(expected["mm_token_type_ids"].sum())
    ADAPTER.check_tier(reduced, tier)


def test_shares_of_tokens() -> None:
    high = inputs_of([[pixels(16, 24)]])
    counts = {tier: ADAPTER.count_vision_tokens(ADAPTER.reduce_to_tier(high, tier)) for tier in TIERS}
    assert counts == {"low": 96, "medium": 187, "high": 384}


def test_one_token_stays() -> None:
    high = inputs_of([[pixels(1, 1)]])
    assert all(torch.equal(value, high[name]) for name, value in ADAPTER.reduce_to_tier(high, "low").items())


def test_what_the_models_own_processor_makes() -> None:
    picture = pytest.importorskip("PIL.Image")
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    arguments: dict[str, Any] = {"patch_size": tiny.PATCH, "merge_size": 2, "temporal_patch_size": 2}
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": 1, "longest_edge": 10**6}, image_mean=mean, image_std=std, **arguments
    )
    # Waves, so that nothing overshoots what bytes hold.
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
        # Pillow rounds to whole steps, twice.
        difference = (reduced["pixel_values"] - expected["pixel_values"]).abs() * min(std)
        assert float(difference.max()) <= 1.6 / 255.0
    assert np.prod(high["image_grid_thw"][0].tolist()) == len(high["pixel_values"])


def test_dtypes_of_pixels_are_kept() -> None:
    high = inputs_of([[pixels(4, 6)]])
    for dtype in (torch.float32, torch.bfloat16):
        case = high | {"pixel_values": high["pixel_values"].to(dtype)}
        reduced = ADAPTER.reduce_to_tier(case, "low")["pixel_values"]
        assert reduced.dtype == dtype
        assert torch.allclose(
            reduced.double(), ADAPTER.reduce_to_tier(high, "low")["pixel_values"], atol=0.03
        )


@pytest.mark.parametrize("tier", TIERS)
def test_positions_are_those_of_the_model(tier: Tier) -> None:
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


def test_positions_of_text_and_of_padded_rows() -> None:
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


def test_a_request_keeps_its_rope_offsets_whatever_runs_between() -> None:
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


# What is refused.


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        ({"pixel_values": None}, "`pixel_values`"),
        ({"image_grid_thw": None}, ""),
        ({"image_grid_thw": torch.tensor([[1, 8, 8]])}, ""),
        ({"image_grid_thw": torch.tensor([[1, 8, 12], [1, 8, 12]])}, ""),
        ({"image_grid_thw": torch.tensor([[2, 8, 6]])}, ""),
        ({"image_grid_thw": torch.tensor([[1, 96, 1]])}, ""),
        ({"pixel_values": torch.zeros(95, 96)}, ""),
        ({"input_ids": torch.full((1, 31), 9)}, ""),
        ({"video_grid_thw": torch.tensor([[1, 2, 2]])}, ""),
        ({"position_ids": torch.zeros(3, 1, 31)}, ""),
    ],
)
def test_inputs_that_cannot_be_reduced(change: dict[str, Any], expected_text: str) -> None:
    high = inputs_of([[pixels(4, 6)]])
    with pytest.raises(PlanError, match=expected_text or None):
        ADAPTER.reduce_to_tier(high | change, "low")


def test_rows_that_shrink_by_unlike_counts() -> None:
    # 4 and 6 tokens, of which 1 and 2 stay; as many in all by one more of text.
    high = inputs_of([[pixels(1, 3), pixels(1, 3)], [pixels(2, 3), pixels(1, 3)]][:1])
    wide = inputs_of([[pixels(2, 3)]], text=4 + 2)
    both = {name: torch.cat([high[name], wide[name]]) for name in high}
    assert both["input_ids"].shape == (2, 15)
    with pytest.raises(PlanError):
        ADAPTER.reduce_to_tier(both, "low")


def test_a_call_of_inputs_that_were_not_reduced() -> None:
    model = tiny.build_qwen3_vl_moe(seed=3)
    adapter, high = get_adapter(model), inputs_of([[pixels(4, 6)]])
    with pytest.raises(PlanError):
        adapter.check_tier(high, "low")
    low = adapter.reduce_to_tier(high, "low")
    # Whichever adapter of the model made them.
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
