"""Tests of host load with a simulated /proc and clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparseflow.core.telemetry import host_reader
from sparseflow.core.telemetry.host_reader import HostReader
from sparseflow.errors import DeviceError, InputError

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:    250 kB\n"
Write = Callable[..., None]


def format_stat(*cores: tuple[int, int, int], switches: int, running: int) -> str:
    """Format a /proc/stat of cores with (busy, idle, stolen) ticks."""
    lines = [f"cpu{n} {busy} 0 0 {idle} 0 0 0 {stolen} 0 0" for n, (busy, idle, stolen) in enumerate(cores)]
    return "\n".join(["cpu  0 0 0 0 0", *lines, "intr 5 0", f"ctxt {switches}", f"procs_running {running}\n"])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulated clock that advances by sleeps and by the test."""
    clock = SimpleNamespace(wall_s=100.0, process_s=7.0)

    def sleep(seconds: float) -> None:
        clock.wall_s += seconds

    fake = SimpleNamespace(
        monotonic=lambda: clock.wall_s,
        process_time=lambda: clock.process_s,
        time=lambda: 1e9 + clock.wall_s,
        sleep=sleep,
    )
    monkeypatch.setattr(host_reader, "time", fake)
    return clock


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, *, stall_us: int = 0) -> None:
        (tmp_path / "stat").write_text(text)
        (tmp_path / "meminfo").write_text(MEMINFO)
        (tmp_path / "pressure").mkdir(exist_ok=True)
        for scale, resource in enumerate(("cpu", "memory", "io"), start=1):
            (tmp_path / "pressure" / resource).write_text(
                f"some avg10=99.00 avg60=0.00 avg300=0.00 total={stall_us * scale}\n"
                "full avg10=0.00 avg60=0.00 avg300=0.00 total=999\n"
            )

    write(format_stat((100, 900, 0), (100, 900, 0), switches=1000, running=1))
    return write


def test_stop_computes_shares_from_counter_differences(
    tmp_path: Path, write: Write, clock: SimpleNamespace
) -> None:
    reader = HostReader((0, 1), proc=tmp_path)
    recording = reader.start()
    clock.wall_s += 2.0
    clock.process_s += 1.0
    # 200 ticks per core: core 0 is busy for 150 and core 1 for 50, of which 10 are stolen; 8 other tasks run.
    write(format_stat((250, 950, 0), (140, 1050, 10), switches=41_000, running=9), stall_us=200_000)
    load = recording.stop()
    assert (load.source, load.device, load.interval_s) == ("host", "cpu", 2.0)
    assert load.timestamp_s == 1e9 + 102.0
    assert load.shares == pytest.approx(
        {
            "busy": 0.5,
            "active": 0.75,
            "others": 0.25,
            "steal": 10 / 400,
            "queue": (0.0 + 6 / 8) / 2,
            "switching": 40_000 * 10e-6 / 4.0,
            "cpu_pressure": 0.1,
            "memory_pressure": 0.2,
            "io_pressure": 0.3,
            "memory_used": 0.75,
        }
    )
    assert tuple(load.shares) == reader.metrics


def test_stop_uses_selected_cpus(tmp_path: Path, write: Write, clock: SimpleNamespace) -> None:
    recording = HostReader((1,), proc=tmp_path, metrics=("active", "busy")).start()
    clock.wall_s += 1.0
    write(format_stat((200, 900, 0), (120, 980, 0), switches=1000, running=1))
    assert recording.stop().shares == {"busy": 0.2, "active": 0.2}


def test_read_samples_queue_throughout(tmp_path: Path, write: Write, clock: SimpleNamespace) -> None:
    reader = HostReader((0,), proc=tmp_path, metrics=("queue",))
    sleep = host_reader.time.sleep

    def sleep_with_load(seconds: float) -> None:
        sleep(seconds)
        write(format_stat((101, 900, 0), (100, 900, 0), switches=1000, running=5))

    host_reader.time.sleep = sleep_with_load
    # 20 samples with 4 runnable tasks on 2 CPUs, one without load, and the last one again.
    assert reader.read(1.0)["queue"] == pytest.approx(0.5, abs=0.03)


def test_reader_without_psi_has_no_pressure(tmp_path: Path, write: Write) -> None:
    for resource in ("cpu", "memory", "io"):
        (tmp_path / "pressure" / resource).unlink()
    reader = HostReader((0,), proc=tmp_path)
    assert "busy" in reader.metrics and "cpu_pressure" not in reader.metrics
    with pytest.raises(DeviceError, match="pressure/cpu"):
        HostReader((0,), proc=tmp_path, metrics=("busy", "cpu_pressure"))


def test_reader_unsupported_metric_raises(tmp_path: Path, write: Write) -> None:
    with pytest.raises(DeviceError, match="`tensor`"):
        HostReader((0,), proc=tmp_path, metrics=("tensor",))
    with pytest.raises(InputError, match="'speed'"):
        HostReader((0,), proc=tmp_path, metrics=("speed",))
    with pytest.raises(InputError, match="`metrics`"):
        HostReader((0,), proc=tmp_path, metrics=())


@pytest.mark.parametrize("cpus", [(), (7,)])
def test_reader_missing_cpus_raise(tmp_path: Path, write: Write, cpus: tuple[int, ...]) -> None:
    with pytest.raises((InputError, DeviceError), match="CPU"):
        HostReader(cpus, proc=tmp_path)


def test_stop_offline_cpu_raises(tmp_path: Path, write: Write, clock: SimpleNamespace) -> None:
    recording = HostReader((0, 1), proc=tmp_path).start()
    clock.wall_s += 1.0
    write(format_stat((200, 900, 0), switches=1000, running=1))
    with pytest.raises(DeviceError, match="CPU 1"):
        recording.stop()


def test_stop_without_ticks_raises(tmp_path: Path, write: Write, clock: SimpleNamespace) -> None:
    recording = HostReader((0,), proc=tmp_path).start()
    clock.wall_s += 1.0
    with pytest.raises(DeviceError, match="20 ms"):
        recording.stop()


def test_stop_too_early_raises(tmp_path: Path, write: Write, clock: SimpleNamespace) -> None:
    recording = HostReader((0,), proc=tmp_path).start()
    clock.wall_s += 0.05
    with pytest.raises(DeviceError, match="50 ms"):
        recording.stop()
    with pytest.raises(InputError, match="window_s"):
        HostReader((0,), proc=tmp_path).read(0.05)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "cpu  1 2 3 4 5\n",
        "cpu0 1 2 3\nctxt 1\nprocs_running 1\n",
        format_stat((1, 2, 3), switches=1, running=1)[:40],
    ],
)
def test_a_stat_of_another_form_is_an_error(tmp_path: Path, write: Write, content: str) -> None:
    write(content)
    with pytest.raises(DeviceError, match="stat must hold"):
        HostReader((0,), proc=tmp_path)


def test_this_machine_can_be_read() -> None:
    reader = HostReader()
    load = reader.read(0.2)
    assert tuple(load.shares) == reader.metrics
    assert load.interval_s >= 0.2
    assert load["others"] <= load["busy"] <= load["active"]
