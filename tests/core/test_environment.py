"""Environment of a measurement."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from sparseflow.core import environment as module
from sparseflow.core.device import describe_device
from sparseflow.core.environment import collect_environment, get_git_revision


def test_collect_environment_gives_complete_json() -> None:
    environment = collect_environment("cpu", seed=11)
    assert json.loads(json.dumps(environment, allow_nan=False)) == environment
    assert environment["seed"] == 11 and environment["timer"] == "perf_counter"
    assert len(environment["load_average"]) == 3
    assert environment["device"]["versions"]["torch"] == torch.__version__
    assert environment["device_key"] == describe_device("cpu").key()


def test_get_git_revision_outside_a_checkout_is_none(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.touch()
    assert get_git_revision(file) is None


def test_get_git_revision_marks_modified_files(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        process = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return process.stdout.strip()

    tracked, other = tmp_path / "tracked.py", tmp_path / "other.py"
    tracked.write_text("1")
    git("init", "--quiet")
    git("add", "tracked.py")
    git("commit", "--quiet", "-m", "x")
    revision = git("rev-parse", "--short=12", "HEAD")
    other.write_text("2")
    assert get_git_revision(tracked) == revision
    assert get_git_revision(other) is None, "an untracked file is no part of the revision"
    tracked.write_text("3")
    assert get_git_revision(tracked) == revision + "+"


def test_get_git_revision_without_git_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(module.subprocess, "run", fail)
    assert get_git_revision() is None


@pytest.mark.gpu
def test_collect_environment_of_a_gpu_describes_timer_and_host() -> None:
    environment = collect_environment("cuda")
    assert environment["timer"] == "cuda_event" and environment["device"]["kind"] == "cuda"
    assert environment["host"]["cores"] >= 1
