"""Files of models: round trips, and errors for files with other content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparseflow.errors import FileFormatError
from sparseflow.pruning import VideoViT, compact, load_model, save_model
from sparseflow.pruning.compaction.saved_model import VideoViTHeader
from sparseflow.pruning.model.config import SELECTORS
from tests.conformance import check_artifact_file
from tests.pruning.models import awake, clips

ALL = {"stages": {1: 0.5, 2: 0.3}, "keep": {"head": 0.5, "channel": 0.5, "block": 0.5}, "merge": True}


def assert_same(model: VideoViT, other: VideoViT) -> None:
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()), rtol=0.0, atol=0.0)
    assert model.to_dict() == other.to_dict()
    assert model.compacted == other.compacted and model.ast == other.ast
    assert torch.equal(model.eval()(clips(model)), other.eval()(clips(other)))


@pytest.mark.parametrize("is_compact", [False, True])
@pytest.mark.parametrize("ast", [None, ALL, *({"stages": {1: 0.5}, "selector": name} for name in SELECTORS)])
@pytest.mark.parametrize(
    "arguments", [{}, {"pool": "cls", "position": "joint", "tubelet_size": 2, "final_norm_eps": 1e-2}]
)
def test_load_model_returns_the_saved_model(
    ast: dict[str, Any] | None, is_compact: bool, arguments: dict[str, Any], tmp_path: Path
) -> None:
    model = awake(ast, **arguments)
    model = compact(model) if is_compact else model
    save_model(model.train(), tmp_path / "model.safetensors")
    loaded = load_model(str(tmp_path / "model.safetensors"))
    assert not loaded.training
    assert_same(loaded, model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_compact", [False, True])
def test_load_model_keeps_the_dtype(dtype: torch.dtype, is_compact: bool, tmp_path: Path) -> None:
    model = awake(ALL).to(dtype)
    model = compact(model) if is_compact else model
    save_model(model, tmp_path / "a")
    loaded = load_model(tmp_path / "a")
    assert loaded.head.weight.dtype == dtype
    assert_same(loaded, model)


def test_save_model_replaces_the_file(tmp_path: Path) -> None:
    model = awake(ALL)
    save_model(model, tmp_path / "a")
    save_model(compact(load_model(tmp_path / "a")), tmp_path / "a")
    assert_same(load_model(tmp_path / "a"), compact(model))
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_load_model_refuses_other_files(tmp_path: Path) -> None:
    save_model(compact(awake(ALL)), tmp_path / "a")
    check_artifact_file(load_model, tmp_path / "a", VideoViTHeader.HINT)
    save_file({"weight": torch.zeros(3)}, tmp_path / "b")
    with pytest.raises(FileFormatError, match="sparseflow pruning train"):
        load_model(tmp_path / "b")


def rewrite(
    path: Path,
    *,
    fields: dict[str, Any] | None = None,
    without: str | None = None,
    extra: dict[str, Tensor] | None = None,
) -> None:
    """Change fields of the header of a file, remove a weight, or add weights."""
    with safe_open(path, framework="pt") as stream:
        header = json.loads(stream.metadata()["sparseflow"]) | (fields or {})
    weights = {name: value for name, value in load_file(path).items() if name != without} | (extra or {})
    save_file(weights, path, metadata={"sparseflow": json.dumps(header)})


@pytest.mark.parametrize(
    "units",
    [
        [[4, 32]] * 3, [[4, 32]] * 5, [[4, 32]] * 4, [4, 32, 4, 32], [["a", 1]] * 4,
        [[-1, 2]] * 4, 7, {}, "four", [[0, 0]] * 4,
    ],
)  # fmt: skip
def test_load_model_with_wrong_units_raises(units: Any, tmp_path: Path) -> None:
    save_model(compact(awake(ALL)), tmp_path / "a")
    rewrite(tmp_path / "a", fields={"units": units})
    with pytest.raises(FileFormatError, match="a"):
        load_model(tmp_path / "a")


@pytest.mark.parametrize(
    "settings",
    [
        {"embed_dim": 32}, {"depth": 5}, {"num_classes": "five"}, {"mlp_ratio": None}, {"more": 1},
        {"ast_cfg": {"stages": 3}}, {"ast_cfg": "all"}, {"pool": "max"}, {"img_size": 0},
        {"mlp_ratio": float("inf")}, {"embed_dim": 10**300}, {"num_frames": 2**40}, {"img_size": 2**14},
        {"embed_dim": 2**14, "depth": 2**10}, {"embed_dim": 2**10, "depth": 2**6},
    ],
)  # fmt: skip
def test_load_model_with_wrong_architecture_raises(settings: dict[str, Any], tmp_path: Path) -> None:
    model = awake(ALL)
    save_model(model, tmp_path / "a")
    rewrite(tmp_path / "a", fields={"model": model.to_dict() | settings})
    with pytest.raises(FileFormatError, match=str(tmp_path / "a")):
        load_model(tmp_path / "a")


@pytest.mark.parametrize("name", ["head.weight", "blocks.0.norm1.bias"])
def test_load_model_without_a_weight_raises(name: str, tmp_path: Path) -> None:
    save_model(awake(), tmp_path / "a")
    rewrite(tmp_path / "a", without=name)
    with pytest.raises(FileFormatError, match=name):
        load_model(tmp_path / "a")


def test_load_model_with_an_unknown_weight_raises(tmp_path: Path) -> None:
    save_model(awake(), tmp_path / "a")
    rewrite(tmp_path / "a", extra={"blocks.0.gamma": torch.zeros(3)})
    with pytest.raises(FileFormatError, match=r"blocks\.0\.gamma"):
        load_model(tmp_path / "a")
