"""Detection of other processes that use the CPUs during a measurement.

There are two signals. Threads of the harness that are runnable but have no CPU: Linux counts this time in
nanoseconds, but it only means contention if there are no more threads than CPUs. And CPU time that neither
the harness nor this process used: it also shows processes on other CPUs that share caches and memory; Linux
counts it in ticks.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass

from sparseflow.core.telemetry import procfs
from sparseflow.errors import DeviceError

MAX_WAIT_SHARE = 0.05
"""Share of the wall time that threads may wait for a CPU."""

MAX_OTHER_SHARE = 0.10
"""Share of the CPUs that other processes may use."""

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class CpuUsage:
    """CPU usage during the samples.

    Attributes:
        wall_s: Time from the first to the last sample, seconds.
        cpu_s: CPU time of all threads of the harness, seconds.
        wait_s: Time that its runnable threads waited for a CPU, seconds; None if unknown, or if there were
            more threads than CPUs.
        other_share: Share of the allowed CPUs that other processes or the hypervisor used while the harness
            ran; None if unknown.
    """

    wall_s: float
    cpu_s: float
    wait_s: float | None
    other_share: float | None

    @property
    def contended(self) -> bool:
        """Whether `wait_s` or `other_share` exceeds its limit."""
        waited_too_long = self.wait_s is not None and self.wait_s > MAX_WAIT_SHARE * self.wall_s
        return waited_too_long or (self.other_share is not None and self.other_share > MAX_OTHER_SHARE)


class CpuUsageMonitor:
    """CPU time of the allowed CPUs since creation."""

    def __init__(self) -> None:
        self._cpus = os.sched_getaffinity(0)
        self._start = self._read_counters()

    def _read_counters(self) -> tuple[procfs.CpuTicks, float, float] | None:
        try:
            cores = procfs.read_cpu_stat().cores
        except DeviceError:
            return None
        ticks = procfs.sum_ticks(cores[core] for core in self._cpus if core in cores)
        usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return ticks, sum(use.ru_utime + use.ru_stime for use in usages), time.monotonic()

    def measure_other_share(self) -> float | None:
        """Return the share of the CPUs that other processes used; None if unknown."""
        end = self._read_counters()
        if self._start is None or end is None:
            return None
        busy = TICK_S * (end[0].busy - self._start[0].busy)
        elapsed_s = end[2] - self._start[2]
        # The counter of each CPU has an error of one tick, which is large relative to a short measurement.
        tick_error_s = TICK_S * len(self._cpus)
        return max(0.0, busy - (end[1] - self._start[1]) - tick_error_s) / (elapsed_s * len(self._cpus))
