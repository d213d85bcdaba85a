"""Helpers that kill a process in the middle of its work.

The killed processes are forked from a new process that has imported all modules: test processes have threads
and cannot be forked safely.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sparseflow.core.progress import Progress

ROOT = Path(__file__).parents[1]


def environment(**more: str) -> dict[str, str]:
    """Environment of a process that imports the package and its tests from this checkout."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"} | more


def run_script(code: str, *arguments: str) -> None:
    """Run code in a new process and assert that it succeeds."""
    completed = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr


def killed_when(run: Callable[[Progress], object], condition: Callable[[str, float], bool]) -> None:
    """Run in a forked process that kills itself when its progress meets `condition`."""
    child = os.fork()
    if not child:

        def progress(message: str, fraction: float) -> None:
            if condition(message, fraction):
                os.kill(os.getpid(), signal.SIGKILL)

        run(progress)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


def wait_for_child(child: int, timeout_s: float) -> int | None:
    """Return the exit code of a forked process; None if it was killed after the time limit."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None
