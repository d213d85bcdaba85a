"""Who used the CPUs while something was measured.

Two signs tell that others did. Threads of the harness that could have run and had no CPU: Linux counts that
time to the nanosecond, but only where they had a right to one each. And what the CPUs did beyond the harness
and ourselves, which also tells of neighbours who share no CPU with us but caches and memory; Linux counts it
in ticks.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass

from sparseflow.core.telemetry import procfs
from sparseflow.errors import DeviceError

WAITED = 0.05
"""Share of the time measured that threads may wait for a CPU before others are held to have used it."""

OTHERS = 0.10
"""Share of the CPUs that other processes may use meanwhile."""

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Who used the CPUs while samples were taken.

    Attributes:
        wall_s: From before the first sample to after the last.
        cpu_s: CPU time of the harness meanwhile, over all its threads.
        waited_s: What its threads were ready to run and had no CPU; None where Linux does not tell, or where
            they were more than the CPUs and so waited for each other.
        others: Share of the CPUs that we may run on which other processes used, or a hypervisor took away,
            from the harness's start to its end; None where Linux does not tell.
    """

    wall_s: float
    cpu_s: float
    waited_s: float | None
    others: float | None

    @property
    def contended(self) -> bool:
        """Threads waited for a CPU longer than `WAITED`, or others used more of the CPUs than `OTHERS`."""
        waited = self.waited_s is not None and self.waited_s > WAITED * self.wall_s
        return waited or (self.others is not None and self.others > OTHERS)


class Cpus:
    """What the CPUs that we may run on did since this was made."""

    def __init__(self) -> None:
        self._mine = os.sched_getaffinity(0)
        self._start = self._now()

    def _now(self) -> tuple[procfs.CpuTicks, float, float] | None:
        try:
            cores = procfs.read_cpu_stat().cores
        except DeviceError:
            return None
        ticks = procfs.sum_ticks(cores[core] for core in self._mine if core in cores)
        uses = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return ticks, sum(use.ru_utime + use.ru_stime for use in uses), time.monotonic()

    def others(self) -> float | None:
        """Share of them that others used; None where it is not told."""
        end = self._now()
        if self._start is None or end is None:
            return None
        busy = TICK_S * (end[0].busy - self._start[0].busy)
        passed = end[2] - self._start[2]
        # Each CPU's counter may be a tick off, long beside a short measurement: that much is no sign.
        doubt = TICK_S * len(self._mine)
        return max(0.0, busy - (end[1] - self._start[1]) - doubt) / (passed * len(self._mine))
