"""Progress where nobody watches: lines in a log in place of a bar."""

from __future__ import annotations

import pytest

from sparseflow.cli import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_file_gets_a_line_now_and_then(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar() as report:
        for step in range(40):
            clock[0] = 100.0 + step
            report(f"step {step}", step / 40)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [" 38 %    15 s  step 15", " 75 %    30 s  step 30"]


def test_short_work_says_nothing(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bar() as report:
        report("all of it", 0.5)
    assert capsys.readouterr().err == ""
