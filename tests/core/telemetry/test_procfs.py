"""Tests of the /proc readers on synthetic files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core.telemetry import procfs
from sparseflow.core.telemetry.procfs import CpuTicks
from sparseflow.errors import DeviceError

STAT = "cpu  100 20 30 700 50 5 5 0 0 0\ncpu0 100 20 30 700 50 5 5 0 0 0\nctxt 9000\nprocs_running 3\n"
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    250 kB\n"
PSI = "some avg10=12.50 avg60=0.00 avg300=0.00 total=1500000\nfull avg10=99.00 avg60=0.00 total=0\n"

READERS: dict[str, Callable[[Path], object]] = {
    "stat": lambda proc: procfs.read_cpu_stat(proc=proc),
    "meminfo": lambda proc: procfs.read_memory_used(proc=proc),
    "pressure/cpu": lambda proc: procfs.read_stall_s("cpu", proc=proc),
}


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "pressure").mkdir()
    for resource in procfs.PSI_RESOURCES:
        (tmp_path / "pressure" / resource).write_text(PSI)
    return tmp_path


def test_readers_valid_files_return_values(proc: Path) -> None:
    stat = procfs.read_cpu_stat(proc=proc)
    assert stat.cores == {0: CpuTicks(busy=160, total=910)}
    assert (stat.switches, stat.running) == (9000, 3)
    assert procfs.read_memory_used(proc=proc) == pytest.approx(0.75)
    assert procfs.read_stall_s("io", proc=proc) == 1.5


def test_compute_utilization_divides_busy_by_total_ticks() -> None:
    assert procfs.compute_utilization(CpuTicks(busy=0, total=0), CpuTicks(busy=25, total=100)) == 0.25


@given(*[st.integers(0, 10**12)] * 4)
def test_compute_utilization_returns_fraction_or_raises(a: int, b: int, c: int, d: int) -> None:
    try:
        assert 0.0 <= procfs.compute_utilization(CpuTicks(busy=a, total=b), CpuTicks(busy=c, total=d)) <= 1.0
    except DeviceError:
        assert d <= b


@pytest.mark.parametrize("name", READERS)
def test_readers_missing_file_raise(proc: Path, name: str) -> None:
    (proc / name).unlink()
    with pytest.raises(DeviceError, match=name):
        READERS[name](proc)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("stat", "intr 1 2 3\n"),
        ("stat", "cpu0 1 2\nctxt 1\nprocs_running 1\n"),
        ("stat", "cpu0 a b c d e f\nctxt 1\nprocs_running 1\n"),
        ("stat", "cpu0 1 2 3 4 5 6\nctxt 1\n"),
        ("stat", ""),
        ("meminfo", "MemTotal: 1000 kB\n"),
        ("meminfo", "MemTotal: 0 kB\nMemAvailable: 0 kB\n"),
        ("pressure/cpu", "full avg10=1.00 avg60=0 avg300=0 total=0\n"),
        ("pressure/cpu", ""),
    ],
)
def test_readers_malformed_file_raise(proc: Path, name: str, content: str) -> None:
    (proc / name).write_text(content)
    with pytest.raises(DeviceError, match=name):
        READERS[name](proc)


def test_compute_utilization_without_ticks_raises() -> None:
    with pytest.raises(DeviceError, match="20 ms"):
        procfs.compute_utilization(CpuTicks(busy=1, total=5), CpuTicks(busy=1, total=5))
