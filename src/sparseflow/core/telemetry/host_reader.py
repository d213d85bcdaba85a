"""Load of this host's CPUs from the difference of two readings of /proc.

Notation: n usable CPUs, Δ the increase of a counter over the window of T seconds. ::

    busy      = Δbusy / Δtotal, summed over these CPUs         active = the same of the busiest CPU
    others    = busy - Δ(CPU time of this process) / (n T)     steal  = Δstolen / Δtotal
    queue     = max(0, r - N) / r, averaged                    r runnable tasks, N CPUs of the machine
    switching = Δswitches · 10 µs / (N T)                      pressures: Δ(stalled time) / T

`queue` and `switching` are machine-wide, since /proc does not report them per CPU. In a container /proc/stat
describes the host machine.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from sparseflow.core.device.info import list_usable_cpus
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
"""Cost of one context switch including cold caches; it only scales `switching`."""

QUEUE_INTERVAL_S = 0.05
BASE_METRICS = ("busy", "active", "others", "steal", "queue", "switching", "memory_used")
PSI_METRICS = {f"{resource}_pressure": resource for resource in procfs.PSI_RESOURCES}


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    time_s: float
    process_s: float
    stat: procfs.CpuStat
    stall_s: dict[str, float]


class HostReader:
    """`LoadReader` of the CPUs that this process may use.

    Args:
        cpus: CPU numbers to read; by default all that this process may use.
        metrics: Metrics to read, among `METRICS`; by default all that this kernel provides.
        proc: Mount point of /proc.

    Raises:
        InputError: A metric is unknown, or there are no CPUs.
        DeviceError: A requested metric or CPU is not available.
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
        self.cpus = tuple(sorted(list_usable_cpus() if cpus is None else set(cpus)))
        if not self.cpus:
            raise InputError("`cpus` must contain at least one CPU")
        self._proc = proc
        pressures = (name for name, resource in PSI_METRICS.items() if _has_pressure(resource, proc))
        available = (*BASE_METRICS, *pressures)
        requested = available if metrics is None else tuple(metrics)
        check_metrics(requested)
        for name in requested:
            if name in PSI_METRICS and name not in available:
                procfs.read_stall_s(PSI_METRICS[name], proc=proc)  # raises with the reason
            if name not in available:
                raise DeviceError(f"a host does not provide `{name}`; it provides: {', '.join(available)}")
        if not requested:
            raise InputError("`metrics` must contain at least one metric")
        self.metrics = tuple(name for name in METRICS if name in requested)
        self._take_snapshot()

    def read(self, window_s: float = 1.0) -> LoadReading:
        """Record for `window_s` seconds; raises like `LoadReader.read`."""
        check_window(window_s)
        recording = self.start()
        end_s = time.monotonic() + window_s
        while (remaining_s := end_s - time.monotonic()) > 0.0:
            time.sleep(min(remaining_s, QUEUE_INTERVAL_S))
            recording.sample_queue()
        return recording.stop()

    def start(self) -> HostRecording:
        """Start to record; raises DeviceError if a metric cannot be read."""
        return HostRecording(self, self._take_snapshot())

    def _take_snapshot(self) -> _Snapshot:
        stat = procfs.read_cpu_stat(proc=self._proc)
        if missing := [cpu for cpu in self.cpus if cpu not in stat.cores]:
            raise DeviceError(f"{self._proc}/stat has no CPU {missing[0]}; is it offline?")
        resources = [resource for name, resource in PSI_METRICS.items() if name in self.metrics]
        return _Snapshot(
            time_s=time.monotonic(),
            process_s=time.process_time(),
            stat=stat,
            stall_s={resource: procfs.read_stall_s(resource, proc=self._proc) for resource in resources},
        )


class HostRecording:
    """Reading of a host in progress; created by `HostReader.start`."""

    def __init__(self, reader: HostReader, before: _Snapshot) -> None:
        self._reader = reader
        self._before = before
        self._queue = [_compute_queue(before.stat)]

    def sample_queue(self) -> None:
        """Sample the runnable tasks: /proc has no counter of them, so `queue` is the mean of samples."""
        self._queue.append(_compute_queue(procfs.read_cpu_stat(proc=self._reader._proc)))

    def stop(self) -> LoadReading:
        """Return the load since the start; raises like `LoadRecording.stop`."""
        before, after = self._before, self._reader._take_snapshot()
        seconds = after.time_s - before.time_s
        check_recording_length(seconds)
        self._queue.append(_compute_queue(after.stat))
        cpus = self._reader.cpus
        core_pairs = [(before.stat.cores[cpu], after.stat.cores[cpu]) for cpu in cpus]
        first = procfs.sum_ticks(core for core, _ in core_pairs)
        last = procfs.sum_ticks(core for _, core in core_pairs)
        busy = procfs.compute_utilization(first, last)
        switches = after.stat.switches - before.stat.switches
        shares = {
            "busy": busy,
            # A virtual CPU that its hypervisor stopped for the whole window has no new ticks.
            "active": max(
                procfs.compute_utilization(*pair) for pair in core_pairs if pair[1].total > pair[0].total
            ),
            "others": busy - (after.process_s - before.process_s) / (len(cpus) * seconds),
            "steal": (last.stolen - first.stolen) / (last.total - first.total),
            "queue": sum(self._queue) / len(self._queue),
            "switching": switches * SWITCH_COST_S / (len(after.stat.cores) * seconds),
            "memory_used": procfs.read_memory_used(proc=self._reader._proc),
        }
        for name, resource in PSI_METRICS.items():
            if resource in after.stall_s:
                shares[name] = (after.stall_s[resource] - before.stall_s[resource]) / seconds
        return LoadReading(
            timestamp_s=time.time(),
            interval_s=seconds,
            source=self._reader.name,
            device=self._reader.device,
            # Ticks and clock are not read at the same instant, so a share may slightly exceed its range.
            shares={name: min(max(shares[name], 0.0), 1.0) for name in self._reader.metrics},
        )


def _compute_queue(stat: procfs.CpuStat) -> float:
    # The process that reads /proc is running and not part of the load.
    runnable = stat.running - 1
    return max(0, runnable - len(stat.cores)) / max(runnable, 1)


def _has_pressure(resource: str, proc: Path) -> bool:
    try:
        procfs.read_stall_s(resource, proc=proc)
    except DeviceError:
        return False
    return True
