"""`sparseflow doctor`: text output, JSON output and exit codes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sparseflow.cli.root import run
from sparseflow.core.device import doctor


def test_doctor_text_shows_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"]) == 0
    out, err = capsys.readouterr()
    for part in ("Devices", "Backends", "Extras", "cpu", "Triton", "spiking"):
        assert part in out
    assert err == ""


def test_doctor_shows_the_whole_command_that_installs_an_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "get_version", lambda _: None)
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    for extra in doctor.EXTRAS:
        assert f"pip install 'sparseflow[{extra}]'" in out


def test_doctor_json_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"sparseflow", "python", "devices", "extras", "backends"}
    assert all(
        set(check) == {"name", "ok", "detail", "fix"} for check in result["extras"] + result["backends"]
    )


def test_doctor_extra_exit_code_follows_installation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    diagnosis = doctor.diagnose()
    for ok, code in ((True, 0), (False, 1)):
        extras = tuple(replace(check, ok=ok) for check in diagnosis.extras)
        monkeypatch.setattr(doctor, "diagnose", lambda extras=extras: replace(diagnosis, extras=extras))
        assert run(["doctor", "--extra", "adaptive", "--json"]) == code
        assert "devices" in json.loads(capsys.readouterr().out)
    assert run(["doctor", "--extra", "nonsense"]) == 2
    assert "nonsense" in capsys.readouterr().err
