"""Background load in processes of its own. Levels are low: other work on the machine must not fail a test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from sparseflow.core.load import Stressor, stressor
from sparseflow.errors import DeviceError, InputError, RunError

PATIENCE_S = 120.0


def gone(pid: int) -> bool:
    """It ended; a zombie that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def wait_for(pid: int) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return gone(pid)


def what_it_says_at_the_end(load: Stressor) -> str:
    """The error that tells of a process's end; a process is not over before the last of its threads is."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            load.measure_share()
        except RunError as error:
            if "ended by itself" in str(error):
                return str(error)
        time.sleep(0.05)
    return "nothing"


def test_it_reaches_a_level_and_another_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cpu = min(os.sched_getaffinity(0))
    with Stressor("cpu-fma", 0.06, cpus={cpu}) as load:
        (pid,) = load.pids
        assert os.sched_getaffinity(pid) == {cpu}
        assert load.wait_until_steady(PATIENCE_S) == pytest.approx(0.06, abs=0.05)
        assert 0.0 < load.measure_share(0.5) < 1.0
        load.set_level(0.12)
        assert load.wait_until_steady(PATIENCE_S) == pytest.approx(0.12, abs=0.05)
        begin = time.monotonic()
        with load.hold_duty():
            time.sleep(0.3)
            assert 0.0 <= load.measure_share_between(begin, time.monotonic()) <= 1.0
        load.set_level(0.0)
        assert load.wait_until_steady(PATIENCE_S) < 0.05
        assert not list(tmp_path.iterdir()), "a kill would leave it behind"
    assert wait_for(pid)
    load.close()
    with pytest.raises(RunError, match="not running"):
        load.measure_share()


def test_a_level_out_of_reach_names_what_was_asked_and_achieved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stressor, "TOLERANCE", -1.0)
    with Stressor("cpu-stream", 0.15, workers=1) as load:
        end = time.monotonic() + PATIENCE_S
        while None in load.worker_shares():
            assert time.monotonic() < end, "nothing was achieved"
            time.sleep(0.05)
        with pytest.raises(
            RunError, match=r"asked for a level of 0\.15 and achieved, after 1 s: CPU \d+ 0\.\d\d"
        ):
            load.wait_until_steady(1.0)


def test_it_dies_with_whoever_started_it() -> None:
    script = (
        "import os, signal; from sparseflow.core.load import Stressor\n"
        "load = Stressor('cpu-fma', 0.05); load.start(); print(*load.pids, flush=True); signal.pause()"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == len(os.sched_getaffinity(0)) and not any(gone(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert all(wait_for(pid) for pid in pids)


def test_a_process_that_is_killed_is_an_error() -> None:
    with Stressor("cpu-fma", 0.05, workers=1) as load:
        os.kill(load.pids[0], signal.SIGKILL)
        assert "ended by itself: it ended with code -9" in what_it_says_at_the_end(load)
        with pytest.raises(RunError, match="ended by itself"):
            load.set_level(0.1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said() -> None:
    load = Stressor("gpu-matmul", 0.3)
    with pytest.raises(DeviceError, match=r"gpu-matmul.*sees none here"):
        load.start()
    assert load.pids == ()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpu-matmul", "gpu-copy"])
def test_a_gpu_is_loaded_as_asked(kind: str) -> None:
    with Stressor(kind, 0.3) as load:
        for level in (0.3, 0.6, 0.9):
            load.set_level(level)
            assert load.wait_until_steady(PATIENCE_S) == pytest.approx(level, abs=0.05)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"kind": "cpu-burn", "level": 0.3}, "kind"),
        ({"kind": "cpu-fma", "level": 1.2}, "level"),
        ({"kind": "cpu-fma", "level": float("nan")}, "level"),
        ({"kind": "cpu-fma", "level": 0.3, "workers": 0}, "workers"),
        ({"kind": "cpu-fma", "level": 0.3, "workers": 100_000}, "workers"),
        ({"kind": "cpu-fma", "level": 0.3, "cpus": []}, "cpus"),
        ({"kind": "cpu-fma", "level": 0.3, "period_s": 0.0}, "period_s"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: dict[str, object], named: str) -> None:
    with pytest.raises(InputError, match=f"`{named}`"):
        Stressor(**arguments)  # type: ignore[arg-type]


def test_a_cpu_that_is_not_there_is_said() -> None:
    with pytest.raises(DeviceError, match="CPU 9999"):
        Stressor("cpu-fma", 0.3, cpus={9999}).start()


def reported(*rows: tuple[float, float, int]) -> stressor._Process:
    process = stressor._Process(what="CPU 0", handle=None, report=None, errors=None)  # type: ignore[arg-type]
    for at_s, got_s, order in rows:
        process.at_s.append(at_s)
        process.got_s.append(got_s)
        process.order.append(order)
    return process


def test_a_share_is_of_the_present_order_only() -> None:
    rows = [(0.1 * n, 0.09 * n, 1) for n in range(20)] + [
        (2.0 + 0.1 * n, 1.8 + 0.03 * n, 2) for n in range(9)
    ]
    assert stressor._share_under(reported(*rows[:20]), 2) is None
    assert stressor._share_under(reported(*rows), 2) is None
    rows += [(2.9 + 0.1 * n, 2.07 + 0.03 * n, 2) for n in range(5)]
    assert stressor._share_under(reported(*rows), 2) == pytest.approx(0.3)
    assert stressor._share_under(reported(*rows[:20]), 1) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0.0, 2.0, 0.55),
        (0.0, 1.0, 0.9),
        (1.0, 2.0, 0.2),
        (0.5, 1.5, 0.55),
        (5.0, 6.0, 0.2),
        (-1.0, 0.05, 0.9),
    ],
)
def test_a_share_between_two_times(
    begin: float, end: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Stressor("cpu-fma", 0.5)
    rows = [(0.1 * n, 0.09 * n, 0) for n in range(11)] + [
        (1.0 + 0.1 * n, 0.9 + 0.02 * n, 0) for n in range(1, 11)
    ]
    load._processes = [reported(*rows)]
    monkeypatch.setattr(load, "_look", lambda: None)
    assert load.measure_share_between(begin, end) == pytest.approx(expected)
