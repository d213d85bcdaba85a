"""The parent's side of a background load: starts its processes, gives orders, reads what they achieved."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from sparseflow.errors import DeviceError, InputError, RunError

KINDS: Mapping[str, str] = {
    "cpu-fma": "matrix products that stay in the cache, on each CPU",
    "cpu-stream": "copies that no cache holds, on each CPU",
    "gpu-matmul": "fp16 matrix products of 4096 x 4096",
    "gpu-copy": "copies within the GPU's memory",
}
"""Kind of load -> what it does."""

PERIOD_S = 0.1
TOLERANCE = 0.05
WINDOW_S = 1.0
"""What a share is averaged over: ten cycles."""

START_S = 120.0
"""Longest wait for a process to begin: torch and CUDA on a cold disk take tens of seconds."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_EXIT_NO_DEVICE = 3


@dataclass
class _Process:
    what: str
    handle: subprocess.Popen[bytes]
    report: BinaryIO
    errors: BinaryIO
    read: int = 0
    at_s: list[float] = field(default_factory=list)
    got_s: list[float] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)


class Stressor:
    """A background load. As a context manager it starts with the block and is gone after it.

    Args:
        kind: One of `KINDS`.
        level: Share of the device's time to use, in [0, 1]; see the package for what it means beside other
            work.
        device: The GPU of a GPU kind, as torch names it.
        cpus: Numbers of the CPUs of a CPU kind: one process is pinned to each. By default those that this
            process may run on.
        workers: Use only this many of them.
        period_s: Mean length of a cycle of work and rest, seconds.
        seed: What the lengths of cycles are drawn from.

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
        period_s: float = PERIOD_S,
        seed: int = 0,
    ) -> None:
        if kind not in KINDS:
            raise InputError(f"`kind` (={kind!r}) must be one of: {', '.join(KINDS)}")
        if not (math.isfinite(period_s) and 0.01 <= period_s <= 10.0):
            raise InputError(f"`period_s` (={period_s}) must be between 0.01 and 10")
        self.kind = kind
        self.level = _checked(level)
        self.device = "cpu" if kind.startswith("cpu-") else device
        self.cpus = _chosen(cpus, workers) if self.device == "cpu" else ()
        self._period_s = period_s
        self._seed = seed
        self._processes: list[_Process] = []
        self._order = 0

    def __enter__(self) -> Stressor:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start the processes and wait until each has done its first cycle.

        Raises:
            DeviceError: A GPU or a CPU is not there.
            RunError: A process ended or did not begin.
        """
        if self._processes:
            return
        # Only until every process has opened its file: then no kill can leave the folder behind.
        folder = Path(tempfile.mkdtemp(prefix="sparseflow-load-"))
        try:
            places = [("--cpu", str(cpu)) for cpu in self.cpus] or [("--device", self.device)]
            for index, place in enumerate(places):
                self._processes.append(self._spawn(index, place, folder))
            end = time.monotonic() + START_S
            while not all(process.at_s for process in self._processes):
                self._look()
                if time.monotonic() > end:
                    raise RunError(f"the load `{self.kind}` did not begin within {START_S:.0f} s")
                time.sleep(0.02)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """End the processes. Closing twice changes nothing."""
        for process in self._processes:
            if process.handle.stdin is not None:
                # A process that is already gone left orders in the pipe's buffer that nobody takes.
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
        """Ask for another level from now on, with the loop closed.

        Raises:
            InputError: It is not in [0, 1].
            RunError: A process has ended.
        """
        self.level = _checked(level)
        self._tell(level=self.level, held=False)

    def hold(self) -> None:
        """Keep the duty as it is: what others take from the device shall not make the load ask for more."""
        self._tell(held=True)

    def release(self) -> None:
        """Close the loop again."""
        self._tell(held=False)

    @contextmanager
    def hold_duty(self) -> Iterator[None]:
        """Hold the duty while the block runs; measure in here."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def wait_until_steady(self, timeout_s: float = 20.0) -> float:
        """Wait until every process achieved its level over a second, and give their mean share.

        Args:
            timeout_s: Longest wait, seconds.

        Raises:
            RunError: The level was not reached in that time, or a process has ended.
        """
        end = time.monotonic() + timeout_s
        while True:
            shares = self.worker_shares()
            reached = [share for share in shares if share is not None]
            if len(reached) == len(shares) and all(abs(s - self.level) <= TOLERANCE for s in reached):
                return sum(reached) / len(reached)
            if time.monotonic() > end:
                raise RunError(self._missed(shares, timeout_s))
            time.sleep(self._period_s / 2.0)

    def measure_share(self, window_s: float = WINDOW_S) -> float:
        """Mean share of the device that the load got over the last `window_s` seconds, in [0, 1].

        Raises:
            RunError: The load has not run for a cycle yet, or a process has ended.
        """
        now = time.monotonic()
        return self.measure_share_between(now - window_s, now)

    def measure_share_between(self, begin_s: float, end_s: float) -> float:
        """Mean share of the device that the load got between two times of `time.monotonic()`, in [0, 1].

        Cycles are reported when they end, so a time between reports is interpolated, and of a time after the
        last report the last cycle is taken.

        Raises:
            RunError: The load has not run for a cycle yet, or a process has ended.
        """
        self._look()
        shares = []
        for process in self._processes:
            if len(process.at_s) < 2:
                raise RunError(
                    f"the load `{self.kind}` has not reported a whole cycle yet; wait for a moment"
                )
            last = min(max(end_s, process.at_s[1]), process.at_s[-1])
            # At least one whole cycle, since within a cycle the share is 1 and then 0.
            first = min(max(begin_s, process.at_s[0]), last - self._period_s)
            first = max(first, process.at_s[0])
            got = _at(process, last) - _at(process, first)
            shares.append(min(max(got / (last - first), 0.0), 1.0))
        if not shares:
            raise RunError(f"the load `{self.kind}` is not running; start it first")
        return sum(shares) / len(shares)

    def worker_shares(self) -> list[float | None]:
        """Share of each process over the last second of its present order; None where that is shorter.

        Raises:
            RunError: A process has ended.
        """
        self._look()
        if not self._processes:
            raise RunError(f"the load `{self.kind}` is not running; start it first")
        return [_share_under(process, self._order) for process in self._processes]

    def mean_duty(self) -> float:
        """Mean share of time in which the processes work, as they last reported it."""
        self._look()
        return sum(process.last["duty"] for process in self._processes) / len(self._processes)

    @property
    def pids(self) -> tuple[int, ...]:
        """Ids of the processes that run."""
        return tuple(process.handle.pid for process in self._processes)

    def _spawn(self, index: int, place: tuple[str, str], folder: Path) -> _Process:
        report, errors = folder / f"{index}.jsonl", folder / f"{index}.txt"
        command = [
            sys.executable, "-m", "sparseflow.core.load", "--kind", self.kind, "--level", repr(self.level),
            "--period", repr(self._period_s), "--report", str(report), "--parent", str(os.getpid()),
            "--seed", str(self._seed + index), *place,
        ]  # fmt: skip
        told, said = report.open("x+b"), errors.open("x+b")
        handle = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, **_ONE_THREAD},
        )
        what = f"CPU {place[1]}" if place[0] == "--cpu" else place[1]
        return _Process(what=what, handle=handle, report=told, errors=said)

    def _tell(self, **what: Any) -> None:
        self._look()
        self._order += 1
        line = json.dumps({"order": self._order, **what}).encode() + b"\n"
        for process in self._processes:
            assert process.handle.stdin is not None
            try:
                process.handle.stdin.write(line)
                process.handle.stdin.flush()
            except OSError:
                process.handle.wait(5.0)
                self._look()

    def _look(self) -> None:
        for process in self._processes:
            code = process.handle.poll()
            if code is not None:
                process.errors.seek(0)
                said = process.errors.read().decode(errors="replace").strip().splitlines()
                why = said[-1] if said else f"it ended with code {code}"
                if code == _EXIT_NO_DEVICE:
                    raise DeviceError(f"the load `{self.kind}` cannot run on {process.what}: {why}")
                raise RunError(f"the load `{self.kind}` on {process.what} ended by itself: {why}")
            _read_reports(process)

    def _missed(self, shares: list[float | None], timeout_s: float) -> str:
        got = ", ".join(
            f"{process.what} {'not measured' if share is None else format(share, '.2f')}"
            for process, share in zip(self._processes, shares, strict=True)
        )
        return (
            f"the load `{self.kind}` was asked for a level of {self.level:.2f} and achieved, after "
            f"{timeout_s:g} s: {got}; something else uses the device, or it is too slow for cycles of "
            f"{1e3 * self._period_s:.0f} ms: stop what runs beside it, or ask for a lower level"
        )


def _checked(level: float) -> float:
    if isinstance(level, bool) or not (math.isfinite(level) and 0.0 <= level <= 1.0):
        raise InputError(
            f"`level` (={level}) of a load must be in [0, 1]: the share of the device's time to use"
        )
    return float(level)


def _chosen(cpus: Collection[int] | None, workers: int | None) -> tuple[int, ...]:
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    chosen = tuple(sorted(allowed if cpus is None else set(cpus)))
    if not chosen:
        raise InputError("`cpus` must hold at least one CPU")
    if workers is None:
        return chosen
    if not 1 <= workers <= len(chosen):
        raise InputError(f"`workers` (={workers}) must be between 1 and {len(chosen)}, one for each CPU")
    return chosen[:workers]


def _read_reports(process: _Process) -> None:
    process.report.seek(process.read)
    content = process.report.read()
    whole = content[: content.rfind(b"\n") + 1]
    process.read += len(whole)
    for line in whole.splitlines():
        row = json.loads(line)
        process.at_s.append(row["at_s"])
        process.got_s.append(row["got_s"])
        process.order.append(row["order"])
        process.last = row


def _share_under(process: _Process, order: int) -> float | None:
    """The share over the last second of cycles that wholly obeyed `order`."""
    first = bisect_left(process.order, order)
    if first >= len(process.at_s):
        return None
    begin = max(process.at_s[first], process.at_s[-1] - WINDOW_S)
    if begin > process.at_s[-1] - 0.9 * WINDOW_S:
        return None
    got = process.got_s[-1] - _at(process, begin)
    return got / (process.at_s[-1] - begin)


def _at(process: _Process, when: float) -> float:
    """Seconds of the device got until `when`, interpolated between reports."""
    index = min(max(bisect_left(process.at_s, when), 1), len(process.at_s) - 1)
    t0, t1 = process.at_s[index - 1], process.at_s[index]
    g0, g1 = process.got_s[index - 1], process.got_s[index]
    return g0 + (g1 - g0) * (when - t0) / (t1 - t0)
