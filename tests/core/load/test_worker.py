"""The loop of one process, on a clock and a device of our own making."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from sparseflow.core.load import worker as module
from sparseflow.core.load.worker import Worker


class Device:
    """A clock, and work on a device that gives `share` of the time that is worked."""

    def __init__(self) -> None:
        self.now = 100.0
        self.share = 1.0
        self.got = 0.0
        self.held = False

    def monotonic(self) -> float:
        return self.now

    def burn(self, until_s: float) -> None:
        self.got += self.share * max(until_s - self.now, 0.0)
        self.now = max(until_s, self.now)

    def got_s(self) -> float:
        return self.got

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(module, "time", device)
    return device


def started(device: Device, level: float) -> tuple[Worker, list[dict[str, Any]]]:
    reports: list[dict[str, Any]] = []
    worker = Worker(device, level, 0.1, reports.append, seed=0)
    worker._ordered.wait = device.wait  # type: ignore[method-assign,assignment]
    return worker, reports


def share(reports: list[dict[str, Any]]) -> float:
    first, last = reports[-11], reports[-1]
    return (last["got_s"] - first["got_s"]) / (last["at_s"] - first["at_s"])


@pytest.mark.parametrize("level", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("given", [1.0, 0.95])
def test_it_gets_what_was_asked(device: Device, level: float, given: float) -> None:
    device.share = given
    worker, reports = started(device, level)
    for _ in range(80):
        worker.cycle()
    assert share(reports) == pytest.approx(level, abs=0.02)
    lengths = [b["at_s"] - a["at_s"] for a, b in pairwise(reports)]
    # Cycles are not all of one length, or a measured rhythm could lock into them.
    assert max(lengths) - min(lengths) > 0.01 and sum(lengths) / len(lengths) == pytest.approx(0.1, rel=0.1)


def test_orders_are_obeyed_and_named_in_the_report(device: Device) -> None:
    worker, reports = started(device, 0.3)
    worker.cycle()
    assert (reports[-1]["order"], reports[-1]["level"], reports[-1]["held"]) == (0, 0.3, False)
    worker.order({"order": 1, "level": 0.6, "held": False})
    worker.order({"order": 2, "held": True})
    worker.cycle()
    assert (reports[-1]["order"], reports[-1]["level"], reports[-1]["held"]) == (2, 0.6, True)
    assert device.held
    # Somebody takes half of the device: the duty of a held load does not move, and what it got is told.
    device.share = 0.5
    for _ in range(20):
        worker.cycle()
    assert reports[-1]["duty"] == 0.6 and share(reports) == pytest.approx(0.3, abs=0.02)
    worker.order({"order": 3, "held": False})
    for _ in range(40):
        worker.cycle()
    assert reports[-1]["duty"] > 0.9 and not device.held


def test_a_rest_that_is_cut_short_is_no_measurement(device: Device) -> None:
    worker, reports = started(device, 0.5)
    worker.cycle()
    duty = reports[-1]["duty"]
    worker._ordered.wait = lambda seconds: True  # type: ignore[method-assign,assignment]
    worker.cycle()
    assert reports[-1]["duty"] == duty
