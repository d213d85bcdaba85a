"""Configurations: shipped files, overrides and invalid settings."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from sparseflow.core.config import list_configs
from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.config import read_config
from tests.pruning.small import quick


def test_shipped_configs_build_models() -> None:
    names = list_configs("sparseflow.pruning")
    assert names == ["ast2_ucf101", "moving_digits", "moving_objects", "video_tasks"]
    for name in names:
        settings = read_config(name)
        assert settings.mode == "ast"
    assert read_config("moving_digits").build_model(8, 1).config.num_tokens == 64


def test_pretrained_replaces_random_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    size = {"image_size": 16, "patch_size": 8, "num_channels": 1}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**shape | size))
    vit.vit.layernorm.weight.data.fill_(2.0)
    vit.save_pretrained(tmp_path)
    model = quick(model={"norm_eps": 1e-12}, pretrained=str(tmp_path)).build_model(8, 1)
    assert (model.norm.weight == 2.0).all()
    with pytest.raises(InputError, match="embed_dim"):
        quick(model={"norm_eps": 1e-12, "embed_dim": 32}, pretrained=str(tmp_path)).build_model(8, 1)


def test_overrides_replace_file_values(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: {img_size: 16, num_frames: 2, embed_dim: 8, depth: 1, num_heads: 1, patch_size: 8}\n"
        "data: {kind: moving_digits}\n"
    )
    settings = read_config(file, {"train.epochs": 3, "mode": "dense"})
    assert (settings.train.epochs, settings.mode, settings.model.depth) == (3, "dense", 1)
    with pytest.raises(InputError, match="`mode`"):
        read_config(file, {"mode": "ast", "mode.x": 1})


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a: [", FileFormatError, "mine.yaml"),
        ("- 1", FileFormatError, "mine.yaml"),
        ("mode: ast", InputError, "model: Field required"),
    ],
)
def test_invalid_files_raise(text: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(error, match=message):
        read_config(file)


def test_missing_file_error_lists_shipped_configs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ast2_ucf101, moving_digits"):
        read_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"epoch": 3}}, "train.epoch: Extra inputs"),
        ({"ast": {"stages": {"1": 1.5}}}, "1.5"),
        ({"ast": {"selector": "best"}}, "must be one of"),
        ({"mode": "ast+latency"}, "`latency`"),
        ({"mode": "ast+latency", "ast": {"keep": {}}}, "`keep`"),
        ({"latency": {"model": "cost.json", "budget": 0.5}}, "`latency`"),
        ({"data": {"kind": "kinetics"}}, "kinetics"),
    ],
)
def test_invalid_combinations_raise(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        quick(**changes)
