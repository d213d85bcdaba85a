"""Settings of the controller training: files and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseflow.adaptive.training.config import GrpoConfig, read_config
from sparseflow.adaptive.training.grpo import Reward
from sparseflow.errors import FileFormatError, InputError


def test_read_config_of_shipped_file_gives_defaults() -> None:
    assert read_config("grpo") == GrpoConfig()


def test_read_config_with_overrides_replaces_values(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{steps: 7, budgets_ms: [3, 9.5], reward: {excess: 0.5}}")
    settings = read_config(path, {"prompts": 8, "reward.excess": 1})
    assert settings == GrpoConfig(steps=7, budgets_ms=(3.0, 9.5), prompts=8, reward=Reward(excess=1.0))


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"stepz": 1}, ""),
        ({"reward.much": 1}, ""),
        ({"steps": "many"}, ""),
        ({"steps": 1.5}, ""),
        ({"rate": 0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"reward.excess": -1}, "excess"),
        ({"reward": 3}, ""),
        ({"budgets_ms": 3}, ""),
    ],
)
def test_read_config_with_invalid_override_raises(overrides: dict[str, object], match: str) -> None:
    with pytest.raises(InputError, match=match or None):
        read_config("grpo", overrides)


def test_read_config_of_invalid_file_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_config(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(FileFormatError):
        read_config(tmp_path / "list.yaml")
