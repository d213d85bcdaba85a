"""The circumstances of a measurement."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from sparseflow.core import environment as module
from sparseflow.core.device import describe_device
from sparseflow.core.environment import collect_environment, get_git_revision


def test_the_environment_is_plain_json_and_complete() -> None:
    found = collect_environment("cpu", seed=11)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["seed"] == 11 and found["timer"] == "perf_counter"
    assert len(found["load_average"]) == 3
    assert found["device"]["versions"]["torch"] == torch.__version__
    assert found["device_key"] == describe_device("cpu").key()


def test_a_file_outside_a_checkout_has_no_revision(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.touch()
    assert get_git_revision(file) is None


def test_a_revision_says_when_files_differ_from_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

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


def test_without_git_there_is_no_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(module.subprocess, "run", absent)
    assert get_git_revision() is None


@pytest.mark.gpu
def test_a_gpu_is_timed_by_events_and_its_host_is_told_too() -> None:
    found = collect_environment("cuda")
    assert found["timer"] == "cuda_event" and found["device"]["kind"] == "cuda"
    assert found["host"]["cores"] >= 1
