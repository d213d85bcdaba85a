"""Training data: groups of labels, batches and cell limits."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from sparseflow.errors import InputError
from sparseflow.tuning.measure.labels import ScheduleLatencies, TuningTask
from sparseflow.tuning.model import dataset as module
from sparseflow.tuning.model.dataset import (
    MIN_LABEL,
    BatchSampling,
    CellLimits,
    RankingDataset,
    TrainingBatch,
)
from sparseflow.tuning.model.net.statistics import (
    HIDDEN_MATRIX_MASK,
    NUM_FEATURES,
    PATTERN_FEATURES,
    TASK_FEATURES,
)
from sparseflow.tuning.schedule.schedule import Schedule
from tests.tuning.synthetic_labels import MadeUp, change, made_up


class Changed(MadeUp):
    """Labels whose rows are the results of a function of task and rows."""

    def __init__(self, transform) -> None:
        super().__init__()
        self._change = transform

    def read_latencies(self, task: TuningTask) -> ScheduleLatencies:
        return self._change(task, super().read_latencies(task))


def test_group_has_task_data() -> None:
    labels, data = MadeUp(), made_up()
    assert len(data.groups) == 6 and data.num_schedules == sum(
        len(labels.read_latencies(t).schedules) for t in labels.tasks
    )
    assert data.families == ("f0", "f1", "f2") and data.patterns == ("0", "1")
    for task, group in zip(labels.tasks, data.groups, strict=True):
        rows = labels.read_latencies(task)
        assert group.task == task
        ids = data.encoder.encode([Schedule.parse(line) for line in rows.schedules], *_score_loss(task))
        np.testing.assert_array_equal(ids, group.ids)
        np.testing.assert_allclose(group.labels, rows.latency_ms.min() / rows.latency_ms, rtol=1e-6)
        np.testing.assert_allclose(group.weights, rows.repeats / (rows.repeats + 1), rtol=1e-6)
        assert group.statistics.shape == (NUM_FEATURES,)
        assert group.matrix == (task.pattern or task.matrix)


def _score_loss(task: TuningTask):
    from sparseflow.tuning.schedule.operators import OPERATORS

    return OPERATORS[task.operator], task.extents()


def test_labels_are_clipped_and_prefer_ratios() -> None:
    def change(task: TuningTask, rows: ScheduleLatencies) -> ScheduleLatencies:
        ratio = np.linspace(1.0, 1000.0, len(rows.schedules))
        if task.matrix == "m0":
            ratio[3] = np.nan
        return replace(rows, ratio=ratio)

    data = RankingDataset.from_label_sets([Changed(change)])
    for group in data.groups:
        by_ratio = group.task.matrix != "m0"
        assert (group.latency[-1] == 1000.0) == by_ratio
        assert group.labels.max() == 1.0
        if by_ratio:
            assert group.labels.min() == np.float32(MIN_LABEL)


def test_tasks_with_one_schedule_are_dropped() -> None:
    def change(task: TuningTask, rows: ScheduleLatencies) -> ScheduleLatencies:
        keep = {"m0": 0, "m1": 1}.get(task.matrix, 12)
        return replace(
            rows,
            schedules=rows.schedules[:keep],
            **{name: getattr(rows, name)[:keep] for name in ("latency_ms", "ratio", "repeats")},
        )

    assert {group.task.matrix for group in RankingDataset.from_label_sets([Changed(change)]).groups} == {"m2"}
    with pytest.raises(InputError):
        RankingDataset.from_label_sets([Changed(lambda task, rows: change(replace(task, matrix="m0"), rows))])


def test_progress_is_reported() -> None:
    messages: list[tuple[str, float]] = []
    RankingDataset.from_label_sets(
        [MadeUp(["spmv"])], progress=lambda item, share: messages.append((item, share))
    )
    assert messages == [
        ("reading spmv on m0", 0.0),
        ("reading spmv on m1", 1 / 3),
        ("reading spmv on m2", 2 / 3),
    ]


def test_hold_out_keeps_families_together() -> None:
    data = made_up()
    train_data, held_out = data.hold_out(["f1"])
    assert train_data.families == ("f0", "f2") and held_out.families == ("f1",)
    assert len(train_data.groups) + len(held_out.groups) == len(data.groups)
    assert train_data.encoder is held_out.encoder is data.encoder
    assert held_out.patterns == ("1",) and held_out.list_matrix_names("1") == "m1"
    with pytest.raises(InputError):
        data.hold_out(["g"])
    with pytest.raises(InputError):
        data.hold_out(data.families)


def test_cells_are_cached() -> None:
    data = made_up()
    cells = data.get_cells("0", 16)
    assert len(cells.coords) <= 16 and data.get_cells("0", 16) is cells
    assert len(data.get_cells("0", 64).coords) > 16


def _sane(batch: TrainingBatch, data: RankingDataset) -> None:
    tasks, schedules, _ = batch.ids.shape
    assert batch.labels.shape == batch.weights.shape == (tasks, schedules)
    assert batch.pattern_index.shape == (tasks,) and batch.statistics.shape == (tasks, NUM_FEATURES)
    assert len(set(batch.patterns)) == len(batch.patterns)
    assert set(batch.pattern_index) - {-1} == set(range(len(batch.patterns)))
    present = batch.weights > 0
    np.testing.assert_array_equal(batch.ids.any(2), present)
    for index in range(tasks):
        rows = [tuple(row) for row in batch.ids[index, present[index]]]
        assert len(set(rows)) == len(rows)


@pytest.mark.parametrize("schedules", [4, 100])
def test_mix_batch_has_several_matrices(schedules: int) -> None:
    data = made_up()
    batch = data.batch(
        BatchSampling(schedules=schedules, matrices=2, tasks=5, hidden_fraction=0.0), np.random.default_rng(0)
    )
    _sane(batch, data)
    assert batch.ids.shape[:2] == (4, min(schedules, 12))
    same = data.batch(
        BatchSampling(schedules=schedules, matrices=2, tasks=5, hidden_fraction=0.0), np.random.default_rng(0)
    )
    for name in vars(batch):
        np.testing.assert_array_equal(getattr(same, name), getattr(batch, name))


def test_naive_batch_has_one_task() -> None:
    data, observed = made_up(), set()
    for seed in range(60):
        batch = data.batch(
            BatchSampling(mode="naive", schedules=5, hidden_fraction=0.0), np.random.default_rng(seed)
        )
        _sane(batch, data)
        assert batch.ids.shape[:2] == (1, 5)
        observed.add(tuple(batch.statistics[0]))
    assert len(observed) == 6
    assert BatchSampling(mode="naive", schedules=5).max_schedules == 5


def test_hidden_matrices_keep_task_features() -> None:
    data = made_up()
    mixed = BatchSampling(matrices=3, tasks=2, hidden_fraction=1.0)
    batch = data.batch(mixed, np.random.default_rng(0))
    assert batch.patterns == () and (batch.pattern_index == -1).all()
    open_ = data.batch(change(mixed, hidden_fraction=0.0), np.random.default_rng(0))
    assert (open_.pattern_index >= 0).sum() == 4
    assert (batch.statistics == open_.statistics * HIDDEN_MATRIX_MASK).all()
    assert not batch.statistics[:, [0, -1]].any() and open_.statistics[:, 0].all()
    assert batch.statistics[:, TASK_FEATURES.index("threads")].all()
    assert data.groups[0].statistics[-len(PATTERN_FEATURES) :].all()


def test_fast_schedules_are_sampled_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made_up(operators=["spmv"], matrices=1, schedules=40)
    naive = BatchSampling(mode="naive", schedules=8)

    def mean() -> float:
        return float(
            np.mean([data.batch(naive, np.random.default_rng(index)).labels.mean() for index in range(200)])
        )

    favoured = mean()
    monkeypatch.setattr(module, "LABEL_SAMPLING_FRACTION", 0.0)
    assert favoured > mean() == pytest.approx(data.groups[0].labels.mean(), abs=0.02)


@pytest.mark.parametrize(
    "wrong", [{"mode": "all"}, {"schedules": 1}, {"matrices": 0}, {"tasks": 1.5}, {"hidden_fraction": 1.1}]
)
def test_sampling_invalid_value_raises(wrong: dict) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        BatchSampling(**wrong)


def test_cell_limits_shrink_halves_largest_then_ignores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_MIN_CELLS", 8)
    data = made_up()
    limits = CellLimits(data, 64)
    sizes = {digest: len(data.get_cells(digest, 64).coords) for digest in ("0", "1")}
    largest = max(sizes, key=sizes.__getitem__)
    with caplog.at_level(logging.WARNING):
        assert limits.shrink(["0", "1"])
    assert limits.limits == {largest: sizes[largest] // 2}
    assert f"the pattern of m{largest} does not fit into memory" in caplog.text
    result = limits.get_cells(largest)
    assert result is not None and len(result.coords) <= sizes[largest] // 2
    with caplog.at_level(logging.WARNING):
        while limits.shrink(["0", "1"]):
            pass
    assert limits.limits == {"0": 0, "1": 0} and limits.get_cells("0") is None
    assert "it is ignored" in caplog.text
    assert not limits.shrink([])


def test_cell_limits_restore() -> None:
    limits = CellLimits(made_up(), 64)
    limits.restore({"0": 16, "1": 0})
    cells = limits.get_cells("0")
    assert cells is not None and len(cells.coords) <= 16
    assert limits.get_cells("1") is None
