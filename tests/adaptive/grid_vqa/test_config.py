"""Configurations: shipped files, and refused settings."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sparseflow.adaptive.grid_vqa.config import VqaConfig, load_vqa_config
from sparseflow.core.config import list_configs


def test_shipped_configs_load_with_overrides() -> None:
    names = list_configs("sparseflow.adaptive.grid_vqa")
    assert {"digits", "gpu", "large"} <= set(names)
    for name in names:
        settings = load_vqa_config(name, {"train.steps": 5})
        assert settings.train.steps == 5
        assert VqaConfig.model_validate(settings.model_dump(mode="json")) == settings


def test_shipped_gpu_model_is_small() -> None:
    # Two bytes per weight of attention, experts and the vision tower.
    config = load_vqa_config("gpu").model
    blocks = config.depth * (
        4 * config.width**2 + config.experts * (3 * config.width * config.expert_width + config.width)
    )
    vision = config.vision_depth * (4 + 2 * config.vision_mlp) * config.vision_width**2
    assert 2 * (blocks + vision) < 24.5e6


def stages(*tiers: str) -> list[dict[str, Any]]:
    return [{"share": 1.0, "tier": tier} for tier in tiers]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scene": {"grid": 4}}, "grid"),
        ({"scene": {"item": [0.9, 0.5]}}, r"`scene.item` \(=0.9, 0.5\) "),
        ({"scene": {"small": [0.0, 0.5]}}, r"scene\.small"),
        ({"model": {"crop_px": 30}}, r"`crop_px` \(=30\) must be divisible by `patch_px` \(=8\)"),
        ({"model": {"vision_heads": 5}}, "`vision_width`"),
        ({"model": {"width": 60, "heads": 8}}, "`width`"),
        ({"model": {"width": 12, "heads": 4}}, "even"),
        ({"model": {"top_k": 17}}, r"`top_k` \(=17\) .*`experts` \(=16\)"),
        ({"images": {"digits": False}}, "there are no images"),
        ({"test_shares": {"at": 0.0}}, "test_shares"),
        ({"train": {"shares": {"at": 2.0, "left": -1.0}}}, r"train\.shares"),
        ({"train": {"shares": {"why": 1.0}}}, "shares"),
        ({"train": {"stages": []}}, r"`train.stages` \(=none\) "),
        ({"train": {"stages": stages("low", "medium")}}, r"\(=low, medium\) must .* end with high"),
        ({"train": {"stages": stages("medium", "low", "high")}}, r"\(=medium, low, high\)"),
        ({"train": {"warm_up": 0.6}}, r"`warm_up` \(=0.6\).*`cool_down` \(=0.5\)"),
        ({"train": {"ground_blocks": 17}}, r"`ground_blocks` \(=17\) .*`depth` \(=16\)"),
        ({"train": {"vision_crops": [1, 0, 3]}}, r"train\.vision_crops\.1"),
        ({"train": {"vision_crops": [1, 4, 10]}}, r"train\.vision_crops\.2"),
        ({"train": {"vision_weights": {"cat": -1.0}}}, r"train\.vision_weights\.cat"),
        ({"train": {"rate": float("nan")}}, "rate"),
        ({"trains": {}}, "trains"),
    ],
)
def test_config_with_invalid_setting_raises(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VqaConfig.model_validate(changes)
