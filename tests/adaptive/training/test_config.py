"""Settings of the joint training, from files and changes to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparseflow.adaptive.training.config import GrpoConfig, read_config
from sparseflow.adaptive.training.grpo import Reward
from sparseflow.errors import FileFormatError, InputError


def test_what_comes_with_sparseflow_is_the_default() -> None:
    assert read_config("grpo") == GrpoConfig()


def test_a_file_and_changes_to_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("{steps: 7, budgets_ms: [3, 9.5], reward: {excess: 0.5}}")
    settings = read_config(path, {"prompts": 8, "reward.excess": 1})
    assert settings == GrpoConfig(steps=7, budgets_ms=(3.0, 9.5), prompts=8, reward=Reward(excess=1.0))


@pytest.mark.parametrize(
    ("changes", "expected_text"),
    [
        ({"stepz": 1}, ""),
        ({"reward.much": 1}, ""),
        ({"steps": "many"}, ""),
        ({"steps": 1.5}, ""),
        ({"rate": 0}, "`rate`"),
        ({"rate": float("nan")}, "`rate`"),
        ({"reward.excess": -1}, "`excess`"),
        ({"reward": 3}, ""),
        ({"budgets_ms": 3}, ""),
    ],
)
def test_settings_of_no_use(changes: dict[str, object], expected_text: str) -> None:
    with pytest.raises(InputError, match=expected_text or None):
        read_config("grpo", changes)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        read_config(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(FileFormatError):
        read_config(tmp_path / "list.yaml")
