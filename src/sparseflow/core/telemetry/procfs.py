"""Read CPU time, memory use and pressure-stall information from Linux's /proc.

A value that the kernel does not provide raises an error: a missing reading reported as 0.0 would look like
an idle machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sparseflow.errors import DeviceError

PROC = Path("/proc")
PSI_RESOURCES = ("cpu", "memory", "io")


@dataclass(frozen=True, kw_only=True)
class CpuTicks:
    """Clock ticks since boot, of one CPU or summed over several.

    Attributes:
        busy: Ticks in which the CPU was not idle, including stolen ticks.
        total: All ticks.
        stolen: Ticks in which a hypervisor ran another guest.
    """

    busy: int
    total: int
    stolen: int = 0


@dataclass(frozen=True, kw_only=True)
class CpuStat:
    """One snapshot of /proc/stat.

    Attributes:
        cores: Ticks of each CPU that is online, by CPU number.
        switches: Context switches since boot, machine-wide.
        running: Runnable tasks, machine-wide, including the reading process.
    """

    cores: dict[int, CpuTicks]
    switches: int
    running: int


def read_cpu_stat(*, proc: Path = PROC) -> CpuStat:
    """Read the ticks of every CPU, context switches and runnable tasks from /proc/stat.

    Raises:
        DeviceError: The file is missing or lacks one of these values.
    """
    text = _read(proc / "stat")
    cores = {
        int(number): _parse_ticks(counters.split())
        for number, counters in re.findall(r"^cpu(\d+)((?: +\d+){5,})$", text, re.MULTILINE)
    }
    counters = dict(re.findall(r"^(ctxt|procs_running) (\d+)$", text, re.MULTILINE))
    if not cores or len(counters) != 2:
        raise DeviceError(f"{proc}/stat must hold a line for each CPU, `ctxt` and `procs_running`")
    return CpuStat(cores=cores, switches=int(counters["ctxt"]), running=int(counters["procs_running"]))


def sum_ticks(cores: Iterable[CpuTicks]) -> CpuTicks:
    """Add up the ticks of several CPUs."""
    ticks = list(cores)
    return CpuTicks(
        busy=sum(core.busy for core in ticks),
        total=sum(core.total for core in ticks),
        stolen=sum(core.stolen for core in ticks),
    )


def compute_utilization(before: CpuTicks, after: CpuTicks) -> float:
    """Compute the fraction of time in which the CPUs were busy between two readings, in [0, 1].

    Raises:
        DeviceError: The tick counter did not advance between the readings.
    """
    ticks = after.total - before.total
    if ticks <= 0:
        raise DeviceError("no clock tick passed between the two readings; leave at least 20 ms between them")
    # iowait may decrease slightly, which would move the fraction outside [0, 1].
    return min(max((after.busy - before.busy) / ticks, 0.0), 1.0)


def read_memory_used(*, proc: Path = PROC) -> float:
    """Read the fraction of memory that is in use and not reclaimable, in [0, 1].

    Raises:
        DeviceError: /proc/meminfo is missing or lacks MemTotal or MemAvailable.
    """
    sizes = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", _read(proc / "meminfo"), re.MULTILINE))
    if len(sizes) != 2 or int(sizes["MemTotal"]) == 0:
        raise DeviceError(f"{proc}/meminfo must hold MemTotal and MemAvailable in kB")
    return min(max(1.0 - int(sizes["MemAvailable"]) / int(sizes["MemTotal"]), 0.0), 1.0)


def read_stall_s(resource: str, *, proc: Path = PROC) -> float:
    """Read the seconds since boot in which some task waited for `resource` (PSI).

    The difference of two readings gives the share of any window.

    Args:
        resource: `"cpu"`, `"memory"` or `"io"`.
        proc: Mount point of /proc.

    Raises:
        DeviceError: The kernel provides no pressure-stall information.
    """
    match = re.search(r"^some .*\btotal=(\d+)$", _read(proc / "pressure" / resource), re.MULTILINE)
    if match is None:
        raise DeviceError(f"{proc}/pressure/{resource} must hold a line `some … total=…`")
    return int(match.group(1)) / 1e6


def _parse_ticks(counters: list[str]) -> CpuTicks:
    # user nice system idle iowait irq softirq steal; user and nice already include guest time.
    ticks = [int(counter) for counter in counters[:8]]
    total = sum(ticks)
    return CpuTicks(busy=total - ticks[3] - ticks[4], total=total, stolen=ticks[7] if len(ticks) > 7 else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise DeviceError(f"{path} cannot be read on this machine: {error.strerror}") from error
