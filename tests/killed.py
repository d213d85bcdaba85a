"""Work that SIGKILL ends in the middle, in processes forked from one that has imported all that they need.

The process that imports is a new one: tests run in processes with threads, which cannot be forked safely.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]

Progress = Callable[[str, float], None]
"""Told what is being done and the share of the work that is over."""


def environment(**more: str) -> dict[str, str]:
    """That of a process which imports the package and its tests from here."""
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"} | more


def run_script(code: str, *arguments: str) -> None:
    """Run code in a process of its own; what goes wrong in it is told."""
    told = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr


def killed_when(run: Callable[[Progress], object], there: Callable[[str, float], bool]) -> None:
    """Run in a forked process that kills itself as soon as its progress is `there`."""
    child = os.fork()
    if not child:

        def progress(what: str, share: float) -> None:
            if there(what, share):
                os.kill(os.getpid(), signal.SIGKILL)

        run(progress)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
