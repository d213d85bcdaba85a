"""One process of a stressor: works and rests, measures what it got, corrects its duty and reports.

It takes orders as JSON lines on standard input: `{"order": 3, "level": 0.6}`, `{"order": 4, "held": true}`.
It reports to a file of JSON lines, one a cycle: `at_s` (monotonic clock), `got_s` (of its device, since the
start), `level`, `duty`, `held` and `order` (the last one obeyed during the whole cycle). It ends when its
standard input does or its parent is gone, so that no load outlives whoever asked for it.
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

from sparseflow.core.load.control import DutyController
from sparseflow.core.load.workloads import CpuWorkload, GpuWorkload, Workload
from sparseflow.errors import DeviceError

EXIT_NO_DEVICE = 3
JITTER = 0.2
"""Cycles differ by up to this share: work that is measured must not lock its own rhythm into theirs."""


class Worker:
    """The loop of one process.

    Args:
        work: What keeps the device busy.
        level: Share asked for, in [0, 1].
        period_s: Mean length of a cycle.
        report: Takes one report a cycle.
        seed: What the lengths of cycles are drawn from.
    """

    def __init__(
        self,
        work: Workload,
        level: float,
        period_s: float,
        report: Callable[[dict[str, Any]], None],
        seed: int,
    ) -> None:
        self._work = work
        self._control = DutyController(level)
        self._period_s = period_s
        self._report = report
        self._random = random.Random(seed)
        self._orders: list[dict[str, Any]] = []
        self._ordered = threading.Event()
        self._order = 0
        self._at_s, self._got_s = time.monotonic(), work.got_s()

    def order(self, what: dict[str, Any]) -> None:
        """Leave an order; it cuts a rest short. May be called from another thread."""
        self._orders.append(what)
        self._ordered.set()

    def cycle(self) -> None:
        """Obey orders, work, rest, correct, report."""
        self._ordered.clear()
        while self._orders:
            self._obey(self._orders.pop(0))
        begin = time.monotonic()
        period_s = self._period_s * self._random.uniform(1.0 - JITTER, 1.0 + JITTER)
        self._work.burn(begin + self._control.duty * period_s)
        rest_s = begin + period_s - time.monotonic()
        cut = rest_s > 0.0 and self._ordered.wait(rest_s)
        at_s, got_s = time.monotonic(), self._work.got_s()
        # A rest that an order cut short says nothing about the duty.
        if not cut and at_s > self._at_s:
            self._control.update((got_s - self._got_s) / (at_s - self._at_s))
        self._at_s, self._got_s = at_s, got_s
        self._report(
            {
                "at_s": round(at_s, 6),
                "got_s": round(got_s, 6),
                "level": self._control.level,
                "duty": round(self._control.duty, 4),
                "held": self._control.held,
                "order": self._order,
            }
        )

    def _obey(self, what: dict[str, Any]) -> None:
        if "level" in what:
            self._control.set_level(float(what["level"]))
        if "held" in what:
            self._control.held = self._work.held = bool(what["held"])
        self._order = int(what["order"])


def main(arguments: Sequence[str]) -> int:
    """Run until standard input ends or the parent is gone."""
    parser = argparse.ArgumentParser(prog="python -m sparseflow.core.load")
    parser.add_argument("--kind", required=True)
    parser.add_argument("--level", type=float, required=True)
    parser.add_argument("--period", type=float, required=True)
    parser.add_argument("--report", required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", type=int)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    # The interrupt of a terminal reaches every process of it; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if given.cpu is not None:
            os.sched_setaffinity(0, {given.cpu})
        is_cpu = given.kind.startswith("cpu-")
        work: Workload = CpuWorkload(given.kind) if is_cpu else GpuWorkload(given.kind, given.device)
    except (DeviceError, OSError, MemoryError, ImportError) as error:
        print(error, file=sys.stderr)
        return EXIT_NO_DEVICE
    with open(given.report, "a", encoding="ascii") as file:
        worker = Worker(work, given.level, given.period, lambda row: _write(file, row), given.seed)
        threading.Thread(target=_listen, args=(worker,), daemon=True).start()
        while os.getppid() == given.parent:
            worker.cycle()
    return 0


def _listen(worker: Worker) -> None:
    for line in sys.stdin:
        worker.order(json.loads(line))
    # Whoever held the other end is gone or wants no more load; a step in progress is not worth waiting for.
    os._exit(0)


def _write(file: TextIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row) + "\n")
    file.flush()
