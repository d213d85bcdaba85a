"""Host readings, from a /proc of our own making."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core.telemetry import host
from sparseflow.core.telemetry.host import CpuTicks
from sparseflow.errors import DeviceError

STAT = "cpu  100 20 30 700 50 5 5 0 0 0\ncpu0 100 20 30 700 50 5 5 0 0 0\n"
MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    250 kB\n"
PSI = "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n"


READERS: dict[str, Callable[[Path], object]] = {
    "stat": lambda proc: host.cpu_ticks(proc=proc),
    "meminfo": lambda proc: host.memory_used(proc=proc),
    "pressure/cpu": lambda proc: host.pressure("cpu", proc=proc),
}


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "pressure").mkdir()
    for name in host.PRESSURES:
        (tmp_path / "pressure" / name).write_text(PSI)
    return tmp_path


def test_values_are_shares(proc: Path) -> None:
    assert host.cpu_ticks(proc=proc) == CpuTicks(busy=160, total=910)
    assert host.memory_used(proc=proc) == pytest.approx(0.75)
    assert host.pressure("io", proc=proc) == 0.125


def test_waiting_for_a_disk_is_idle_and_stolen_time_is_busy() -> None:
    assert host.utilisation(CpuTicks(busy=0, total=0), CpuTicks(busy=25, total=100)) == 0.25


def test_a_reading_holds_every_value(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    later = iter([CpuTicks(busy=10, total=100), CpuTicks(busy=40, total=200)])
    monkeypatch.setattr(host, "cpu_ticks", lambda proc: next(later))
    found = host.read_host(0.0, proc=proc)
    assert found.cpu_utilisation == pytest.approx(0.3)
    assert (found.cpu_pressure, found.memory_pressure, found.io_pressure) == (0.125,) * 3
    assert all(0.0 <= value <= 1.0 for name, value in asdict(found).items() if name != "interval_s")


@given(*[st.integers(0, 10**12)] * 4)
def test_utilisation_is_a_share_or_an_error(a: int, b: int, c: int, d: int) -> None:
    try:
        assert 0.0 <= host.utilisation(CpuTicks(busy=a, total=b), CpuTicks(busy=c, total=d)) <= 1.0
    except DeviceError:
        assert d <= b


@pytest.mark.parametrize("missing", READERS)
def test_a_missing_file_is_an_error_and_never_zero(proc: Path, missing: str) -> None:
    (proc / missing).unlink()
    with pytest.raises(DeviceError, match=missing):
        READERS[missing](proc)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("stat", "intr 1 2 3\n"),
        ("stat", "cpu 1 2\n"),
        ("stat", "cpu a b c d e f\n"),
        ("stat", ""),
        ("meminfo", "MemTotal: 1000 kB\n"),
        ("meminfo", "MemTotal: 0 kB\nMemAvailable: 0 kB\n"),
        ("pressure/cpu", "full avg10=1.00 avg60=0 avg300=0 total=0\n"),
        ("pressure/cpu", ""),
    ],
)
def test_a_file_of_another_form_is_an_error(proc: Path, name: str, content: str) -> None:
    (proc / name).write_text(content)
    with pytest.raises(DeviceError, match=name):
        READERS[name](proc)


def test_no_tick_between_two_readings_is_an_error() -> None:
    with pytest.raises(DeviceError, match="no clock tick"):
        host.utilisation(CpuTicks(busy=1, total=5), CpuTicks(busy=1, total=5))
