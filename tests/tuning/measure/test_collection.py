"""Collection of labels: order of measurements, resuming and failures."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.errors import DeviceError, FileFormatError, InputError, OutputError, RunError
from sparseflow.tuning.measure import collection as collecting
from sparseflow.tuning.measure import collection_log, labels
from sparseflow.tuning.measure.collection import CollectionTarget
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.measure.labels import LabelSet
from sparseflow.tuning.schedule.matrices import SparsityPattern
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import ScheduleSpace
from sparseflow.tuning.search.evolutionary import COLLECTION_STRATEGY

collect = partial(collecting.collect, strategy=COLLECTION_STRATEGY)


def pattern(seed: int = 0) -> SparsityPattern:
    rows, cols = np.nonzero(np.random.default_rng(seed).random((19, 23)) < 0.3)
    return SparsityPattern.from_coords(rows, cols, (19, 23))


def expected(*names: str) -> list[CollectionTarget]:
    return [
        CollectionTarget(operator=operator, matrix=name, pattern=pattern(len(name)), n_cols=n_cols)
        for name in names or ("net1", "graph22")
        for operator, n_cols in (("spmm", 8), ("spmv", None))
    ]


class Made:
    """Deterministic made-up measurements."""

    def __init__(self) -> None:
        self.requests: list[tuple[SparseProblem, Schedule]] = []
        self.opened: list[SparseProblem] = []
        self.disturbed = 0  # number of the next measurements that are disturbed
        self.broken: str | None = None  # operator whose reference fails
        self.unopened: str | None = None  # operator whose reference cannot be built

    def evaluator(self, problem: SparseProblem, reference: Schedule, *, cache_dir: Path | None) -> Any:
        created = self

        class Evaluator:
            def __enter__(self) -> Evaluator:
                if problem.operator.name == created.unopened:
                    raise RunError("no room")
                created.opened.append(problem)
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def measure(self, schedule: Schedule) -> Trial:
                created.requests.append((problem, schedule))
                number = sum(map(ord, str(schedule)))
                broken = problem.operator.name == created.broken
                if broken if schedule == reference else number % 7 == 0:
                    return Trial(schedule=schedule, error="made to fail", seconds={"build": 1.0})
                created.disturbed -= 1
                latency = 1.0 + number % 61 + len(created.requests) / 1024
                return Trial(
                    schedule=schedule, latency_ms=latency, ratio=latency / 9, disturbed=created.disturbed >= 0
                )

        return Evaluator()


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> Made:
    result = Made()
    monkeypatch.setattr(collecting, "ScheduleEvaluator", result.evaluator)
    return result


def rows_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / collection_log.COLLECTION_FILE).read_text().splitlines()
    return [{"task": row["task"], **row["trial"]} for row in map(json.loads, lines) if "task" in row]


def test_collect_measures_real_kernels(tmp_path: Path) -> None:
    messages: list[tuple[str, float]] = []
    item = CollectionTarget(
        operator="sddmm", matrix="net1", pattern=pattern(), n_cols=8, dtype="float64", family="x"
    )
    result = collect([item], tmp_path, schedules=3, threads=1, progress=lambda *all: messages.append(all))
    assert (result.tasks, result.rows, result.added, result.min_rows, result.failed_references) == (
        1,
        3,
        3,
        3,
        {},
    )
    opened = LabelSet.open(tmp_path)
    (task,) = opened.tasks
    assert (task.operator, task.matrix, task.family, task.n_cols) == ("sddmm", "net1", "x", 8)
    assert (task.dtype, task.threads, task.shape, task.nnz) == ("float64", 1, (19, 23), item.pattern.nnz)
    assert task.device and task.pattern == item.pattern.digest()
    rows = opened.read_latencies(task)
    assert (
        rows.schedules
        and (rows.latency_ms > 0).all()
        and (rows.ratio > 0).all()
        and (rows.repeats == 1).all()
    )
    saved = opened.read_pattern(task)
    assert saved is not None and saved.digest() == item.pattern.digest()
    assert len(messages) == 3 and messages[-1][1] == 1.0 and "sddmm on net1" in messages[-1][0]
    assert json.loads(json.dumps(result.to_dict()))["out_dir"] == str(tmp_path)


def test_collect_measures_presets_first_in_rounds(measurements: Made, tmp_path: Path) -> None:
    result = collect(expected(), tmp_path, schedules=20, threads=2)
    assert (result.tasks, result.rows, result.min_rows) == (4, 80, 20)
    rows = rows_of(tmp_path)
    runs = [(task, len(list(group))) for task, group in groupby(row["task"] for row in rows)]
    assert runs == [(task, count) for count in (8, 8, 4) for task in range(4)]
    for name, parent in (("spmm", 0), ("spmv", 1)):
        operator = OPERATORS[name]
        extents = dict(zip(operator.axes, (19, 23, 8), strict=False))
        by_hand = {
            str(build_preset.canonicalize(operator, extents))
            for build_preset in build_presets(operator, extents, 2).values()
        }
        lines = [row["schedule"] for row in rows if row["task"] == parent]
        assert set(lines[: len(by_hand)]) == by_hand and len(set(lines)) == 20
    assert result.failed == sum(row["error"] is not None for row in rows) > 0


def test_collect_mixes_random_and_children(
    measurements: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: Counter[str] = Counter()
    for name in ("sample", "mutate", "crossover"):
        original = getattr(ScheduleSpace, name)

        def counted(*args: Any, _name: str = name, run: Any = original) -> Schedule:
            counts[_name] += 1
            return run(*args)

        monkeypatch.setattr(ScheduleSpace, name, counted)
    collect(expected("a")[:1], tmp_path, schedules=100, threads=2)
    assert 30 <= counts["sample"] <= 70 and counts["mutate"] > 15 and counts["crossover"] > 5


def test_collect_disturbed_trial_is_repeated(measurements: Made, tmp_path: Path) -> None:
    measurements.disturbed = 3  # the first schedule twice, the second once
    result = collect(expected("a")[:1], tmp_path, schedules=2, threads=1)
    first, second = rows_of(tmp_path)
    assert len(measurements.requests) == 4 and result.disturbed == 1
    assert first["disturbed"] and not second["disturbed"]
    latency = [1.0 + sum(map(ord, first["schedule"])) % 61 + number / 1024 for number in (1, 2)]
    assert first["latency_ms"] == min(latency), "the faster of two disturbed trials"


def test_collect_budget_covers_all_tasks(
    measurements: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr(collecting.time, "time", lambda: float(next(ticks)))
    result = collect(expected(), tmp_path, schedules=1000, threads=1, budget_s=90.0)
    counts = Counter(row["task"] for row in rows_of(tmp_path))
    assert set(counts) == set(range(4)) and result.min_rows == min(counts.values())
    assert max(counts.values()) <= 2 * min(counts.values())
    assert result.rows < 90


def test_collect_interrupted_resumes(measurements: Made, tmp_path: Path) -> None:
    def stop(_: str, fraction: float) -> None:
        if fraction > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(expected(), tmp_path, schedules=12, threads=1, progress=stop)
    before = rows_of(tmp_path)
    assert sum(
        len(LabelSet.open(tmp_path).read_latencies(task).schedules) for task in LabelSet.open(tmp_path).tasks
    ) == sum(row["error"] is None for row in before), "an interrupted collection has usable labels"
    measurements.requests.clear()
    result = collect(expected(), tmp_path, schedules=12, threads=1)
    after = rows_of(tmp_path)
    assert after[: len(before)] == before and len(after) == result.rows == 48
    assert len(measurements.requests) == result.added == 48 - len(before)
    assert len({(row["task"], row["schedule"]) for row in after}) == 48
    measurements.requests.clear()
    measurements.opened.clear()
    repeated = collect(expected(), tmp_path, schedules=12, threads=1)
    assert repeated.added == 0 and not measurements.requests and not measurements.opened


def test_collect_more_targets_extend(measurements: Made, tmp_path: Path) -> None:
    collect(expected("net1"), tmp_path, schedules=4, threads=1)
    result = collect(expected("graph22"), tmp_path, schedules=4, threads=1)
    assert (result.tasks, result.rows, result.added) == (2, 16, 8)
    result = collect(expected("net1"), tmp_path, schedules=6, threads=1)
    assert (result.rows, result.added) == (20, 4)
    result = collect(expected("net1"), tmp_path, schedules=4, threads=2)
    assert (result.rows, result.added) == (28, 8), "another number of threads is another task"
    assert len(LabelSet.open(tmp_path).tasks) == 6


def test_collect_renamed_pattern_is_same_task(measurements: Made, tmp_path: Path) -> None:
    twins = [replace(item, matrix=name) for name in ("net1", "mesh9") for item in expected("net1")]
    assert collect(twins, tmp_path, schedules=4, threads=1).tasks == 2
    assert collect(twins[2:], tmp_path, schedules=4, threads=1).added == 0
    assert {task.matrix for task in LabelSet.open(tmp_path).tasks} == {"net1"}


@pytest.mark.parametrize("method", ["broken", "unopened"])
def test_collect_failing_reference_is_skipped(method: str, measurements: Made, tmp_path: Path) -> None:
    setattr(measurements, method, "spmv")
    first, repeated = (collect(expected(), tmp_path, schedules=8, threads=1) for _ in range(2))
    output = "made to fail" if method == "broken" else "RunError: no room"
    assert (
        first.failed_references
        == repeated.failed_references
        == dict.fromkeys(("spmv on net1", "spmv on graph22"), output)
    )
    assert first.min_rows == 1 and first.rows == repeated.rows == 18


def test_collect_small_space_is_exhausted(measurements: Made, tmp_path: Path) -> None:
    item = CollectionTarget(
        operator="spmv", matrix="a", pattern=SparsityPattern.from_coords(np.array([0]), np.array([0]), (1, 1))
    )
    result = collect([item], tmp_path, schedules=10_000, threads=1)
    assert 4 <= result.rows < 1000 and len(measurements.requests) == result.rows


def test_collect_on_cluster(measurements: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def map_unordered(function: Any, items: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        calls.append(options)
        for position, item in reversed(list(enumerate(items))):
            yield position, pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(item)))))

    monkeypatch.setattr(collecting, "map_unordered", map_unordered)
    result = collect(expected(), tmp_path, schedules=10, threads=3, cluster="auto")
    assert calls == 2 * [{"cluster": "auto", "cpus_per_task": 3.0}]
    assert (result.rows, result.min_rows) == (40, 10)
    assert collect(expected(), tmp_path, schedules=10, threads=3).added == 0


def test_collect_other_device_is_other_task(
    measurements: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(expected("a"), tmp_path, schedules=4, threads=1)
    monkeypatch.setattr(collecting, "describe_cpu", lambda: "another")
    assert collect(expected("a"), tmp_path, schedules=4, threads=1).added == 8
    assert len({task.device for task in LabelSet.open(tmp_path).tasks}) == 2


_KILLED = """
import sys
from pathlib import Path
import numpy as np
from sparseflow.tuning.measure.collection import CollectionTarget, collect
from sparseflow.tuning.schedule.matrices import SparsityPattern
from sparseflow.tuning.search.evolutionary import COLLECTION_STRATEGY

