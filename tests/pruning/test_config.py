"""Configurations: those that are shipped, changes by name, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml")

from sparseflow.errors import FileFormatError, InputError
from sparseflow.pruning.config import read_settings, shipped
from tests.pruning.small import quick


def test_what_is_shipped_can_be_made() -> None:
    assert shipped() == ["ast2_ucf101", "moving_digits"]
    for name in shipped():
        settings = read_settings(name)
        assert settings.mode == "ast"
    assert read_settings("moving_digits").make(8, 1).config.tokens == 64


def test_changes_go_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "model: {img_size: 16, num_frames: 2, embed_dim: 8, depth: 1, num_heads: 1, patch_size: 8}\n"
        "data: {kind: moving_digits}\n"
    )
    settings = read_settings(file, {"train.epochs": 3, "mode": "dense"})
    assert (settings.train.epochs, settings.mode, settings.model.depth) == (3, "dense", 1)
    with pytest.raises(InputError, match="`mode` has no parts"):
        read_settings(file, {"mode": "ast", "mode.x": 1})


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("a: [", FileFormatError, "is not YAML"),
        ("- 1", FileFormatError, "must hold settings by name"),
        ("mode: ast", InputError, "model: Field required"),
    ],
)
def test_what_is_no_configuration(text: str, error: type[Exception], said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(error, match=said):
        read_settings(file)


def test_a_file_that_is_not_there_names_what_is_shipped(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="these come with SparseFlow: ast2_ucf101, moving_digits"):
        read_settings(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"epoch": 3}}, "train.epoch: Extra inputs"),
        ({"ast": {"stages": {"1": 1.5}}}, "share of 1.5"),
        ({"ast": {"selector": "best"}}, "must be one of"),
        ({"mode": "ast+latency"}, "there must be settings of `latency`"),
        ({"mode": "ast+latency", "ast": {"keep": {}}}, "learns gates"),
        ({"latency": {"model": "cost.json", "budget": 0.5}}, "and only then"),
        ({"data": {"kind": "kinetics"}}, "kinetics"),
    ],
)
def test_settings_of_no_use(changes: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        quick(**changes)
