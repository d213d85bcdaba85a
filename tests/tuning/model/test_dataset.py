"""Labels as groups, and batches drawn from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparseflow.errors import InputError
from sparseflow.tuning.measure.labels import Rows, Task
from sparseflow.tuning.model import dataset as module
from sparseflow.tuning.model.dataset import SLOWEST, Batch, Dataset, Sampling
from sparseflow.tuning.model.net.statistics import PATTERN, TASK, WIDTH, WITHOUT_MATRIX
from sparseflow.tuning.schedule.schedule import Schedule
from tests.tuning.synthetic_labels import MadeUp, made_up


class Changed(MadeUp):
    """Labels whose rows are what `change` makes of them."""

    def __init__(self, change) -> None:
        super().__init__()
        self._change = change

    def rows(self, task: Task) -> Rows:
        return self._change(task, super().rows(task))


def test_a_group_holds_a_task() -> None:
    labels, data = MadeUp(), made_up()
    assert len(data.groups) == 6 and data.schedules == sum(
        len(labels.rows(t).schedules) for t in labels.tasks
    )
    assert data.families == ("f0", "f1", "f2") and data.patterns == ("0", "1")
    for task, group in zip(labels.tasks, data.groups, strict=True):
        rows = labels.rows(task)
        assert group.task == task
        again = data.encoder.encode([Schedule.parse(line) for line in rows.schedules], *_of(task))
        np.testing.assert_array_equal(again, group.ids)
        np.testing.assert_allclose(group.labels, rows.latency_ms.min() / rows.latency_ms, rtol=1e-6)
        np.testing.assert_allclose(group.weights, rows.repeats / (rows.repeats + 1), rtol=1e-6)
        assert group.statistics.shape == (WIDTH,)
        assert group.matrix == (task.pattern or task.matrix)


def _of(task: Task):
    from sparseflow.tuning.schedule.operators import OPERATORS

    return OPERATORS[task.operator], task.extents()


def test_the_slow_end_is_clipped_and_ratios_are_preferred_where_all_are_known() -> None:
    def change(task: Task, rows: Rows) -> Rows:
        ratio = np.linspace(1.0, 1000.0, len(rows.schedules))
        if task.matrix == "m0":
            ratio[3] = np.nan
        return replace(rows, ratio=ratio)

    data = Dataset.of([Changed(change)])
    for group in data.groups:
        by_ratio = group.task.matrix != "m0"
        assert (group.latency[-1] == 1000.0) == by_ratio
        assert group.labels.max() == 1.0
        if by_ratio:
            assert group.labels.min() == np.float32(SLOWEST)


def test_tasks_with_less_than_two_schedules_are_left_out() -> None:
    def change(task: Task, rows: Rows) -> Rows:
        keep = {"m0": 0, "m1": 1}.get(task.matrix, 12)
        return replace(
            rows,
            schedules=rows.schedules[:keep],
            **{name: getattr(rows, name)[:keep] for name in ("latency_ms", "ratio", "repeats")},
        )

    assert {group.task.matrix for group in Dataset.of([Changed(change)]).groups} == {"m2"}
    with pytest.raises(InputError, match="none of 6 tasks"):
        Dataset.of([Changed(lambda task, rows: change(replace(task, matrix="m0"), rows))])


def test_progress_is_told() -> None:
    told: list[tuple[str, float]] = []
    Dataset.of([MadeUp(["spmv"])], progress=lambda what, share: told.append((what, share)))
    assert told == [("reading spmv on m0", 0.0), ("reading spmv on m1", 1 / 3), ("reading spmv on m2", 2 / 3)]


def test_families_are_held_out_whole() -> None:
    data = made_up()
    learnt, held = data.hold_out(["f1"])
    assert learnt.families == ("f0", "f2") and held.families == ("f1",)
    assert len(learnt.groups) + len(held.groups) == len(data.groups)
    assert learnt.encoder is held.encoder is data.encoder
    assert held.patterns == ("1",) and held.names("1") == "m1"
    with pytest.raises(InputError, match="family g; there are: f0, f1, f2"):
        data.hold_out(["g"])
    with pytest.raises(InputError, match="none of 6 tasks is left"):
        data.hold_out(data.families)


def test_patterns_are_coarsened_once() -> None:
    data = made_up()
    cells = data.cells("0", 16)
    assert len(cells.coords) <= 16 and data.cells("0", 16) is cells
    assert len(data.cells("0", 64).coords) > 16


def _sane(batch: Batch, data: Dataset) -> None:
    tasks, schedules, _ = batch.ids.shape
    assert batch.labels.shape == batch.weights.shape == (tasks, schedules)
    assert batch.which.shape == (tasks,) and batch.statistics.shape == (tasks, WIDTH)
    assert len(set(batch.patterns)) == len(batch.patterns)
    assert set(batch.which) - {-1} == set(range(len(batch.patterns)))
    there = batch.weights > 0
    np.testing.assert_array_equal(batch.ids.any(2), there)
    for at in range(tasks):
        rows = [tuple(row) for row in batch.ids[at, there[at]]]
        assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("schedules", [4, 100])
def test_a_mixed_batch_has_several_tasks_of_several_matrices(schedules: int) -> None:
    data = made_up()
    batch = data.batch(
        Sampling(schedules=schedules, matrices=2, tasks=5, hidden=0.0), np.random.default_rng(0)
    )
    _sane(batch, data)
    assert batch.ids.shape[:2] == (4, min(schedules, 12))
    same = data.batch(
        Sampling(schedules=schedules, matrices=2, tasks=5, hidden=0.0), np.random.default_rng(0)
    )
    for name in vars(batch):
        np.testing.assert_array_equal(getattr(same, name), getattr(batch, name))


def test_a_naive_batch_has_one_task_and_every_task_has_its_turn() -> None:
    data, seen = made_up(), set()
    for seed in range(60):
        batch = data.batch(Sampling(mode="naive", schedules=5, hidden=0.0), np.random.default_rng(seed))
        _sane(batch, data)
        assert batch.ids.shape[:2] == (1, 5)
        seen.add(tuple(batch.statistics[0]))
    assert len(seen) == 6
    assert Sampling(mode="naive", schedules=5).most == 5


def test_hidden_matrices_leave_what_is_computed() -> None:
    data = made_up()
    mixed = Sampling(matrices=3, tasks=2, hidden=1.0)
    batch = data.batch(mixed, np.random.default_rng(0))
    assert batch.patterns == () and (batch.which == -1).all()
    open_ = data.batch(replace(mixed, hidden=0.0), np.random.default_rng(0))
    assert (open_.which >= 0).sum() == 4
    assert (batch.statistics == open_.statistics * WITHOUT_MATRIX).all()
    assert not batch.statistics[:, [0, -1]].any() and open_.statistics[:, 0].all()
    assert batch.statistics[:, TASK.index("threads")].all()
    assert data.groups[0].statistics[-len(PATTERN) :].all()


def test_fast_schedules_are_drawn_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made_up(operators=["spmv"], matrices=1, schedules=40)
    naive = Sampling(mode="naive", schedules=8)

    def mean() -> float:
        return float(
            np.mean([data.batch(naive, np.random.default_rng(at)).labels.mean() for at in range(200)])
        )

    favoured = mean()
    monkeypatch.setattr(module, "FAVOUR", 0.0)
    assert favoured > mean() == pytest.approx(data.groups[0].labels.mean(), abs=0.02)


@pytest.mark.parametrize(
    "wrong", [{"mode": "all"}, {"schedules": 1}, {"matrices": 0}, {"tasks": 1.5}, {"hidden": 1.1}]
)
def test_sampling_is_checked(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Sampling(**wrong)
