"""Progress without a terminal: log lines instead of a bar."""

from __future__ import annotations

import pytest

from sparseflow.cli import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    time_s = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: time_s[0])
    return time_s


def test_progress_without_terminal_logs_every_15_s(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.progress_bar() as report:
        for step in range(40):
            clock[0] = 100.0 + step
            report(f"step {step}", step / 40)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [" 38 %    15 s  step 15", " 75 %    30 s  step 30"]


def test_progress_on_a_terminal_shows_brackets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress.progress_bar() as report:
        report("model [/m] [red]x", 0.5)
    assert "model [/m] [red]x" in capsys.readouterr().err


def test_progress_short_work_logs_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar() as report:
        report("step", 0.5)
    assert capsys.readouterr().err == ""
