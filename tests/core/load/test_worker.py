"""Tests of the control loop of a stressor process, on a simulated clock and device."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core.load import worker as worker_module
from sparseflow.core.load.worker import DutyController, Worker


class SimulatedDevice:
    """A clock, and a workload that gets `share` of the time it works."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.share = 1.0
        self.total_busy_s = 0.0
        self.shared = False

    def monotonic(self) -> float:
        return self.time_s

    def run_until(self, end_s: float) -> None:
        self.total_busy_s += self.share * max(end_s - self.time_s, 0.0)
        self.time_s = max(end_s, self.time_s)

    def busy_s(self) -> float:
        return self.total_busy_s

    def wait(self, seconds: float) -> bool:
        self.time_s += seconds
        return False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimulatedDevice:
    device = SimulatedDevice()
    monkeypatch.setattr(worker_module, "time", device)
    return device


def make_worker(device: SimulatedDevice, level: float) -> tuple[Worker, list[dict[str, Any]]]:
    reports: list[dict[str, Any]] = []
    worker = Worker(device, level, reports.append, seed=0)
    worker._interrupt.wait = device.wait  # type: ignore[method-assign,assignment]
    return worker, reports


def compute_share(reports: list[dict[str, Any]]) -> float:
    first, last = reports[-11], reports[-1]
    return (last["busy_s"] - first["busy_s"]) / (last["time_s"] - first["time_s"])


@pytest.mark.parametrize("level", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("share", [1.0, 0.95])
def test_run_cycle_reaches_level(device: SimulatedDevice, level: float, share: float) -> None:
    device.share = share
    worker, reports = make_worker(device, level)
    for _ in range(80):
        worker.run_cycle()
    assert compute_share(reports) == pytest.approx(level, abs=0.02)
    lengths_s = [b["time_s"] - a["time_s"] for a, b in pairwise(reports)]
    # Cycle lengths vary, so that cycles do not synchronize with the measured work.
    assert max(lengths_s) - min(lengths_s) > 0.01
    assert sum(lengths_s) / len(lengths_s) == pytest.approx(0.1, rel=0.1)


def test_run_cycle_applies_and_reports_commands(device: SimulatedDevice) -> None:
    worker, reports = make_worker(device, 0.3)
    worker.run_cycle()
    assert (reports[-1]["command"], reports[-1]["level"], reports[-1]["hold"]) == (0, 0.3, False)
    worker.send({"command": 1, "level": 0.6, "hold": False})
    worker.send({"command": 2, "hold": True})
    worker.run_cycle()
    assert (reports[-1]["command"], reports[-1]["level"], reports[-1]["hold"]) == (2, 0.6, True)
    assert device.shared
    # Other work takes half of the device: a frozen duty does not change, and the smaller share is reported.
    device.share = 0.5
    for _ in range(20):
        worker.run_cycle()
    assert reports[-1]["duty"] == 0.6 and compute_share(reports) == pytest.approx(0.3, abs=0.02)
    worker.send({"command": 3, "hold": False})
    for _ in range(40):
        worker.run_cycle()
    assert reports[-1]["duty"] > 0.9 and not device.shared


def test_run_cycle_interrupted_keeps_duty(device: SimulatedDevice) -> None:
    worker, reports = make_worker(device, 0.5)
    worker.run_cycle()
    duty = reports[-1]["duty"]
    worker._interrupt.wait = lambda seconds: True  # type: ignore[method-assign,assignment]
    worker.run_cycle()
    assert reports[-1]["duty"] == duty


def run_controller(controller: DutyController, gain: float, offset: float = 0.0, cycles: int = 60) -> float:
    share = 0.0
    for _ in range(cycles):
        share = min(max(gain * controller.duty + offset, 0.0), 1.0)
        controller.update(share)
    return share


@given(level=st.sampled_from([0.1, 0.3, 0.6, 0.9]), gain=st.floats(0.75, 1.3), offset=st.floats(-0.05, 0.05))
def test_controller_converges_to_level(level: float, gain: float, offset: float) -> None:
    reachable = min(max(gain + offset, 0.0), 1.0)
    share = run_controller(DutyController(level), gain, offset)
    assert share == pytest.approx(min(level, reachable), abs=0.01)


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_controller_extreme_levels_are_exact(level: float) -> None:
    controller = DutyController(level)
    run_controller(controller, gain=0.7, offset=0.01)
    assert controller.duty == level


def test_controller_unreachable_level_does_not_wind_up() -> None:
    controller = DutyController(0.6)
    run_controller(controller, gain=0.3, cycles=500)
    assert controller.duty == 1.0
    # Once the device is free again, the duty recovers within two seconds.
    run_controller(controller, gain=1.0, cycles=15)
    assert controller.duty == pytest.approx(0.6, abs=0.05)


def test_controller_hold_freezes_duty() -> None:
    controller = DutyController(0.6)
    run_controller(controller, gain=0.8)
    before = controller.duty
    controller.hold = True
    run_controller(controller, gain=0.2)
    assert controller.duty == before == pytest.approx(0.75, abs=0.01)
    controller.hold = False
    assert run_controller(controller, gain=0.8, cycles=1) == pytest.approx(0.6, abs=0.01)


def test_controller_set_level_resets_correction() -> None:
    controller = DutyController(0.9)
    run_controller(controller, gain=0.5)
    controller.set_level(0.3)
    assert controller.duty == 0.3
