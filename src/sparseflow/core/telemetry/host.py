"""Readings of the host: CPU utilisation, memory in use and pressure, from Linux's /proc.

Every value is a share in [0, 1]. What the kernel does not tell raises: a missing reading that became 0.0
would look like an idle machine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sparseflow.errors import DeviceError

PROC = Path("/proc")
PRESSURES = ("cpu", "memory", "io")


@dataclass(frozen=True, kw_only=True)
class HostReading:
    """One reading, each value a share in [0, 1].

    Attributes:
        interval_s: Seconds that `cpu_utilisation` is an average over.
        cpu_utilisation: Share of all CPUs' time that was not idle.
        memory_used: Share of memory that is not available to a new process.
        cpu_pressure: Share of the last ten seconds in which some task waited for a CPU (PSI `some`).
        memory_pressure: The same for memory.
        io_pressure: The same for input and output.
    """

    interval_s: float
    cpu_utilisation: float
    memory_used: float
    cpu_pressure: float
    memory_pressure: float
    io_pressure: float


@dataclass(frozen=True, kw_only=True)
class CpuTicks:
    """Clock ticks since boot, of one CPU or of several together.

    Attributes:
        busy: Ticks that were not idle, stolen ones included.
        total: All ticks.
        stolen: Ticks in which a hypervisor ran something else.
    """

    busy: int
    total: int
    stolen: int = 0


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What /proc/stat tells at one moment.

    Attributes:
        cores: Number of each CPU that is online -> its ticks.
        switches: Context switches since boot, of the whole machine.
        running: Tasks that run or could run now, of the whole machine, the one that asks included.
    """

    cores: dict[int, CpuTicks]
    switches: int
    running: int


def read_host(interval_s: float = 0.1, *, proc: Path = PROC) -> HostReading:
    """Read the host, watching the CPUs for `interval_s` seconds.

    Raises:
        DeviceError: The kernel does not tell one of the values; the message says which.
    """
    before, start = cpu_ticks(proc=proc), time.monotonic()
    time.sleep(interval_s)
    after, end = cpu_ticks(proc=proc), time.monotonic()
    return HostReading(
        interval_s=end - start,
        cpu_utilisation=utilisation(before, after),
        memory_used=memory_used(proc=proc),
        cpu_pressure=pressure("cpu", proc=proc),
        memory_pressure=pressure("memory", proc=proc),
        io_pressure=pressure("io", proc=proc),
    )


def cpu_ticks(*, proc: Path = PROC) -> CpuTicks:
    """Busy and total ticks from /proc/stat.

    Raises:
        DeviceError: There is no such file, or its first line is not the sum over all CPUs.
    """
    first = _read(proc / "stat").partition("\n")[0].split()
    if len(first) < 6 or first[0] != "cpu" or not all(field.isdigit() for field in first[1:]):
        raise DeviceError(
            f"{proc}/stat must begin with `cpu` and at least five counters, not {' '.join(first)!r}"
        )
    return _ticks(first[1:])


def activity(*, proc: Path = PROC) -> Activity:
    """Every CPU's ticks, context switches and runnable tasks, from one reading of /proc/stat.

    Raises:
        DeviceError: There is no such file, or it lacks one of them.
    """
    text = _read(proc / "stat")
    cores = {
        int(number): _ticks(counters.split())
        for number, counters in re.findall(r"^cpu(\d+)((?: +\d+){5,})$", text, re.MULTILINE)
    }
    named = dict(re.findall(r"^(ctxt|procs_running) (\d+)$", text, re.MULTILINE))
    if not cores or len(named) != 2:
        raise DeviceError(f"{proc}/stat must hold a line for each CPU, `ctxt` and `procs_running`")
    return Activity(cores=cores, switches=int(named["ctxt"]), running=int(named["procs_running"]))


def together(cores: Iterable[CpuTicks]) -> CpuTicks:
    """The ticks of several CPUs as those of one."""
    each = list(cores)
    return CpuTicks(
        busy=sum(core.busy for core in each),
        total=sum(core.total for core in each),
        stolen=sum(core.stolen for core in each),
    )


def utilisation(before: CpuTicks, after: CpuTicks) -> float:
    """Share of time that the CPUs were busy between two readings, in [0, 1].

    Raises:
        DeviceError: No tick passed between them, so that there is nothing to divide by.
    """
    passed = after.total - before.total
    if passed <= 0:
        raise DeviceError("no clock tick passed between the two readings; leave at least 20 ms between them")
    # iowait may step back a little, which would carry the share past its ends.
    return min(max((after.busy - before.busy) / passed, 0.0), 1.0)


def memory_used(*, proc: Path = PROC) -> float:
    """Share of memory that is in use and not reclaimable, in [0, 1].

    Raises:
        DeviceError: /proc/meminfo is missing or lacks MemTotal or MemAvailable.
    """
    text = _read(proc / "meminfo")
    found = dict(re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", text, re.MULTILINE))
    if len(found) != 2 or int(found["MemTotal"]) == 0:
        raise DeviceError(f"{proc}/meminfo must hold MemTotal and MemAvailable in kB")
    return min(max(1.0 - int(found["MemAvailable"]) / int(found["MemTotal"]), 0.0), 1.0)


def pressure(resource: str, *, proc: Path = PROC) -> float:
    """Share of the last ten seconds in which some task waited for `resource`, in [0, 1].

    Args:
        resource: `"cpu"`, `"memory"` or `"io"`.

    Raises:
        DeviceError: The kernel keeps no pressure-stall information.
    """
    text = _read(proc / "pressure" / resource)
    found = re.search(r"^some avg10=([0-9.]+) ", text, re.MULTILINE)
    if found is None:
        raise DeviceError(f"{proc}/pressure/{resource} must hold a line `some avg10=…`")
    return min(float(found.group(1)) / 100.0, 1.0)


def stalled_s(resource: str, *, proc: Path = PROC) -> float:
    """Seconds since boot in which some task waited for `resource`: two readings give any window's share.

    Args:
        resource: `"cpu"`, `"memory"` or `"io"`.

    Raises:
        DeviceError: The kernel keeps no pressure-stall information.
    """
    found = re.search(r"^some .*\btotal=(\d+)$", _read(proc / "pressure" / resource), re.MULTILINE)
    if found is None:
        raise DeviceError(f"{proc}/pressure/{resource} must hold a line `some … total=…`")
    return int(found.group(1)) / 1e6


def _ticks(counters: list[str]) -> CpuTicks:
    # user nice system idle iowait irq softirq steal; guest time is already inside user and nice.
    ticks = [int(counter) for counter in counters[:8]]
    total = sum(ticks)
    return CpuTicks(busy=total - ticks[3] - ticks[4], total=total, stolen=ticks[7] if len(ticks) > 7 else 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise DeviceError(f"{path} cannot be read on this machine: {error.strerror}") from error
