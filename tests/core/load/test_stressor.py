"""Tests of background load. Levels are low, so that other work on the machine does not fail a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sparseflow.core.load import stressor
from sparseflow.core.load.stressor import Stressor
from sparseflow.errors import DeviceError, InputError, RunError

TIMEOUT_S = 120.0


def has_exited(pid: int) -> bool:
    """Whether a process has exited; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_for_exit(pid: int) -> bool:
    end_s = time.monotonic() + TIMEOUT_S
    while not has_exited(pid) and time.monotonic() < end_s:
        time.sleep(0.05)
    return has_exited(pid)


def wait_for_exit_error(load: Stressor) -> str:
    """Wait until a process has exited with all of its threads and return the error."""
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        try:
            load.measure_share()
        except RunError as error:
            if "exited" in str(error):
                return str(error)
        time.sleep(0.05)
    return ""


def test_stressor_reaches_levels_and_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cpu = min(os.sched_getaffinity(0))
    with Stressor("cpu-fma", 0.06, cpus={cpu}) as load:
        (pid,) = load.pids
        assert os.sched_getaffinity(pid) == {cpu}
        assert load.wait_until_steady(TIMEOUT_S) == pytest.approx(0.06, abs=0.05)
        assert 0.0 < load.measure_share(0.5) < 1.0
        load.set_level(0.12)
        assert load.wait_until_steady(TIMEOUT_S) == pytest.approx(0.12, abs=0.05)
        start_s = time.monotonic()
        with load.hold_duty():
            time.sleep(0.3)
            assert 0.0 <= load.measure_share_between(start_s, time.monotonic()) <= 1.0
        load.set_level(0.0)
        assert load.wait_until_steady(TIMEOUT_S) < 0.05
        assert not list(tmp_path.iterdir()), "a kill would leave files behind"
    assert wait_for_exit(pid)
    load.close()
    with pytest.raises(RunError, match="cpu-fma"):
        load.measure_share()


def test_wait_until_steady_unreachable_level_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stressor, "TOLERANCE", -1.0)
    with Stressor("cpu-stream", 0.15, workers=1) as load:
        end_s = time.monotonic() + TIMEOUT_S
        while None in load.worker_shares():
            assert time.monotonic() < end_s, "no share was measured"
            time.sleep(0.05)
        with pytest.raises(RunError, match=r"0\.15.*1 s.*CPU \d+ 0\.\d\d"):
            load.wait_until_steady(1.0)


def test_reach_load_adds_what_other_work_leaves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Reader:
        """Reader of CPUs that other work uses to `other`, besides a stressor that has what it requests."""

        other = 0.4

        def __init__(self, cpus: object, *, metrics: object) -> None:
            pass

        def read(self, window_s: float) -> dict[str, float]:
            return {"others": self.other + load.level}

    monkeypatch.setattr(stressor, "HostReader", Reader)
    load = Stressor("cpu-fma", 0.0)
    monkeypatch.setattr(load, "measure_share_between", lambda start_s, end_s: load.level)
    assert load.reach_load(0.6) == pytest.approx(0.2)
    # Nothing is added where other work uses more, and a level that cannot be reached does not raise.
    assert load.reach_load(0.3) == load.level == 0.0 and not caplog.records
    monkeypatch.setattr(load, "measure_share_between", lambda start_s, end_s: load.level / 2.0)
    monkeypatch.setattr(Reader, "other", property(lambda reader: 0.1 - load.level / 2.0))
    assert load.reach_load(0.9, timeout_s=0.01) < 0.9 and "instead of 0.90" in caplog.text
    with pytest.raises(InputError, match="`level`"):
        load.reach_load(1.5)


def test_stressor_exits_with_its_parent() -> None:
    script = (
        "import os, signal; from sparseflow.core.load.stressor import Stressor\n"
        "load = Stressor('cpu-fma', 0.05); load.start(); print(*load.pids, flush=True); signal.pause()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == len(os.sched_getaffinity(0)) and not any(has_exited(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(wait_for_exit(pid) for pid in pids)


def test_stressor_killed_process_raises() -> None:
    with Stressor("cpu-fma", 0.05, workers=1) as load:
        os.kill(load.pids[0], signal.SIGKILL)
        assert "-9" in wait_for_exit_error(load)
        with pytest.raises(RunError, match="-9"):
            load.set_level(0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpu-matmul", "gpu-copy"])
def test_stressor_reaches_levels_on_gpu(kind: str) -> None:
    with Stressor(kind, 0.3) as load:
        for level in (0.3, 0.6, 0.9):
            load.set_level(level)
            assert load.wait_until_steady(TIMEOUT_S) == pytest.approx(level, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"kind": "cpu-burn", "level": 0.3}, "kind"),
        ({"kind": "cpu-fma", "level": 1.2}, "level"),
        ({"kind": "cpu-fma", "level": float("nan")}, "level"),
        ({"kind": "cpu-fma", "level": 0.3, "workers": 0}, "workers"),
        ({"kind": "cpu-fma", "level": 0.3, "workers": 100_000}, "workers"),
        ({"kind": "cpu-fma", "level": 0.3, "cpus": []}, "cpus"),
    ],
)
def test_stressor_invalid_argument_raises(arguments: dict[str, object], name: str) -> None:
    with pytest.raises(InputError, match=f"`{name}`"):
        Stressor(**arguments)  # type: ignore[arg-type]


def test_stressor_missing_cpu_raises() -> None:
    load = Stressor("cpu-fma", 0.3, cpus={9999})
    with pytest.raises(DeviceError, match=r"`cpu-fma`.*CPU 9999"):
        load.start()
    assert load.pids == ()


def make_process(*rows: tuple[float, float, int]) -> stressor._Process:
    process = stressor._Process(name="CPU 0", handle=None, report=None, errors=None)  # type: ignore[arg-type]
    for time_s, busy_s, command in rows:
        process.times_s.append(time_s)
        process.busy_s.append(busy_s)
        process.commands.append(command)
    return process


def test_compute_share_since_uses_cycles_of_last_command() -> None:
    rows = [(0.1 * n, 0.09 * n, 1) for n in range(20)]
    assert stressor._compute_share_since(make_process(*rows), 2) is None
    assert stressor._compute_share_since(make_process(*rows), 1) == pytest.approx(0.9)
    rows += [(2.0 + 0.1 * n, 1.8 + 0.03 * n, 2) for n in range(9)]
    assert stressor._compute_share_since(make_process(*rows), 2) is None
    rows += [(2.9 + 0.1 * n, 2.07 + 0.03 * n, 2) for n in range(5)]
    assert stressor._compute_share_since(make_process(*rows), 2) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("start_s", "end_s", "share"),
    [
        (0.0, 2.0, 0.55),
        (0.0, 1.0, 0.9),
        (1.0, 2.0, 0.2),
        (0.5, 1.5, 0.55),
        (5.0, 6.0, 0.2),
        (-1.0, 0.05, 0.9),
    ],
)
def test_measure_share_between_interpolates(
    start_s: float, end_s: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Stressor("cpu-fma", 0.5)
    rows = [(0.1 * n, 0.09 * n, 0) for n in range(11)]
    rows += [(1.0 + 0.1 * n, 0.9 + 0.02 * n, 0) for n in range(1, 11)]
    load._processes = [make_process(*rows)]
    monkeypatch.setattr(load, "_poll", lambda: None)
    assert load.measure_share_between(start_s, end_s) == pytest.approx(share)
