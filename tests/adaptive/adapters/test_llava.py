"""LLaVA adapter: tiers are the first crops of each image."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparseflow.adaptive.adapters import LlavaAdapter, get_adapter
from sparseflow.adaptive.adapters.crops import CROPS, expand_placeholders, make_nested_crops
from sparseflow.adaptive.plan.runtime import PlanRuntime
from sparseflow.adaptive.plan.space import TIERS, Plan, Tier
from sparseflow.errors import ModelError, PlanError
from tests.adaptive import tiny

MODELS = {
    "siglip": tiny.build_llava_siglip(),
    "clip": tiny.build_llava_clip(),
    "dense": tiny.build_llava_dense(),
}
SIGLIP: Any = get_adapter(MODELS["siglip"])
TOKENS = 4
"""Tokens per crop."""


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_per_crop_match_vision_tower(kind: str) -> None:
    model = MODELS[kind]
    adapter = get_adapter(model)
    assert isinstance(adapter, LlavaAdapter)
    pixels = torch.zeros(1, 3, tiny.SIZE, tiny.SIZE, dtype=torch.float64)
    features = model.get_image_features(pixels, return_dict=True).pooler_output
    assert adapter.tokens_per_crop == TOKENS == len(features[0])
    assert adapter.geometry.tiers == TIERS and adapter.geometry.top_k == (1 if kind == "dense" else 6)


@pytest.mark.parametrize("strategy", ["default", "full"])
@pytest.mark.parametrize("kind", ["siglip", "clip"])
def test_tokens_per_crop_follow_select_strategy(kind: str, strategy: str) -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    config: Any = LlavaConfig.from_dict(MODELS[kind].config.to_dict())
    config.vision_feature_select_strategy = strategy
    model: Any = LlavaForConditionalGeneration(config).eval()
    features = model.get_image_features(
        torch.zeros(1, 3, tiny.SIZE, tiny.SIZE), return_dict=True
    ).pooler_output
    assert LlavaAdapter(model).tokens_per_crop == len(features[0])


def row(tier: Tier, images: int, text: int = 3) -> list[int]:
    ids = [tiny.IMAGE] * (CROPS[tier] * TOKENS)
    return sum(([*ids, 10 + index] for index in range(images)), [7]) + [
        20 + index % 30 for index in range(text)
    ]


def inputs_of(tier: Tier, rows: list[int]) -> dict[str, Tensor]:
    """Rows with the given numbers of images; pixels identify image and crop."""
    ids = torch.tensor([row(tier, images) for images in rows])
    indices = torch.arange(sum(rows) * CROPS["high"], dtype=torch.float64).view(-1, CROPS["high"])
    pixels = indices[:, : CROPS[tier]].reshape(-1, 1, 1, 1).expand(-1, 3, tiny.SIZE, tiny.SIZE)
    kinds = (ids == tiny.IMAGE).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "kinds": kinds, "pixel_values": pixels}


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(TIERS))
def test_reduce_to_tier_matches_inputs_made_for_tier(images: int, rows: int, tier: Tier) -> None:
    high = inputs_of("high", [images] * rows)
    before = {name: value.clone() for name, value in high.items()}
    reduced, expected = SIGLIP.reduce_to_tier(high, tier), inputs_of(tier, [images] * rows)
    assert list(reduced) == list(expected)
    assert all(torch.equal(reduced[name], expected[name]) for name in expected)
    assert all(torch.equal(high[name], before[name]) for name in before)
    assert SIGLIP.count_vision_tokens(reduced) == rows * images * CROPS[tier] * TOKENS
    SIGLIP.check_tier(reduced, tier)
    for other in set(TIERS) - {tier}:
        with pytest.raises(PlanError):
            SIGLIP.check_tier(reduced, other)


def test_logits_of_reduced_inputs_match_inputs_made_for_tier() -> None:
    model, adapter = MODELS["clip"], get_adapter(MODELS["clip"])
    image = torch.rand(3, 30, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    arguments = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)}
    words = torch.tensor([[5, tiny.IMAGE, 8, 9]])

    def make_inputs(tier: Tier) -> dict[str, Tensor]:
        ids = expand_placeholders(words, tiny.IMAGE, CROPS[tier] * TOKENS)
        pixels = make_nested_crops(image, tiny.SIZE, tier=tier, **arguments)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels}

    logits = {}
    for tier in TIERS:
        logits[tier] = model(**adapter.reduce_to_tier(make_inputs("high"), tier)).logits
        assert torch.equal(logits[tier], model(**make_inputs(tier)).logits)
    assert not torch.allclose(logits["low"][:, -1], logits["high"][:, -1])


def test_dense_language_model_runs_plan_without_top_k() -> None:
    model = MODELS["dense"]
    runtime = PlanRuntime(get_adapter(model))
    inputs = get_adapter(model).reduce_to_tier(tiny.make_prompt(model), "medium")
    plan = Plan(tier="medium", insertion_position=2, top_k=1, blocks=(0, 1, 3, 5))
    with runtime.use_plan(plan):
        output = model(**inputs)
    assert get_adapter(model).get_kv_lengths(output.past_key_values) == dict.fromkeys(plan.blocks, 30)
    with (
        pytest.raises(PlanError),
        runtime.use_plan(Plan(tier="medium", insertion_position=2, top_k=2, blocks=(0, 1, 3, 5))),
    ):
        pass
    runtime.remove()


def test_one_crop_per_image_is_refused_with_hint() -> None:
    stock = inputs_of("low", [1, 1])
    with pytest.raises(PlanError, match="`pixel_values`"):
        SIGLIP.reduce_to_tier(stock, "low")
    with (
        pytest.raises(PlanError),
        PlanRuntime(SIGLIP).use_plan(SIGLIP.geometry.full_plan()),
    ):
        MODELS["siglip"](**stock)


@pytest.mark.parametrize(
    ("change", "expected_text"),
    [
        ({"pixel_values": None}, "`pixel_values`"),
        ({"pixel_values": torch.zeros(15, 3, 8, 8)}, None),
        ({"input_ids": None}, "`input_ids`"),
        ({"input_ids": torch.tensor([3, 4])}, None),
        ({"input_ids": torch.full((2, 4), 9)}, None),
        ({"position_ids": torch.zeros(2, 3)}, None),
        ({"past_key_values": object(), "inputs_embeds": 1}, None),
        ({"attention_mask": torch.ones(2, 1, 4, 4)}, "`attention_mask`"),
    ],
)
def test_reduce_to_tier_invalid_inputs_are_refused(change: dict[str, Any], expected_text: str | None) -> None:
    with pytest.raises(PlanError, match=expected_text):
        SIGLIP.reduce_to_tier(inputs_of("high", [1, 1]) | change, "low")


def test_adjacent_or_truncated_images_are_refused() -> None:
    high = inputs_of("high", [2])
    batched = high["input_ids"][
        :, [index for index in range(high["input_ids"].shape[1]) if index != 1 + 14 * TOKENS]
    ]
    for ids, expected_text in (
        (batched, "112"),
        (high["input_ids"][:, 2:], "55"),
    ):
        with pytest.raises(PlanError, match=expected_text):
            SIGLIP.reduce_to_tier({"input_ids": ids, "pixel_values": high["pixel_values"]}, "low")
    with pytest.raises(PlanError):
        SIGLIP.reduce_to_tier(inputs_of("medium", [1]), "low")


def test_rows_of_different_reduced_length_are_refused() -> None:
    # Rows of equal length with different numbers of images.
    longer = row("high", 1, text=3 + 14 * TOKENS + 1)
    ids = torch.tensor([longer, row("high", 2)])
    pixels = torch.zeros(3 * 14, 3, tiny.SIZE, tiny.SIZE)
    assert torch.equal(
        SIGLIP.reduce_to_tier({"input_ids": ids, "pixel_values": pixels}, "high")["input_ids"], ids
    )
    with pytest.raises(PlanError):
        SIGLIP.reduce_to_tier({"input_ids": ids, "pixel_values": pixels}, "low")


def test_tier_must_match_presence_of_images() -> None:
    words = {"input_ids": torch.tensor([[4, 5, 6]])}
    assert SIGLIP.reduce_to_tier(words, None) == words
    for inputs, tier, expected_text in (
        (words, "low", "no placeholder of an image"),
        (inputs_of("high", [1]), None, "`tier` is None, but the request has images"),
        (words | {"pixel_values": torch.zeros(1)}, None, "`tier` is None, but the request has images"),
    ):
        with pytest.raises(PlanError, match=expected_text):
            SIGLIP.reduce_to_tier(inputs, tier)


def test_unknown_vision_tower_is_refused() -> None:
    model = tiny.build_llava_clip()
    model.config.vision_config.model_type = "pixtral"
    with pytest.raises(ModelError):
        LlavaAdapter(model)
