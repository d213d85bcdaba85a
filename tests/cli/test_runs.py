"""`sparseflow runs`: states of runs, and the removal of interrupted ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sparseflow.cli.root import run as run_command
from sparseflow.core.run import Run

KILLED = """
import os, signal, sys
from sparseflow.core.run import Run
run = Run.start(sys.argv[1], "sparseflow demo", {})
run.append({"a": 1})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with one run in each state."""
    directory = tmp_path / "[runs]"
    for command, error in (("finished", None), ("failed", "too hot [cpu]")):
        run = Run.start(directory, f"sparseflow {command}", {})
        run.finish() if error is None else run.fail(error)
    subprocess.run([sys.executable, "-c", KILLED, str(directory)], check=False)
    damaged = directory / "damaged"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    return directory


def _list(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert run_command(["runs", "list", str(root), "--json"]) == 0
    return {run["state"]: run["path"] for run in json.loads(capsys.readouterr().out)["runs"]}


def test_runs_list_shows_the_state_of_each_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    living = Run.start(root, "sparseflow bench", {})
    states = _list(root, capsys)
    assert set(states) == {"running", "finished", "failed", "interrupted", "damaged"}
    assert states["running"] == str(living.path)
    assert run_command(["runs", "list", str(root)]) == 0
    assert "too hot [cpu]" in capsys.readouterr().out
    living.finish()


def test_runs_clean_removes_interrupted_runs_only(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = _list(root, capsys)
    assert run_command(["runs", "clean", str(root)]) == 1, "standard input answers nothing"
    assert _list(root, capsys) == before
    assert run_command(["runs", "clean", str(root), "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [before.pop("interrupted")]}
    assert _list(root, capsys) == before


def test_runs_clean_keeps_a_renamed_directory(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted = Path(_list(root, capsys)["interrupted"])
    interrupted.rename(root / "renamed")
    assert run_command(["runs", "clean", str(root), "--yes"]) == 2
    assert "renamed" in capsys.readouterr().err and (root / "renamed").is_dir()


def test_runs_without_a_command_lists_the_directory_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["runs"]) == 2
    Run.start("runs", "sparseflow demo", {}).finish()
    assert run_command(["runs", "--json"]) == 0
    assert [run["state"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["finished"]
