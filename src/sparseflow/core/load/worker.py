"""One stressor process: works, idles, measures its share, corrects its duty and reports.

It reads commands as JSON lines from standard input: `{"command": 3, "level": 0.6}`, `{"command": 4, "hold":
true}`. It appends one JSON line per cycle to a report file: `time_s` (monotonic clock), `busy_s` (device time
used since the start), `level`, `duty`, `hold` and `command` (the last one in effect for the whole cycle). It
exits when standard input ends or the parent process dies, so that no load outlives its `Stressor`.

Control law, with the level r, the share y of the last cycle and the duty u, all in [0, 1]::

    e = r - y        I <- I + k_i e        u = clip(r + k_p e + I, 0, 1)

The share follows the duty within one cycle with a gain near 1, so u starts at r and the integral compensates
only the losses of a cycle. The integral is frozen while u is saturated (anti-windup).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from sparseflow.core.load.workloads import EXIT_NO_DEVICE, PERIOD_S, CpuWorkload, GpuWorkload, Workload
from sparseflow.errors import DeviceError

JITTER = 0.2
"""Relative variation of the cycle length, so that cycles do not synchronize with the measured work."""

K_P = 0.1
K_I = 0.2
MAX_CORRECTION = 0.5
"""Bound of the integral. A larger deviation means that the device is busy, which the caller must notice."""


class DutyController:
    """PI controller of the duty of one worker.

    Args:
        level: Requested share, in [0, 1].
    """

    def __init__(self, level: float) -> None:
        self.hold = False
        self.set_level(level)

    def set_level(self, level: float) -> None:
        """Set the requested share and reset the integral."""
        self.level = level
        self.duty = level
        self._integral = 0.0

    def update(self, share: float) -> None:
        """Correct the duty by the share of the last cycle, unless `hold` is set."""
        # Levels 0 and 1 are exact without correction.
        if self.hold or self.level in (0.0, 1.0):
            return
        error = self.level - share
        saturated = (self.duty >= 1.0 and error > 0.0) or (self.duty <= 0.0 and error < 0.0)
        if not saturated:
            self._integral = min(max(self._integral + K_I * error, -MAX_CORRECTION), MAX_CORRECTION)
        self.duty = min(max(self.level + K_P * error + self._integral, 0.0), 1.0)


class Worker:
    """Control loop of one stressor process.

    Args:
        workload: Work that keeps the device busy.
        level: Requested share, in [0, 1].
        report: Receives one report per cycle.
        seed: Seed of the cycle lengths.
    """

    def __init__(
        self,
        workload: Workload,
        level: float,
        report: Callable[[dict[str, Any]], None],
        seed: int,
    ) -> None:
        self._workload = workload
        self._controller = DutyController(level)
        self._report = report
        self._random = random.Random(seed)
        self._commands: list[dict[str, Any]] = []
        self._interrupt = threading.Event()
        self._command = 0
        self._time_s, self._busy_s = time.monotonic(), workload.busy_s()

    def send(self, command: dict[str, Any]) -> None:
        """Queue a command and interrupt the idle phase. Thread-safe."""
        self._commands.append(command)
        self._interrupt.set()

    def run_cycle(self) -> None:
        """Apply commands, work, idle, correct the duty and report."""
        self._interrupt.clear()
        while self._commands:
            self._apply(self._commands.pop(0))
        start_s = time.monotonic()
        period_s = PERIOD_S * self._random.uniform(1.0 - JITTER, 1.0 + JITTER)
        self._workload.run_until(start_s + self._controller.duty * period_s)
        idle_s = start_s + period_s - time.monotonic()
        interrupted = idle_s > 0.0 and self._interrupt.wait(idle_s)
        time_s, busy_s = time.monotonic(), self._workload.busy_s()
        # An interrupted cycle has a shorter idle phase than its duty requires.
        if not interrupted and time_s > self._time_s:
            self._controller.update((busy_s - self._busy_s) / (time_s - self._time_s))
        self._time_s, self._busy_s = time_s, busy_s
        self._report(
            {
                "time_s": round(time_s, 6),
                "busy_s": round(busy_s, 6),
                "level": self._controller.level,
                "duty": round(self._controller.duty, 4),
                "hold": self._controller.hold,
                "command": self._command,
            }
        )

    def _apply(self, command: dict[str, Any]) -> None:
        if "level" in command:
            self._controller.set_level(float(command["level"]))
        if "hold" in command:
            self._controller.hold = self._workload.shared = bool(command["hold"])
        self._command = int(command["command"])


def main(arguments: Sequence[str]) -> int:
    """Run cycles until standard input ends or the parent process dies."""
    parser = argparse.ArgumentParser(prog="python -m sparseflow.core.load.worker")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--level", type=float, required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(arguments)
    # A terminal interrupts all of its processes; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if args.cpu is not None:
            os.sched_setaffinity(0, {args.cpu})
        is_cpu = args.kind.startswith("cpu-")
        workload: Workload = CpuWorkload(args.kind) if is_cpu else GpuWorkload(args.kind, args.device)
    except (DeviceError, OSError, MemoryError, ImportError) as error:
        print(error, file=sys.stderr)
        return EXIT_NO_DEVICE
    with open(args.report, "a", encoding="ascii") as file:
        worker = Worker(workload, args.level, lambda row: _write(file, row), args.seed)
        threading.Thread(target=_read_commands, args=(worker,), daemon=True).start()
        while os.getppid() == args.parent:
            worker.run_cycle()
    return 0


def _read_commands(worker: Worker) -> None:
    for line in sys.stdin:
        worker.send(json.loads(line))
    # Standard input ends when the stressor closes or dies; exit without finishing the current step.
    os._exit(0)


def _write(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
