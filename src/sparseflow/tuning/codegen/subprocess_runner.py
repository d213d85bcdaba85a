"""Running a program so that neither it nor what it started outlives its time."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

GRACE_S = 1.0
"""Seconds in which what was killed is to close what it had open."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended.

    Attributes:
        code: Its exit status, or minus the number of the signal that ended it.
        overdue: It was killed because its time was up.
        output: What it wrote to stdout and stderr.
    """

    code: int
    overdue: bool
    output: str

    @property
    def signal_name(self) -> str | None:
        """Such as `"SIGSEGV"` where a signal ended it, else None."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


def run(
    command: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Ended:
    """Run a program to its end, or kill it and all of its process group after `timeout_s` seconds.

    Args:
        command: The program and its arguments.
        timeout_s: Seconds that it may take.
        stdin: What it reads.
        environment: All of its environment; None is ours.
        pass_fds: File descriptors that it inherits, under the same numbers.

    Raises:
        OSError: The program cannot be started.
    """
    # The group lets one kill reach the compiler proper behind its driver. Waiting for the end of a pipe,
    # which `communicate` does, wakes at once; `wait` with a timeout would sleep up to 50 ms too long.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=pass_fds,
        process_group=0,
    ) as process:
        overdue = False
        try:
            output, _ = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            overdue = True
            _kill_group(process)
            try:
                output, _ = process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired as late:
                # Something left the group and still holds the pipe; what was read so far must do.
                output = late.output or b""
        except BaseException:
            _kill_group(process)
            raise
    return Ended(code=process.returncode, overdue=overdue, output=output.decode(errors="replace"))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
