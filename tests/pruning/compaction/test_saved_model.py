"""Models in files: the same back, and a clear word about files that are something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning import VideoViT, compact, load, save
from sparseflow.pruning.model.config import SELECTORS
from tests.pruning.models import awake, clips

ALL = {"stages": {1: 0.5, 2: 0.3}, "keep": {"head": 0.5, "channel": 0.5, "block": 0.5}, "merge": True}


def assert_same(one: VideoViT, other: VideoViT) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0.0, atol=0.0)
    assert one.to_dict() == other.to_dict() and one.compacted == other.compacted and one.ast == other.ast
    assert torch.equal(one.eval()(clips(one)), other.eval()(clips(one)))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("ast", [None, ALL, *({"stages": {1: 0.5}, "selector": each} for each in SELECTORS)])
@pytest.mark.parametrize(
    "others", [{}, {"pool": "cls", "position": "joint", "tubelet_size": 2, "final_norm_eps": 1e-2}]
)
def test_there_and_back(
    ast: dict[str, Any] | None, cut: bool, others: dict[str, Any], tmp_path: Path
) -> None:
    model = awake(ast, **others)
    model = compact(model) if cut else model
    save(model.train(), tmp_path / "model.safetensors")
    found = load(str(tmp_path / "model.safetensors"))
    assert not found.training
    assert_same(found, model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cut", [False, True])
def test_dtypes(dtype: torch.dtype, cut: bool, tmp_path: Path) -> None:
    model = awake(ALL).to(dtype)
    model = compact(model) if cut else model
    save(model, tmp_path / "a")
    found = load(tmp_path / "a")
    assert found.head.weight.dtype == dtype
    assert_same(found, model)


def test_a_loaded_model_is_compacted_and_saved_again(tmp_path: Path) -> None:
    model = awake(ALL)
    save(model, tmp_path / "a")
    save(compact(load(tmp_path / "a")), tmp_path / "a")
    assert_same(load(tmp_path / "a"), compact(model))
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_the_file_is_safetensors_with_its_settings(tmp_path: Path) -> None:
    save(awake(ALL), tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["sparseflow"] == "video-vit"
    assert json.loads(metadata["made"])["model"]["embed_dim"] == 16


def test_no_file_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*absent"):
        load(tmp_path / "absent")
    with pytest.raises(InputError, match="there is no file"):
        load(tmp_path)
    with pytest.raises(OSError):
        save(awake(), tmp_path / "no" / "folder")


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"\xff" * 64, b'{"model": {}}', b"PK\x03\x04"])
def test_other_files(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(FileFormatError, match="is not a VideoViT that can be read"):
        load(tmp_path / "a")


def test_torn_files(tmp_path: Path) -> None:
    save(compact(awake(ALL)), tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    for share in (0.01, 0.3, 0.9, 0.9999):
        (tmp_path / "a").write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(FileFormatError, match="is not a VideoViT that can be read"):
            load(tmp_path / "a")


def test_other_weights(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "a")
    with pytest.raises(FileFormatError, match="holds no VideoViT of this version"):
        load(tmp_path / "a")
    save_file(
        {"weight": torch.zeros(3)}, tmp_path / "a", metadata={"sparseflow": "video-vit", "version": "2"}
    )
    with pytest.raises(FileFormatError, match="holds no VideoViT of this version"):
        load(tmp_path / "a")


def changed(
    path: Path,
    *,
    made: Any = None,
    text: str | None = None,
    without: str | None = None,
    more: dict[str, Tensor] | None = None,
) -> None:
    """Write a model's file again with another description, without one of its weights, or with more."""
    with safe_open(path, framework="pt") as opened:
        metadata = dict(opened.metadata())
    if made is not None:
        metadata["made"] = json.dumps(made)
    if text is not None:
        metadata["made"] = text
    weights = {name: value for name, value in load_file(path).items() if name != without} | (more or {})
    save_file(weights, path, metadata=metadata)


@pytest.mark.parametrize(
    "units",
    [
        [[4, 32]] * 3, [[4, 32]] * 5, [[4, 32]] * 4, [4, 32, 4, 32], [["a", 1]] * 4,
        [[-1, 2]] * 4, 7, {}, "four",
    ],
)  # fmt: skip
def test_units_that_do_not_fit(units: Any, tmp_path: Path) -> None:
    model = compact(awake(ALL))
    save(model, tmp_path / "a")
    changed(tmp_path / "a", made={"model": model.to_dict(), "units": units})
    with pytest.raises(FileFormatError, match="is not a VideoViT that can be read"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    "settings",
    [
        {"embed_dim": 32}, {"depth": 5}, {"num_classes": "five"}, {"mlp_ratio": None}, {"more": 1},
        {"ast_cfg": {"stages": 3}}, {"ast_cfg": "all"}, {"pool": "max"}, {"img_size": 0},
    ],
)  # fmt: skip
def test_settings_that_do_not_fit(settings: dict[str, Any], tmp_path: Path) -> None:
    model = awake(ALL)
    save(model, tmp_path / "a")
    changed(tmp_path / "a", made={"model": model.to_dict() | settings, "units": None})
    with pytest.raises(FileFormatError, match="is not a VideoViT that can be read"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"model": {}}', '{"units": null}', '{"model": [], "units": null}']
)
def test_descriptions_that_are_none(text: str, tmp_path: Path) -> None:
    save(awake(), tmp_path / "a")
    changed(tmp_path / "a", text=text)
    with pytest.raises(FileFormatError, match="is not a VideoViT that can be read"):
        load(tmp_path / "a")


@pytest.mark.parametrize("name", ["head.weight", "blocks.0.norm1.bias"])
def test_a_weight_that_is_missing_is_named(name: str, tmp_path: Path) -> None:
    save(awake(), tmp_path / "a")
    changed(tmp_path / "a", without=name)
    with pytest.raises(FileFormatError, match=name):
        load(tmp_path / "a")


def test_a_weight_that_belongs_nowhere_is_named(tmp_path: Path) -> None:
    save(awake(), tmp_path / "a")
    changed(tmp_path / "a", more={"blocks.0.gamma": torch.zeros(3)})
    with pytest.raises(FileFormatError, match=r"`blocks\.0\.gamma` does not fit"):
        load(tmp_path / "a")


def test_an_infinite_ratio_is_refused(tmp_path: Path) -> None:
    model = awake()
    save(model, tmp_path / "a")
    changed(tmp_path / "a", made={"model": model.to_dict() | {"mlp_ratio": float("inf")}, "units": None})
    with pytest.raises(FileFormatError, match="`mlp_ratio`"):
        load(tmp_path / "a")


def test_weights_of_blocks_that_are_said_to_be_gone(tmp_path: Path) -> None:
    model = compact(awake(ALL))
    save(model, tmp_path / "a")
    changed(tmp_path / "a", made={"model": model.to_dict(), "units": [[0, 0]] * 4})
    with pytest.raises(FileFormatError, match=r"`blocks\..* does not fit"):
        load(tmp_path / "a")
