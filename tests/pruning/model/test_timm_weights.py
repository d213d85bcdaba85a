"""Weights with the names of timm, official files of VideoMAE, and modules: outputs of transformers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.model.pretrained import build_from_pretrained, load_pretrained
from tests.pruning.model.test_pretrained import (
    OURS,
    OURS_MAE,
    assert_alike,
    mae,
    make_video_vit,
    old_names,
    vit,
)

_TIMM_EPS: dict[str, Any] = {"layer_norm_eps": 1e-6}
_TIMM: dict[str, Any] = {"norm_eps": 1e-6}


def timm_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a ViT or VideoMAE of transformers 4 with the names of timm."""
    replacements = {
        "vit.": "", "videomae.": "", "encoder.layer.": "blocks.", "layernorm_before": "norm1",
        "layernorm_after": "norm2", "attention.output.dense": "attn.proj", "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2", "embeddings.cls_token": "cls_token", "layernorm": "norm",
        "embeddings.position_embeddings": "pos_embed", "classifier": "head",
        "embeddings.patch_embeddings.projection": "patch_embed.proj",
    }  # fmt: skip
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        for hf_name, timm_name in replacements.items():
            name = name.replace(hf_name, timm_name)
        renamed[name] = value
    for name in [name for name in renamed if ".attention.attention.query." in name]:
        parts = [
            renamed.pop(name.replace("query", part))
            for part in ("query", "key", "value")
            if name.replace("query", part) in renamed
        ]
        block, kind = name.split(".attention.attention.query.")
        if len(parts) == 3:
            renamed[f"{block}.attn.qkv.{kind}"] = torch.cat(parts)
        else:
            renamed |= dict(zip((f"{block}.attn.q_bias", f"{block}.attn.v_bias"), parts, strict=True))
    return renamed


def test_vit_with_names_of_timm_matches_transformers() -> None:
    reference = vit(**_TIMM_EPS)
    state = timm_names(old_names(reference.state_dict()))
    assert {"blocks.1.attn.qkv.bias", "pos_embed", "head.weight"} <= set(state)
    model = make_video_vit(OURS | _TIMM)
    result = load_pretrained(model, {f"module.{name}": value for name, value in state.items()})
    assert_alike(model, reference)
    assert result.architecture == "ViT" and not result.unused and not result.not_loaded
    with pytest.raises(InputError, match="reg_token"):
        load_pretrained(model, state | {"reg_token": torch.zeros(1, 4, 32)})
    with pytest.raises(InputError, match="ls1"):
        load_pretrained(model, state | {"blocks.0.ls1.gamma": torch.zeros(32)})


@pytest.mark.parametrize("key", ["model", "module", None])
def test_official_videomae_checkpoint_matches_transformers(key: str | None, tmp_path: Path) -> None:
    reference = mae(**_TIMM_EPS)
    reference.fc_norm.eps = 1e-6
    state = timm_names({name: value for name, value in reference.state_dict().items()})
    content = state if key is None else {key: state, "epoch": 3, "args": argparse.Namespace(lr=0.1)}
    torch.save(content, tmp_path / "checkpoint.pth")
    model = build_from_pretrained(
        tmp_path / "checkpoint.pth", num_frames=6, num_classes=5, num_heads=4, img_size=24
    )
    assert_alike(model, reference)


def test_module_is_read_with_its_configuration() -> None:
    reference = vit(layer_norm_eps=1e-3)
    model = build_from_pretrained(reference, num_frames=1, num_classes=5)
    assert model.config.norm_eps == 1e-3 and model.config.num_heads == OURS["num_heads"]
    assert_alike(model, reference)


class _Command:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, ("raise SystemExit",)


def test_checkpoint_with_code_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pth"
    torch.save({"model": {}, "hook": _Command()}, file)
    with pytest.raises(FileFormatError, match=r"checkpoint\.pth is no checkpoint of weights only"):
        load_pretrained(make_video_vit(OURS_MAE), file)
    file.write_bytes(b"PK\x03\x04 damaged")
    with pytest.raises(FileFormatError, match=r"checkpoint\.pth"):
        load_pretrained(make_video_vit(OURS_MAE), file)
