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
    found = read_config(path, {"prompts": 8, "reward.excess": 1})
    assert found == GrpoConfig(steps=7, budgets_ms=(3.0, 9.5), prompts=8, reward=Reward(excess=1.0))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"stepz": 1}, "not known: stepz"),
        ({"reward.much": 1}, r"not known: reward\.much"),
        ({"steps": "many"}, "steps: Input should be a valid integer"),
        ({"steps": 1.5}, "steps: Input should be a valid integer"),
        ({"rate": 0}, r"`rate` \(=0\.0\) must be above 0"),
        ({"rate": float("nan")}, r"`rate` \(=nan\) must be above 0"),
        ({"reward.excess": -1}, r"`excess` \(=-1\.0\) must be 0 or more"),
        ({"reward": 3}, "reward: Input should be a dictionary"),
        ({"budgets_ms": 3}, "budgets_ms: Input should be a valid tuple"),
    ],
)
def test_settings_of_no_use(changes: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told):
        read_config("grpo", changes)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*; these come with SparseFlow: grpo"):
        read_config(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(FileFormatError, match="must hold settings by name"):
        read_config(tmp_path / "list.yaml")
