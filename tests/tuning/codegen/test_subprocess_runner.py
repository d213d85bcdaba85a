"""Execution of programs with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparseflow.tuning.codegen import subprocess_runner


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def removed(pid: int) -> bool:
    """Whether a process ends within some seconds."""
    for _ in range(500):
        if not alive(pid):
            return True
        time.sleep(0.01)
    return False


def ended_after(note: Path, command: list[str]) -> subprocess_runner.ProcessResult:
    """Run a program that is killed after it has written its note, however slow the machine is."""
    for timeout_s in (0.5, 5.0, 50.0):
        ended = subprocess_runner.run_process(command, timeout_s=timeout_s)
        if note.exists() and note.read_text().endswith("\n"):
            return ended
    raise AssertionError("it wrote nothing")


def test_run_returns_status_and_output() -> None:
    ended = subprocess_runner.run_process(
        ["sh", "-c", "cat; echo out; echo err >&2; exit 3"], timeout_s=20, stdin=b"in\n"
    )
    assert (ended.code, ended.timed_out, ended.signal_name) == (3, False, None)
    assert ended.output.split() == ["in", "out", "err"]


def test_run_signal_has_name() -> None:
    assert subprocess_runner.run_process(["sh", "-c", "kill -SEGV $$"], timeout_s=20).signal_name == "SIGSEGV"


def test_run_unknown_signal_has_number() -> None:
    assert subprocess_runner.ProcessResult(code=-200, timed_out=False, output="").signal_name == "signal 200"


def test_run_timeout_kills_process_group(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    ended = ended_after(note, ["sh", "-c", f"sleep 1000 & echo $! > {note}; wait"])
    assert ended.timed_out
    assert ended.signal_name == "SIGKILL"
    assert removed(int(note.read_text()))


def test_run_interrupt_kills_process_group(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    # `cat` ends when `run_process` has closed its input.
    script = f"cat; echo $$ > {note}.new; mv {note}.new {note}; sleep 1000"
    # Background processes ignore interrupts, and their children inherit this.
    code = (
        "import signal\nfrom sparseflow.tuning.codegen import subprocess_runner\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"subprocess_runner.run_process(['sh', '-c', {script!r}], timeout_s=900)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as parent:
        while not note.exists():
            assert parent.poll() is None
            time.sleep(0.01)
        parent.send_signal(signal.SIGINT)
    assert parent.returncode != 0
    assert removed(int(note.read_text()))


def test_run_escaped_process_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_runner, "GRACE_S", 0.05)
    note = tmp_path / "pid"
    ended = ended_after(note, ["sh", "-c", f"setsid sh -c 'echo $$ > {note}; exec sleep 1000' & wait"])
    try:
        assert ended.timed_out
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


def test_run_inherits_named_descriptors_only() -> None:
    named, other = os.memfd_create("named"), os.memfd_create("other")
    try:
        script = f"[ -e /dev/fd/{named} ] && [ ! -e /dev/fd/{other} ]"
        assert subprocess_runner.run_process(["sh", "-c", script], timeout_s=20, pass_fds=(named,)).code == 0
    finally:
        os.close(named)
        os.close(other)


def test_run_missing_program_raises() -> None:
    with pytest.raises(OSError):
        subprocess_runner.run_process(["/nowhere/at/all"], timeout_s=20)
