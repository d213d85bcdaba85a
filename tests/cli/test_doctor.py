"""`sparseflow doctor`, for a reader and for a script."""

from __future__ import annotations

import json

import pytest

from sparseflow.cli.root import run


def test_a_reader_gets_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    out, err = capsys.readouterr()
    for part in ("Devices", "Backends", "Extras", "cpu", "Triton", "spiking"):
        assert part in out
    assert err == ""


def test_a_script_gets_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"sparseflow", "python", "devices", "extras", "backends"}
    assert all(set(check) == {"name", "ok", "detail", "fix"} for check in found["extras"] + found["backends"])
