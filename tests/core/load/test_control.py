"""The controller, on plants of our own making."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseflow.core.load.control import DutyController


def run(control: DutyController, gain: float, offset: float = 0.0, cycles: int = 60) -> float:
    achieved = 0.0
    for _ in range(cycles):
        achieved = min(max(gain * control.duty + offset, 0.0), 1.0)
        control.update(achieved)
    return achieved


@given(level=st.sampled_from([0.1, 0.3, 0.6, 0.9]), gain=st.floats(0.75, 1.3), offset=st.floats(-0.05, 0.05))
def test_what_is_achieved_becomes_what_was_asked(level: float, gain: float, offset: float) -> None:
    most = min(max(gain + offset, 0.0), 1.0)
    assert run(DutyController(level), gain, offset) == pytest.approx(min(level, most), abs=0.01)


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_nothing_and_everything_are_exact(level: float) -> None:
    control = DutyController(level)
    run(control, gain=0.7, offset=0.01)
    assert control.duty == level


def test_a_level_out_of_reach_winds_nothing_up() -> None:
    control = DutyController(0.6)
    run(control, gain=0.3, cycles=500)
    assert control.duty == 1.0
    # The device is free again: the duty must be back within a second of cycles.
    run(control, gain=1.0, cycles=15)
    assert control.duty == pytest.approx(0.6, abs=0.05)


def test_a_held_duty_stays_and_goes_on_from_there() -> None:
    control = DutyController(0.6)
    run(control, gain=0.8)
    before = control.duty
    control.held = True
    run(control, gain=0.2)
    assert control.duty == before == pytest.approx(0.75, abs=0.01)
    control.held = False
    assert run(control, gain=0.8, cycles=1) == pytest.approx(0.6, abs=0.01)


def test_a_new_level_forgets_the_old_one() -> None:
    control = DutyController(0.9)
    run(control, gain=0.5)
    control.set_level(0.3)
    assert control.duty == 0.3
