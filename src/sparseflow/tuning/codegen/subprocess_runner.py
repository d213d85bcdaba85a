"""Execution of a program with a time limit for all of its process group."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

GRACE_S = 1.0
"""Time for a killed process to close its pipes, seconds."""


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """Exit state of a process.

    Attributes:
        code: Exit status, or the negated number of the signal that ended the process.
        timed_out: Whether the process was killed because of the time limit.
        output: stdout and stderr.
    """

    code: int
    timed_out: bool
    output: str

    @property
    def signal_name(self) -> str | None:
        """Name of the signal that ended the process, such as `"SIGSEGV"`, or None."""
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


def run_process(
    command: Sequence[str],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> ProcessResult:
    """Run a program, and kill its process group after `timeout_s` seconds.

    Args:
        command: Program and arguments.
        timeout_s: Time limit, seconds.
        stdin: Standard input.
        environment: Full environment; None inherits the environment of this process.
        pass_fds: Inherited file descriptors.

    Raises:
        OSError: The program cannot be started.
    """
    # Killing the process group also kills the compiler behind its driver. `communicate` waits for the end of
    # a pipe and returns immediately; `wait` with a timeout would sleep up to 50 ms too long.
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        pass_fds=pass_fds,
        process_group=0,
    ) as process:
        timed_out = False
        try:
            output, _ = process.communicate(stdin, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            _kill_group(process)
            try:
                output, _ = process.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired as expired:
                # A process outside the group keeps the pipe open; use the output so far.
                output = expired.output or b""
        except BaseException:
            _kill_group(process)
            raise
    return ProcessResult(code=process.returncode, timed_out=timed_out, output=output.decode(errors="replace"))


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
