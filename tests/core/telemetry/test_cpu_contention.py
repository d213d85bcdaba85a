"""Detection of other processes that use the CPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from sparseflow.core.telemetry import cpu_contention, procfs
from sparseflow.core.telemetry.cpu_contention import CpuUsage, CpuUsageMonitor
from sparseflow.core.telemetry.procfs import CpuStat, CpuTicks
from sparseflow.errors import DeviceError


@pytest.mark.parametrize(
    ("waited_s", "other_items", "expected"),
    [
        (0.0, 0.0, False),
        (0.04, 0.09, False),
        (0.06, 0.0, True),
        (0.0, 0.11, True),
        (None, None, False),
        (None, 0.5, True),
        (0.5, None, True),
    ],
)
def test_contended_limits(waited_s: float | None, other_items: float | None, expected: bool) -> None:
    assert CpuUsage(wall_s=1.0, cpu_s=1.0, wait_s=waited_s, other_share=other_items).contended is expected


def ticks(monkeypatch: pytest.MonkeyPatch, *busy: int) -> CpuUsageMonitor:
    """Simulate two CPUs, of which one is allowed, with its busy ticks at each reading."""
    readings = iter(busy)

    def activity() -> CpuStat:
        return CpuStat(
            cores={0: CpuTicks(busy=next(readings), total=10**6), 1: CpuTicks(busy=10**5, total=10**6)},
            switches=0,
            running=1,
        )

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(procfs, "read_cpu_stat", activity)
    monkeypatch.setattr(cpu_contention.resource, "getrusage", lambda _: resource_use)
    clock = iter((10.0, 11.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    return CpuUsageMonitor()


class resource_use:
    ru_utime = 5.0
    ru_stime = 1.0


def test_other_share_is_relative_to_allowed_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    second = round(1 / cpu_contention.TICK_S)
    assert ticks(monkeypatch, 100, 100 + second // 2).measure_other_share() == pytest.approx(
        0.5 - cpu_contention.TICK_S
    )


def test_other_share_ignores_tick_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ticks(monkeypatch, 100, 101).measure_other_share() == 0.0


def test_other_share_unknown_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent() -> CpuStat:
        raise DeviceError("no /proc/stat")

    monkeypatch.setattr(procfs, "read_cpu_stat", silent)
    assert CpuUsageMonitor().measure_other_share() is None


def test_other_share_excludes_child_processes() -> None:
    spin = [
        sys.executable,
        "-c",
        "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass",
    ]
    cpus = CpuUsageMonitor()
    subprocess.run(spin, check=True)
    single = cpus.measure_other_share()
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as neighbour:
        try:
            cpus = CpuUsageMonitor()
            subprocess.run(spin, check=True)
            concurrent = cpus.measure_other_share()
        finally:
            neighbour.kill()
    assert single is not None
    assert concurrent is not None
    # Other processes may come and go, so only a lower bound is certain.
    assert concurrent > 0.5 * 0.5 / len(os.sched_getaffinity(0))
