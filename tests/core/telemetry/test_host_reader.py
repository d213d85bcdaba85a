"""The host's load, from a /proc that changes between two readings as the test says."""

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


def stat(*cores: tuple[int, int, int], switches: int, running: int) -> str:
    """A /proc/stat of cores with (busy, idle, stolen) ticks."""
    lines = [f"cpu{n} {busy} 0 0 {idle} 0 0 0 {stolen} 0 0" for n, (busy, idle, stolen) in enumerate(cores)]
    return "\n".join(["cpu  0 0 0 0 0", *lines, "intr 5 0", f"ctxt {switches}", f"procs_running {running}\n"])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes only when the test, or a sleep, says so."""
    now = SimpleNamespace(wall=100.0, own=7.0)

    def sleep(seconds: float) -> None:
        now.wall += seconds

    fake = SimpleNamespace(
        monotonic=lambda: now.wall, process_time=lambda: now.own, time=lambda: 1e9 + now.wall, sleep=sleep
    )
    monkeypatch.setattr(host_reader, "time", fake)
    return now


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str, *, stalled_us: int = 0) -> None:
        (tmp_path / "stat").write_text(text)
        (tmp_path / "meminfo").write_text(MEMINFO)
        (tmp_path / "pressure").mkdir(exist_ok=True)
        for scale, what in enumerate(("cpu", "memory", "io"), start=1):
            (tmp_path / "pressure" / what).write_text(
                f"some avg10=99.00 avg60=0.00 avg300=0.00 total={stalled_us * scale}\n"
                "full avg10=0.00 avg60=0.00 avg300=0.00 total=999\n"
            )

    write(stat((100, 900, 0), (100, 900, 0), switches=1000, running=1))
    return write


def test_every_share_is_what_its_counters_moved_by(
    tmp_path: Path, write: Write, clock: SimpleNamespace
) -> None:
    reader = HostReader((0, 1), proc=tmp_path)
    watch = reader.start()
    clock.wall += 2.0
    clock.own += 1.0
    # 200 ticks a core passed: core 0 busy for 150, core 1 for 50, 10 of these stolen; 8 others runnable.
    write(stat((250, 950, 0), (140, 1050, 10), switches=41_000, running=9), stalled_us=200_000)
    load = watch.stop()
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


def test_only_the_cpus_that_may_be_used_count(tmp_path: Path, write: Write, clock: SimpleNamespace) -> None:
    watch = HostReader((1,), proc=tmp_path, metrics=("active", "busy")).start()
    clock.wall += 1.0
    write(stat((200, 900, 0), (120, 980, 0), switches=1000, running=1))
    assert watch.stop().shares == {"busy": 0.2, "active": 0.2}


def test_reading_looks_at_the_queue_all_along(tmp_path: Path, write: Write, clock: SimpleNamespace) -> None:
    reader = HostReader((0,), proc=tmp_path, metrics=("queue",))
    sleep = host_reader.time.sleep

    def busy_meanwhile(seconds: float) -> None:
        sleep(seconds)
        write(stat((101, 900, 0), (100, 900, 0), switches=1000, running=5))

    host_reader.time.sleep = busy_meanwhile
    # 20 looks at 4 runnable tasks on 2 CPUs and one at none, and the last one again.
    assert reader.read(1.0)["queue"] == pytest.approx(0.5, abs=0.03)


def test_a_kernel_without_pressure_does_not_tell_it(tmp_path: Path, write: Write) -> None:
    for what in ("cpu", "memory", "io"):
        (tmp_path / "pressure" / what).unlink()
    reader = HostReader((0,), proc=tmp_path)
    assert "busy" in reader.metrics and "cpu_pressure" not in reader.metrics
    with pytest.raises(DeviceError, match="pressure/cpu"):
        HostReader((0,), proc=tmp_path, metrics=("busy", "cpu_pressure"))


def test_what_a_host_has_not_is_an_error_when_asked_for(tmp_path: Path, write: Write) -> None:
    with pytest.raises(DeviceError, match="`tensor` is not told by a host"):
        HostReader((0,), proc=tmp_path, metrics=("tensor",))
    with pytest.raises(InputError, match="'speed'"):
        HostReader((0,), proc=tmp_path, metrics=("speed",))
    with pytest.raises(InputError, match="at least one"):
        HostReader((0,), proc=tmp_path, metrics=())


@pytest.mark.parametrize("cpus", [(), (7,)])
def test_cpus_that_are_not_there_are_an_error(tmp_path: Path, write: Write, cpus: tuple[int, ...]) -> None:
    with pytest.raises((InputError, DeviceError), match="CPU"):
        HostReader(cpus, proc=tmp_path)


def test_a_cpu_that_goes_offline_ends_the_reading(
    tmp_path: Path, write: Write, clock: SimpleNamespace
) -> None:
    watch = HostReader((0, 1), proc=tmp_path).start()
    clock.wall += 1.0
    write(stat((200, 900, 0), switches=1000, running=1))
    with pytest.raises(DeviceError, match="CPU 1"):
        watch.stop()


def test_counters_that_stand_still_are_an_error(tmp_path: Path, write: Write, clock: SimpleNamespace) -> None:
    watch = HostReader((0,), proc=tmp_path).start()
    clock.wall += 1.0
    with pytest.raises(DeviceError, match="no clock tick"):
        watch.stop()


def test_too_short_a_watch_is_an_error(tmp_path: Path, write: Write, clock: SimpleNamespace) -> None:
    watch = HostReader((0,), proc=tmp_path).start()
    clock.wall += 0.05
    with pytest.raises(DeviceError, match="50 ms"):
        watch.stop()
    with pytest.raises(InputError, match="window_s"):
        HostReader((0,), proc=tmp_path).read(0.05)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "cpu  1 2 3 4 5\n",
        "cpu0 1 2 3\nctxt 1\nprocs_running 1\n",
        stat((1, 2, 3), switches=1, running=1)[:40],
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