rows, cols = np.nonzero(np.random.default_rng(4).random((19, 23)) < 0.3)
pattern = SparsityPattern.from_coords(rows, cols, (19, 23))
collect(
    [CollectionTarget(operator="spmm", matrix="net1", pattern=pattern, n_cols=8),
     CollectionTarget(operator="spmv", matrix="net1", pattern=pattern)],
    sys.argv[1], strategy=COLLECTION_STRATEGY, schedules=1000, threads=1, cache_dir=Path(sys.argv[2]),
    progress=lambda *message: print(message, flush=True),
)
"""


def test_collect_killed_resumes(tmp_path: Path) -> None:
    folder, cache = tmp_path / "labels", tmp_path / "cache"
    cache.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(folder), str(cache)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            messages = [process.stdout.readline() for _ in range(5)]
        finally:
            process.send_signal(signal.SIGKILL)
    assert all(messages), "the process ended early"
    assert not (folder / labels.LABELS_FILE).exists()
    before = rows_of(folder)
    assert len(before) >= 5
    collect(expected("net1"), folder, schedules=6, threads=1, cache_dir=cache)
    after = rows_of(folder)
    assert after[: len(before)] == before
    assert len({(row["task"], row["schedule"]) for row in after}) == len(after)
    had = Counter(row["task"] for row in before)
    assert Counter(row["task"] for row in after) == {task: max(6, had[task]) for task in (0, 1)}
    assert len(LabelSet.open(folder).tasks) == 2


# Errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"operator": "spmx"}, "'spmx'"),
        ({"n_cols": None}, "`n_cols`"),
        ({"operator": "spmv"}, "spmv"),
        ({"dtype": "float16"}, "float32"),
        (
            {"pattern": SparsityPattern.from_coords(np.array([], int), np.array([], int), (2, 2))},
            "",
        ),
    ],
)
def test_collect_invalid_target_raises(
    change: dict[str, Any], output: str, measurements: Made, tmp_path: Path
) -> None:
    good = expected("net1")
    with pytest.raises(InputError, match=output or None):
        collect([*good, replace(good[0], **change)], tmp_path, threads=1)
    assert not measurements.requests and rows_of(tmp_path) == []


@pytest.mark.parametrize(
    "options", [{"schedules": 0}, {"seed": -1}, {"budget_s": 0.0}, {"budget_s": float("nan")}, {"threads": 0}]
)
def test_collect_invalid_option_raises(options: dict[str, Any], measurements: Made, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(options))}`"):
        collect(expected(), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_collect_no_targets_raises(measurements: Made, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        collect([], tmp_path)


def test_collect_foreign_dir_raises(measurements: Made, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        collect(expected(), tmp_path / "file")
    labels.write_labels(tmp_path / "imported", [])
    with pytest.raises(InputError):
        collect(expected(), tmp_path / "imported")


@pytest.mark.usefixtures("refused_at_once")
def test_collect_locked_dir_raises(measurements: Made, tmp_path: Path) -> None:
    def intrude(*_: object) -> None:
        with pytest.raises(RunError):
            collect(expected(), tmp_path, schedules=1)

    collect(expected()[:1], tmp_path, schedules=1, threads=1, progress=intrude)


def test_collect_without_compiler_raises(
    measurements: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DeviceError):
        collect(expected(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_collect_damaged_pattern_raises(measurements: Made, tmp_path: Path) -> None:
    collect(expected("net1"), tmp_path, schedules=1, threads=1)
    (path,) = (tmp_path / labels.PATTERNS_DIR).iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileFormatError):
        collect(expected("net1"), tmp_path, schedules=2, threads=1)
