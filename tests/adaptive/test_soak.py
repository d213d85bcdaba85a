"""A short soak of the server with a scripted backend, in this process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.adaptive import soak
from tests.adaptive.serve.fake import MODEL, make_app, run_in_thread


def test_soak_records_hostile_and_mixed_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Times of a test machine say nothing, and neither does the memory of the process that runs the client.
    monkeypatch.setattr(soak, "MAX_P99_RATIO", 1e9)
    monkeypatch.setattr(soak, "MAX_MEMORY_RATIO", 1e9)
    monkeypatch.setattr(soak, "MAX_MORE_FILES", 10_000)
    monkeypatch.setattr(soak, "_SETTLE_S", 0.05)
    out = tmp_path / "soak.json"
    with run_in_thread(make_app()) as server:
        address = f"http://127.0.0.1:{server.port}"
        options = ["--url", address, "--pid", str(os.getpid()), "--model", MODEL, "--effort", "0.001"]
        assert soak.main([*options, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["missed"] == []
    outcomes = {part["name"]: part["outcomes"] for part in record["parts"]}
    assert len(outcomes) == 6
    assert outcomes["two messages of 4 MB"] == {"400": 2}
    assert outcomes["two messages of 30 MB"] == {"400": 2}
    assert outcomes["millions of values"] == {"400": 3}
    statuses = {status for part in record["mixed"] for status in part["statuses"]}
    assert statuses <= {"200", "400", "404", "disconnected"}
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["missed"] == []
