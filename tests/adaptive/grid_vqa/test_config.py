"""Settings: those that come with the wing are of use, and those that are not say why."""

from __future__ import annotations

from typing import Any

import pytest

from sparseflow.adaptive.grid_vqa.config import list_vqa_configs, load_vqa_config, parse_vqa_config
from sparseflow.errors import InputError


def test_what_is_shipped_can_be_read_and_changed() -> None:
    assert {"digits", "gpu", "large"} <= set(list_vqa_configs())
    for name in list_vqa_configs():
        settings = load_vqa_config(name, {"train.steps": 5})
        assert settings.train.steps == 5
        assert parse_vqa_config(settings.model_dump(mode="json")) == settings


def test_shipped_weights_fit() -> None:
    # 16 bits each; what attention, experts, the vision tower and words have.
    messages = load_vqa_config("gpu").model
    blocks = messages.depth * (
        4 * messages.width**2
        + messages.experts * (3 * messages.width * messages.expert_width + messages.width)
    )
    vision = messages.vision_depth * (4 + 2 * messages.vision_mlp) * messages.vision_width**2
    assert 2 * (blocks + vision) < 24.5e6


def stages(*tiers: str) -> list[dict[str, Any]]:
    return [{"share": 1.0, "tier": tier} for tier in tiers]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scene": {"grid": 4}}, "grid"),
        ({"scene": {"item": [0.9, 0.5]}}, r"`scene.item` \(=0.9, 0.5\) "),
        ({"scene": {"small": [0.0, 0.5]}}, "scene.small"),
        ({"model": {"crop_px": 30}}, r"`crop_px` \(=30\) must be divisible by `patch_px` \(=8\)"),
        ({"model": {"vision_heads": 5}}, "`vision_width`"),
        ({"model": {"width": 60, "heads": 8}}, "`width`"),
        ({"model": {"width": 12, "heads": 4}}, "even"),
        ({"model": {"top_k": 17}}, r"`top_k` \(=17\) .*`experts` \(=16\)"),
        ({"images": {"digits": False}}, "there are no images"),
        ({"test_shares": {"at": 0.0}}, "test_shares"),
        ({"train": {"shares": {"at": 2.0, "left": -1.0}}}, "train.shares"),
        ({"train": {"shares": {"why": 1.0}}}, "shares"),
        ({"train": {"stages": []}}, r"`train.stages` \(=none\) "),
        ({"train": {"stages": stages("low", "medium")}}, r"\(=low, medium\) must .* end with high"),
        ({"train": {"stages": stages("medium", "low", "high")}}, r"\(=medium, low, high\)"),
        ({"train": {"warm_up": 0.6}}, r"`warm_up` \(=0.6\).*`cool_down` \(=0.5\)"),
        ({"train": {"ground_blocks": 17}}, r"`ground_blocks` \(=17\) .*`depth` \(=16\)"),
        (
            {"train": {"vision_crops": [1, 0, 3]}},
            r"`train.vision_crops` \(=\(1, 0, 3\)\) must be at least 1, 1, 1",
        ),
        ({"train": {"vision_crops": [1, 4, 10]}}, "at most 1, 4, 9"),
        ({"train": {"vision_weights": {"cat": -1.0}}}, r"`train.vision_weights` .* must be at least 0"),
        ({"train": {"rate": float("nan")}}, "rate"),
        ({"trains": {}}, "trains"),
    ],
)
def test_settings_of_no_use(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_vqa_config(changes)
