"""Starts the processes of a background load, sends them commands and reads their reports."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from sparseflow.core.checks import check_between, check_one_of
from sparseflow.core.device.info import list_usable_cpus
from sparseflow.core.load.workloads import EXIT_NO_DEVICE, KINDS, PERIOD_S
from sparseflow.core.telemetry.host_reader import HostReader
from sparseflow.errors import DeviceError, InputError, RunError

TOLERANCE = 0.05
WINDOW_S = 1.0
"""Averaging window of a share: ten cycles."""

START_S = 120.0
"""Timeout of the start of a process: torch and CUDA take tens of seconds from a cold disk."""

logger = logging.getLogger(__name__)

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass
class _Process:
    """One stressor process with the cycles it has reported."""

    name: str
    handle: subprocess.Popen[bytes]
    report: BinaryIO
    errors: BinaryIO
    offset: int = 0
    times_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    commands: list[int] = field(default_factory=list)
    last_report: dict[str, Any] = field(default_factory=dict)


class Stressor:
    """A background load; as a context manager it runs for the duration of the block.

    Args:
        kind: One of `KINDS`.
        level: Share of the device's time to use, in [0, 1]; see the package docstring about competing work.
        device: GPU of a GPU kind, as torch names it.
        cpus: CPU numbers of a CPU kind; one process is pinned to each. By default all that this process may
            use.
        workers: Number of these CPUs to use; all by default.
        seed: Seed of the cycle lengths.

    Raises:
        InputError: An argument is out of range.
    """

    def __init__(
        self,
        kind: str,
        level: float,
        *,
        device: str = "cuda",
        cpus: Collection[int] | None = None,
        workers: int | None = None,
        seed: int = 0,
    ) -> None:
        check_one_of(KINDS, kind=kind)
        check_between(0.0, 1.0, level=level)
        self.kind = kind
        self.level = float(level)
        self.device = "cpu" if kind.startswith("cpu-") else device
        self.cpus = _select_cpus(cpus, workers) if self.device == "cpu" else ()
        self._seed = seed
        self._processes: list[_Process] = []
        self._command = 0

    def __enter__(self) -> Stressor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and wait until each has finished its first cycle.

        Raises:
            DeviceError: A GPU or a CPU does not exist.
            RunError: A process exited or did not start in time.
        """
        if self._processes:
            return
        # The folder is deleted once every process has opened its file, so a later kill leaves nothing behind.
        folder = Path(tempfile.mkdtemp(prefix="sparseflow-load-"))
        try:
            targets = [("--cpu", str(cpu)) for cpu in self.cpus] or [("--device", self.device)]
            for index, target in enumerate(targets):
                self._processes.append(self._spawn(index, target, folder))
            end_s = time.monotonic() + START_S
            while not all(process.times_s for process in self._processes):
                self._poll()
                if time.monotonic() > end_s:
                    raise RunError(f"the load `{self.kind}` did not start within {START_S:.0f} s")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Stop the processes. Closing twice has no effect."""
        for process in self._processes:
            if process.handle.stdin is not None:
                # The pipe of a process that has exited may still contain commands.
                with suppress(BrokenPipeError):
                    process.handle.stdin.close()
        for process in self._processes:
            try:
                process.handle.wait(2.0)
            except subprocess.TimeoutExpired:
                process.handle.kill()
                process.handle.wait()
            process.report.close()
            process.errors.close()
        self._processes = []

    def set_level(self, level: float) -> None:
        """Request another level, with the control loop closed.

        Raises:
            InputError: The level is not in [0, 1].
            RunError: A process has exited.
        """
        check_between(0.0, 1.0, level=level)
        self.level = float(level)
        self._send(level=self.level, hold=False)

    def hold(self) -> None:
        """Freeze the duty, so that competing work does not increase it."""
        self._send(hold=True)

    def release(self) -> None:
        """Close the control loop again."""
        self._send(hold=False)

    @contextmanager
    def hold_duty(self) -> Iterator[None]:
        """Freeze the duty while the block runs; measure inside it."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def reach_load(self, level: float, timeout_s: float = 20.0) -> float:
        """Bring the load of the device to `level`; return the share of the stressor over the last second.

        On CPUs other work is a part of the load: the stressor adds what is missing, and nothing where other
        work uses `level` or more. On a GPU, whose time is not measured by process, the stressor alone uses
        `level`. A level that is not reached in time is logged, and the load stays as it is.

        Args:
            level: Share of the device's time, in [0, 1]. The calling process does not count.
            timeout_s: Timeout, seconds.

        Raises:
            InputError: The level is not in [0, 1].
            DeviceError: The load of a CPU cannot be read.
            RunError: A process has exited.
        """
        check_between(0.0, 1.0, level=level)
        if not self.cpus:
            self.set_level(level)
            steady, shares = self._wait_until_steady(timeout_s)
            if not steady:
                logger.warning("%s", self._describe_timeout(shares, timeout_s))
            return self.measure_share()
        reader = HostReader(self.cpus, metrics=("others",))
        end_s = time.monotonic() + timeout_s
        while True:
            start_s = time.monotonic()
            total = reader.read(WINDOW_S)["others"]
            share = self.measure_share_between(start_s, time.monotonic())
            if abs(total - level) <= TOLERANCE or (total > level and self.level == 0.0):
                return share
            if time.monotonic() > end_s:
                logger.warning(
                    "the load is %.2f instead of %.2f, and %.2f of it is other work; it is recorded as it is",
                    total,
                    level,
                    max(total - share, 0.0),
                )
                return share
            self.set_level(min(max(level - max(total - share, 0.0), 0.0), 1.0))

    def wait_until_steady(self, timeout_s: float = 20.0) -> float:
        """Wait until the share of every process equals the level over a second; return the mean share.

        Args:
            timeout_s: Timeout, seconds.

        Raises:
            RunError: The level was not reached in time, or a process has exited.
        """
        steady, shares = self._wait_until_steady(timeout_s)
        if not steady:
            raise RunError(self._describe_timeout(shares, timeout_s))
        measured = [share for share in shares if share is not None]
        return sum(measured) / len(measured)

    def measure_share(self, window_s: float = WINDOW_S) -> float:
        """Return the mean share of the device over the last `window_s` seconds, in [0, 1].

        Raises:
            RunError: No cycle has finished yet, or a process has exited.
        """
        now_s = time.monotonic()
        return self.measure_share_between(now_s - window_s, now_s)

    def measure_share_between(self, start_s: float, end_s: float) -> float:
        """Return the mean share of the device between two times of `time.monotonic()`, in [0, 1].

        Cycles are reported at their end: a time between two reports is interpolated, and a time after the
        last report uses the last cycle.

        Raises:
            RunError: No cycle has finished yet, or a process has exited.
        """
        self._poll()
        shares = []
        for process in self._processes:
            if len(process.times_s) < 2:
                raise RunError(f"the load `{self.kind}` has not finished a cycle yet; try again later")
            last_s = min(max(end_s, process.times_s[1]), process.times_s[-1])
            # At least one full cycle, because within a cycle the share is 1 and then 0.
            first_s = min(max(start_s, process.times_s[0]), last_s - PERIOD_S)
            first_s = max(first_s, process.times_s[0])
            busy_s = _interpolate_busy_s(process, last_s) - _interpolate_busy_s(process, first_s)
            shares.append(min(max(busy_s / (last_s - first_s), 0.0), 1.0))
        if not shares:
            raise RunError(f"the load `{self.kind}` is not running; start it first")
        return sum(shares) / len(shares)

    def worker_shares(self) -> list[float | None]:
        """Return the share of each process over the last second; None if its command is more recent.

        Raises:
            RunError: A process has exited.
        """
        self._poll()
        if not self._processes:
            raise RunError(f"the load `{self.kind}` is not running; start it first")
        return [_compute_share_since(process, self._command) for process in self._processes]

    def mean_duty(self) -> float:
        """Return the mean share of time in which the processes work, as last reported."""
        self._poll()
        return sum(process.last_report["duty"] for process in self._processes) / len(self._processes)

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the running processes."""
        return tuple(process.handle.pid for process in self._processes)

    def _wait_until_steady(self, timeout_s: float) -> tuple[bool, list[float | None]]:
        """Return whether the share of every process equals the level before the timeout, and the shares."""
        end_s = time.monotonic() + timeout_s
        while True:
            shares = self.worker_shares()
            if all(share is not None and abs(share - self.level) <= TOLERANCE for share in shares):
                return True, shares
            if time.monotonic() > end_s:
                return False, shares
            time.sleep(PERIOD_S / 2.0)

    def _spawn(self, index: int, target: tuple[str, str], folder: Path) -> _Process:
        report_file, error_file = folder / f"{index}.jsonl", folder / f"{index}.txt"
        command = [
            sys.executable, "-m", "sparseflow.core.load.worker", "--kind", self.kind,
            "--level", repr(self.level), "--report", str(report_file),
            "--parent", str(os.getpid()), "--seed", str(self._seed + index), *target,
        ]  # fmt: skip
        report, errors = report_file.open("x+b"), error_file.open("x+b")
        handle = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, **_ONE_THREAD},
        )
        name = f"CPU {target[1]}" if target[0] == "--cpu" else target[1]
        return _Process(name=name, handle=handle, report=report, errors=errors)

    def _send(self, **fields: Any) -> None:
        self._poll()
        self._command += 1
        line = json.dumps({"command": self._command, **fields}).encode() + b"\n"
        for process in self._processes:
            assert process.handle.stdin is not None
            try:
                process.handle.stdin.write(line)
                process.handle.stdin.flush()
            except OSError:
                process.handle.wait(5.0)
                self._poll()

    def _poll(self) -> None:
        """Read new reports and raise if a process has exited."""
        for process in self._processes:
            code = process.handle.poll()
            if code is not None:
                process.errors.seek(0)
                lines = process.errors.read().decode(errors="replace").strip().splitlines()
                reason = lines[-1] if lines else f"exit code {code}"
                if code == EXIT_NO_DEVICE:
                    raise DeviceError(f"the load `{self.kind}` cannot run on {process.name}: {reason}")
                raise RunError(f"the load `{self.kind}` on {process.name} exited: {reason}")
            _read_reports(process)

    def _describe_timeout(self, shares: list[float | None], timeout_s: float) -> str:
        achieved = ", ".join(
            f"{process.name} {'not measured' if share is None else format(share, '.2f')}"
            for process, share in zip(self._processes, shares, strict=True)
        )
        return (
            f"the load `{self.kind}` did not reach level {self.level:.2f} within {timeout_s:g} s: {achieved}"
            f"; other work uses the device, or it is too slow for cycles of {1e3 * PERIOD_S:.0f} ms: "
            "stop the other work, or request a lower level"
        )


def _select_cpus(cpus: Collection[int] | None, workers: int | None) -> tuple[int, ...]:
    selected = tuple(sorted(list_usable_cpus() if cpus is None else set(cpus)))
    if not selected:
        raise InputError("`cpus` must contain at least one CPU")
    if workers is None:
        return selected
    if not 1 <= workers <= len(selected):
        raise InputError(f"`workers` (={workers}) must be between 1 and {len(selected)}, one for each CPU")
    return selected[:workers]


def _read_reports(process: _Process) -> None:
    process.report.seek(process.offset)
    content = process.report.read()
    complete = content[: content.rfind(b"\n") + 1]
    process.offset += len(complete)
    for line in complete.splitlines():
        row = json.loads(line)
        process.times_s.append(row["time_s"])
        process.busy_s.append(row["busy_s"])
        process.commands.append(row["command"])
        process.last_report = row


def _compute_share_since(process: _Process, command: int) -> float | None:
    """Compute the share over the last second of cycles under `command`; None if there are fewer."""
    first = bisect_left(process.commands, command)
    if first >= len(process.times_s):
        return None
    start_s = max(process.times_s[first], process.times_s[-1] - WINDOW_S)
    if start_s > process.times_s[-1] - 0.9 * WINDOW_S:
        return None
    busy_s = process.busy_s[-1] - _interpolate_busy_s(process, start_s)
    return busy_s / (process.times_s[-1] - start_s)


def _interpolate_busy_s(process: _Process, time_s: float) -> float:
    index = min(max(bisect_left(process.times_s, time_s), 1), len(process.times_s) - 1)
    t0, t1 = process.times_s[index - 1], process.times_s[index]
    b0, b1 = process.busy_s[index - 1], process.busy_s[index]
    return b0 + (b1 - b0) * (time_s - t0) / (t1 - t0)
