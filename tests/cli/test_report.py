"""`sparseflow report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseflow.cli.root import run
from sparseflow.core.run import Run


def test_site_is_written_and_lists_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="stop"), Run.start(tmp_path / "runs", "sparseflow demo", {}):
        raise ValueError("stop here")
    arguments = ["report", "site", str(tmp_path / "runs"), "--out", str(tmp_path / "site")]
    assert run(arguments) == 0
    output = capsys.readouterr().out
    assert "stop here" in output and str(tmp_path / "site" / "index.html") in output
    assert run([*arguments, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["runs"] == 1 and len(record["problems"]) == 1


def test_site_without_directory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "site", str(tmp_path / "no"), "--out", str(tmp_path / "site")]) == 2
    assert "not a directory" in capsys.readouterr().err
