"""Tests of `codesign.joint.accuracy_guard`."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from sparseflow.codesign.design.config import HwLossSchedule
from sparseflow.codesign.joint.accuracy_guard import AccuracyGuard
from sparseflow.errors import InputError

# Sixteenths are exact, so that "more than epsilon below" is, too.
ACCURACY = st.integers(0, 16).map(lambda n: n / 16)
ACCURACIES = st.lists(ACCURACY, max_size=25)
SCHEDULES = st.builds(
    HwLossSchedule,
    warmup_epochs=st.integers(1, 5),
    ramp_epochs=st.integers(0, 5),
    max_weight=st.sampled_from([0.0, 0.3, 1.0, 7.0]),
    epsilon=st.sampled_from([0.0, 1 / 16, 0.25]),
    good_epochs=st.integers(1, 3),
)


def read_state(guard: AccuracyGuard) -> tuple[Any, ...]:
    return guard.weight, guard.allows_decisions, guard.frozen, guard.reference, guard.epoch


def course(guard: AccuracyGuard, accuracies: list[float]) -> list[float]:
    """The weight in each epoch, before its accuracy is known."""
    rows = []
    for accuracy in accuracies:
        rows.append(guard.weight)
        guard.update(accuracy)
    return rows


def test_weight_follows_warmup_ramp_and_maximum() -> None:
    guard = AccuracyGuard(HwLossSchedule(warmup_epochs=5, ramp_epochs=10, max_weight=2.0))
    weights = course(guard, [0.5] * 20)
    assert weights == pytest.approx([0.0] * 5 + [0.2 * step for step in range(1, 11)] + [2.0] * 5)


def test_default_schedule() -> None:
    schedule = HwLossSchedule()
    assert (schedule.warmup_epochs, schedule.ramp_epochs, schedule.epsilon, schedule.good_epochs) == (
        5,
        10,
        0.01,
        2,
    )


def test_weight_without_ramp_is_maximum() -> None:
    assert course(
        AccuracyGuard(HwLossSchedule(warmup_epochs=2, ramp_epochs=0, max_weight=0.5)), [0.5] * 4
    ) == [0.0, 0.0, 0.5, 0.5]
    assert course(
        AccuracyGuard(HwLossSchedule(warmup_epochs=1, ramp_epochs=1, max_weight=0.5)), [0.5] * 3
    ) == [0.0, 0.5, 0.5]


def test_initial_state() -> None:
    guard = AccuracyGuard(HwLossSchedule())
    assert read_state(guard) == (0.0, False, False, None, 0) and guard.num_good_epochs == 0


def test_reference_is_set_at_end_of_warmup() -> None:
    guard = AccuracyGuard(HwLossSchedule(warmup_epochs=3, ramp_epochs=2))
    for accuracy in (0.9, 0.1):
        guard.update(accuracy)
        assert guard.reference is None and not guard.allows_decisions and not guard.frozen
    guard.update(0.6)
    assert guard.reference == 0.6 and guard.allows_decisions and guard.weight == 0.5
    for accuracy in (0.99, 0.1, 0.7, 1.0):
        guard.update(accuracy)
        assert guard.reference == 0.6


def test_violation_freezes_until_enough_good_epochs() -> None:
    guard = AccuracyGuard(
        HwLossSchedule(warmup_epochs=1, ramp_epochs=4, max_weight=1.0, epsilon=0.125, good_epochs=2)
    )
    guard.update(0.75)
    rows = [  # accuracy, then weight, frozen, good
        (0.625, 0.5, False, 0),  # epsilon below is not more than epsilon below
        (0.5, 0.0, True, 0),
        (0.75, 0.0, True, 1),
        (0.5, 0.0, True, 0),  # good epochs must be in a row
        (0.625, 0.0, True, 1),
        (0.625, 1.0, False, 2),  # the schedule has gone on meanwhile
        (0.5, 0.0, True, 0),  # and counting begins anew
        (1.0, 0.0, True, 1),
        (1.0, 1.0, False, 2),
        (0.0, 0.0, True, 0),
    ]
    for row in rows:
        guard.update(row[0])
        assert (row[0], guard.weight, guard.frozen, guard.num_good_epochs) == row
        assert guard.allows_decisions is not guard.frozen
    assert guard.epoch == 11 and guard.reference == 0.75


def test_weight_after_violation_follows_schedule() -> None:
    guard = AccuracyGuard(
        HwLossSchedule(warmup_epochs=2, ramp_epochs=10, max_weight=1.0, epsilon=0.0, good_epochs=2)
    )
    weights = course(guard, [0.5, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5])
    assert weights == pytest.approx([0.0, 0.0, 0.1, 0.2, 0.0, 0.0, 0.5])


def test_no_violation_during_warmup() -> None:
    guard = AccuracyGuard(HwLossSchedule(warmup_epochs=4, ramp_epochs=1))
    assert course(guard, [1.0, 0.0, 1.0, 0.0, 0.0]) == [0.0] * 4 + [1.0]
    assert not guard.frozen and guard.reference == 0.0


def second_reading(schedule: HwLossSchedule, accuracies: list[float]) -> tuple[float, bool, bool]:
    """Weight, whether frozen and whether decisions may be made after these epochs, from the history alone."""
    past = accuracies[schedule.warmup_epochs :]
    if len(accuracies) < schedule.warmup_epochs:
        return 0.0, False, False
    bad = [value < accuracies[schedule.warmup_epochs - 1] - schedule.epsilon for value in past]
    good_at_the_end = next((index for index, item in enumerate(reversed(bad)) if item), None)
    frozen = good_at_the_end is not None and good_at_the_end < schedule.good_epochs
    share = 1.0 if schedule.ramp_epochs == 0 else min(1.0, (len(past) + 1) / schedule.ramp_epochs)
    return (0.0 if frozen else schedule.max_weight * share), frozen, not frozen


@given(SCHEDULES, ACCURACIES)
@budget(max_examples=50, deadline=None)
def test_guard_matches_second_implementation(schedule: HwLossSchedule, accuracies: list[float]) -> None:
    guard, references = AccuracyGuard(schedule), []
    for epoch, accuracy in enumerate(accuracies, start=1):
        guard.update(accuracy)
        weight, frozen, may_decide = second_reading(schedule, accuracies[:epoch])
        assert guard.weight == pytest.approx(weight)
        assert (guard.frozen, guard.allows_decisions, guard.epoch) == (frozen, may_decide, epoch)
        if guard.frozen or guard.reference is None:
            assert guard.weight == 0.0 and not guard.allows_decisions
        assert 0.0 <= guard.weight <= schedule.max_weight
        references.append(guard.reference)
    # Once fixed, a reference never changes.
    assert references[: schedule.warmup_epochs - 1] == [None] * len(references[: schedule.warmup_epochs - 1])
    assert len(set(references[schedule.warmup_epochs - 1 :])) <= 1


@given(SCHEDULES, ACCURACIES)
@budget(max_examples=30, deadline=None)
def test_properties_change_nothing(schedule: HwLossSchedule, accuracies: list[float]) -> None:
    looked, blind = AccuracyGuard(schedule), AccuracyGuard(schedule)
    for accuracy in accuracies:
        assert read_state(looked) == read_state(looked) and looked.state_dict() == looked.state_dict()
        looked.update(accuracy)
        blind.update(accuracy)
    assert looked.state_dict() == blind.state_dict()


@given(SCHEDULES, ACCURACIES, ACCURACIES)
@budget(max_examples=50, deadline=None)
def test_restored_guard_continues_identically(
    schedule: HwLossSchedule, before: list[float], after: list[float]
) -> None:
    guard, other = AccuracyGuard(schedule), AccuracyGuard(schedule)
    course(guard, before)
    course(other, [1.0, 0.0, 0.5])  # whatever it was, it goes on from the state
    state = json.loads(json.dumps(guard.state_dict()))
    saved = json.dumps(state)
    other.load_state_dict(state)
    assert read_state(other) == read_state(guard) and other.state_dict() == guard.state_dict()
    for accuracy in after:
        guard.update(accuracy)
        other.update(accuracy)
        assert read_state(other) == read_state(guard) and other.num_good_epochs == guard.num_good_epochs
    assert json.dumps(state) == saved


def test_load_state_of_other_schedule_is_refused() -> None:
    guard, other = (
        AccuracyGuard(HwLossSchedule(warmup_epochs=1)),
        AccuracyGuard(HwLossSchedule(warmup_epochs=3, max_weight=9.0)),
    )
    guard.update(0.5)
    try:
        other.load_state_dict(guard.state_dict())
    except InputError:
        return
    assert other.weight == guard.weight == pytest.approx(0.1)


def test_state_dict_is_a_copy() -> None:
    guard = AccuracyGuard(HwLossSchedule(warmup_epochs=1))
    guard.update(0.5)
    state = guard.state_dict()
    assert state["schedule"]["warmup_epochs"] == 1 and state["reference"] == 0.5
    guard.update(0.0)
    assert state["frozen"] is False and state["epoch"] == 1


@pytest.mark.parametrize("accuracy", [-0.01, 1.01, 95.0, math.nan, math.inf, -math.inf])
def test_invalid_accuracy_is_refused_without_change(accuracy: float) -> None:
    guard = AccuracyGuard(HwLossSchedule(warmup_epochs=1))
    for _ in range(2):
        before = guard.state_dict()
        with pytest.raises(InputError, match=r"\(=.*\)"):
            guard.update(accuracy)
        assert guard.state_dict() == before
        guard.update(0.5)


@pytest.mark.parametrize("accuracy", [0.0, 1.0])
def test_update_accepts_accuracy_of_zero_and_one(accuracy: float) -> None:
    guard = AccuracyGuard(HwLossSchedule(warmup_epochs=1))
    guard.update(accuracy)
    assert guard.reference == accuracy and guard.weight > 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"warmup_epochs": 0}, {"warmup_epochs": -1}, {"ramp_epochs": -1}, {"good_epochs": 0},
        {"max_weight": -0.1}, {"max_weight": math.nan}, {"max_weight": math.inf},
        {"epsilon": -0.01}, {"epsilon": 1.1}, {"epsilon": math.nan},
    ],
)  # fmt: skip
def test_invalid_schedule_is_refused(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InputError, match=rf"`{name}` \(={changes[name]}\)"):
        HwLossSchedule(**changes)
