"""A short fixed effort of the kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.killed import ROOT, environment


def test_killed_collection_gives_the_result_of_an_uninterrupted_one(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    command = [
        sys.executable,
        "-m",
        "tests.harness.kill",
        "--job",
        "tuning-collect",
        "--kills",
        "2",
        "--out",
        str(tmp_path),
    ]
    process = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout + process.stderr
    tally = json.loads((tmp_path / "tally.json").read_text())["jobs"]["tuning-collect"]
    assert tally["kills"] == 2 and tally["finished"] >= 1 and tally["problems"] == []
