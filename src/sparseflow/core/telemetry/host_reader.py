"""The load of this host's CPUs, from two readings of /proc and what the counters moved by in between.

Notation: n CPUs may be used, Δ is what a counter moved by over the window of T seconds. ::

    busy      = Δbusy / Δtotal, over these CPUs together       active = the same of the busiest one
    others    = busy - Δ(CPU time of this process) / (n T)     steal  = Δstolen / Δtotal
    queue     = max(0, r - N) / r, averaged                    r runnable tasks, N CPUs of the machine
    switching = Δswitches · 10 µs / (N T)                      pressures: Δ(stalled time) / T

`queue` and `switching` are the whole machine's: /proc does not tell them by CPU. In a container /proc/stat
shows the machine below it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sparseflow.core.telemetry import procfs
from sparseflow.core.telemetry.schema import (
    METRICS,
    LoadReading,
    check_metrics,
    check_recording_length,
    check_window,
)
from sparseflow.errors import DeviceError, InputError

SWITCH_COST_S = 10e-6
"""What one context switch costs with the caches that it empties; it only sets the scale of `switching`."""

QUEUE_EVERY_S = 0.05
ALWAYS = ("busy", "active", "others", "steal", "queue", "switching", "memory_used")
PRESSURE_OF = {f"{resource}_pressure": resource for resource in procfs.PSI_RESOURCES}


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    at_s: float
    own_s: float
    activity: procfs.CpuStat
    stalled_s: dict[str, float]


class HostReader:
    """Reads the CPUs that this process may use. A `LoadReader`.

    Pressure is among `metrics` where the kernel keeps it, which it was asked about here and now.

    Args:
        cpus: Numbers of the CPUs to read; by default those that this process may run on.
        metrics: What to read, among `METRICS`; by default all that this kernel tells.
        proc: Where /proc is mounted.

    Raises:
        InputError: An unknown metric, or no CPU.
        DeviceError: A metric that was asked for, or a CPU, is not there.
    """

    name = "host"
    device = "cpu"

    def __init__(
        self,
        cpus: Collection[int] | None = None,
        *,
        metrics: Collection[str] | None = None,
        proc: Path = procfs.PROC,
    ) -> None:
        self.cpus = tuple(sorted(_usable() if cpus is None else set(cpus)))
        if not self.cpus:
            raise InputError("`cpus` must hold at least one CPU")
        self._proc = proc
        told = ALWAYS + tuple(name for name, what in PRESSURE_OF.items() if _tells(what, proc))
        asked = told if metrics is None else tuple(metrics)
        check_metrics(asked)
        for name in asked:
            if name in PRESSURE_OF and name not in told:
                procfs.read_stall_s(PRESSURE_OF[name], proc=proc)  # says what is wrong with the file
            if name not in told:
                raise DeviceError(f"`{name}` is not told by a host, which tells: {', '.join(told)}")
        if not asked:
            raise InputError("`metrics` must name at least one")
        self.metrics = tuple(name for name in METRICS if name in asked)
        self._snapshot()

    def read(self, window_s: float = 1.0) -> LoadReading:
        """Watch for `window_s` seconds. Raises as `LoadReader.read` says."""
        check_window(window_s)
        watch = self.start()
        end = time.monotonic() + window_s
        while (left := end - time.monotonic()) > 0.0:
            time.sleep(min(left, QUEUE_EVERY_S))
            watch.look()
        return watch.stop()

    def start(self) -> HostRecording:
        """Begin to watch. Raises DeviceError where something cannot be read."""
        return HostRecording(self, self._snapshot())

    def _snapshot(self) -> _Snapshot:
        activity = procfs.read_cpu_stat(proc=self._proc)
        if lacking := [cpu for cpu in self.cpus if cpu not in activity.cores]:
            raise DeviceError(f"{self._proc}/stat tells nothing about CPU {lacking[0]}; is it offline?")
        wanted = [what for name, what in PRESSURE_OF.items() if name in self.metrics]
        return _Snapshot(
            at_s=time.monotonic(),
            own_s=time.process_time(),
            activity=activity,
            stalled_s={what: procfs.read_stall_s(what, proc=self._proc) for what in wanted},
        )


class HostRecording:
    """A reading of the host that has begun; made by `HostReader.start`."""

    def __init__(self, reader: HostReader, before: _Snapshot) -> None:
        self._reader = reader
        self._before = before
        self._waiting = [_waiting(before.activity)]

    def look(self) -> None:
        """Count the runnable tasks once more: there is no counter of them, so `queue` is a mean of looks."""
        self._waiting.append(_waiting(procfs.read_cpu_stat(proc=self._reader._proc)))

    def stop(self) -> LoadReading:
        """The load since the start. Raises as `Watch.stop` says."""
        before, after = self._before, self._reader._snapshot()
        seconds = after.at_s - before.at_s
        check_recording_length(seconds)
        self._waiting.append(_waiting(after.activity))
        cpus = self._reader.cpus
        first = [before.activity.cores[cpu] for cpu in cpus]
        last = [after.activity.cores[cpu] for cpu in cpus]
        whole = procfs.sum_ticks(first), procfs.sum_ticks(last)
        busy = procfs.compute_utilization(*whole)
        own = (after.own_s - before.own_s) / (len(cpus) * seconds)
        switches = after.activity.switches - before.activity.switches
        stolen = whole[1].stolen - whole[0].stolen
        found = {
            "busy": busy,
            # A virtual CPU that its host has stopped for so long has no tick, and the others still have.
            "active": max(
                procfs.compute_utilization(*each)
                for each in zip(first, last, strict=True)
                if each[1].total > each[0].total
            ),
            "others": busy - own,
            "steal": stolen / (whole[1].total - whole[0].total),
            "queue": sum(self._waiting) / len(self._waiting),
            "switching": switches * SWITCH_COST_S / (len(after.activity.cores) * seconds),
            "memory_used": procfs.read_memory_used(proc=self._reader._proc),
        }
        for name, what in PRESSURE_OF.items():
            if what in after.stalled_s:
                found[name] = (after.stalled_s[what] - before.stalled_s[what]) / seconds
        return LoadReading(
            timestamp_s=time.time(),
            interval_s=seconds,
            source=self._reader.name,
            device=self._reader.device,
            # Ticks and the clock are not read at one instant, so a share may leave its range by a hair.
            shares={name: min(max(found[name], 0.0), 1.0) for name in self._reader.metrics},
        )


def _waiting(activity: procfs.CpuStat) -> float:
    # Whoever reads /proc runs while it does, and is not part of the load.
    runnable = activity.running - 1
    return max(0, runnable - len(activity.cores)) / max(runnable, 1)


def _tells(resource: str, proc: Path) -> bool:
    try:
        procfs.read_stall_s(resource, proc=proc)
    except DeviceError:
        return False
    return True


def _usable() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
