"""Collecting labels: what is measured, in which turns, and what is left of it after whatever stops it."""

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
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.errors import DeviceError, FileFormatError, InputError, RunError
from sparseflow.tuning.measure import collection as collecting
from sparseflow.tuning.measure import collection_log, labels
from sparseflow.tuning.measure.collection import Wanted, collect
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.measure.labels import LabelSet
from sparseflow.tuning.schedule.matrices import Pattern
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.presets import presets
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.schedule.schedule import Schedule
from sparseflow.tuning.schedule.space import Space


def pattern(seed: int = 0) -> Pattern:
    rows, cols = np.nonzero(np.random.default_rng(seed).random((19, 23)) < 0.3)
    return Pattern.of(rows, cols, (19, 23))


def wanted(*names: str) -> list[Wanted]:
    return [
        Wanted(operator=operator, matrix=name, pattern=pattern(len(name)), n_cols=n_cols)
        for name in names or ("net1", "graph22")
        for operator, n_cols in (("spmm", 8), ("spmv", None))
    ]


class Made:
    """Measurements that are made up: quick, and the same again."""

    def __init__(self) -> None:
        self.asked: list[tuple[Problem, Schedule]] = []
        self.opened: list[Problem] = []
        self.disturbed = 0  # so many of the next
        self.broken: str | None = None  # an operator whose reference does not run
        self.unopened: str | None = None  # one whose reference cannot even be built

    def evaluator(self, problem: Problem, reference: Schedule, *, cache: Path | None) -> Any:
        made = self

        class Evaluator:
            def __enter__(self) -> Evaluator:
                if problem.operator.name == made.unopened:
                    raise RunError("no room")
                made.opened.append(problem)
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def measure(self, schedule: Schedule) -> Trial:
                made.asked.append((problem, schedule))
                number = sum(map(ord, str(schedule)))
                broken = problem.operator.name == made.broken
                if broken if schedule == reference else number % 7 == 0:
                    return Trial(schedule=schedule, error="made to fail", seconds={"build": 1.0})
                made.disturbed -= 1
                latency = 1.0 + number % 61 + len(made.asked) / 1024
                return Trial(
                    schedule=schedule, latency_ms=latency, ratio=latency / 9, disturbed=made.disturbed >= 0
                )

        return Evaluator()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    found = Made()
    monkeypatch.setattr(collecting, "Evaluator", found.evaluator)
    return found


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [
        row
        for row in map(json.loads, (folder / collection_log.FILE).read_text().splitlines())
        if "task" in row
    ]


def test_for_real(tmp_path: Path) -> None:
    told: list[tuple[str, float]] = []
    one = Wanted(operator="sddmm", matrix="net1", pattern=pattern(), n_cols=8, dtype="float64", family="x")
    found = collect([one], tmp_path, schedules=3, threads=1, progress=lambda *all: told.append(all))
    assert (found.tasks, found.rows, found.added, found.fewest, found.broken) == (1, 3, 3, 3, {})
    opened = LabelSet.open(tmp_path)
    (task,) = opened.tasks
    assert (task.operator, task.matrix, task.family, task.n_cols) == ("sddmm", "net1", "x", 8)
    assert (task.dtype, task.threads, task.shape, task.nnz) == ("float64", 1, (19, 23), one.pattern.nnz)
    assert task.device and task.pattern == one.pattern.digest()
    rows = opened.rows(task)
    assert (
        rows.schedules
        and (rows.latency_ms > 0).all()
        and (rows.ratio > 0).all()
        and (rows.repeats == 1).all()
    )
    kept = opened.pattern(task)
    assert kept is not None and kept.digest() == one.pattern.digest()
    assert len(told) == 3 and told[-1][1] == 1.0 and "sddmm on net1" in told[-1][0]
    assert json.loads(json.dumps(found.to_dict()))["folder"] == str(tmp_path)


def test_presets_come_first_and_tasks_take_turns(made: Made, tmp_path: Path) -> None:
    found = collect(wanted(), tmp_path, schedules=20, threads=2)
    assert (found.tasks, found.rows, found.fewest) == (4, 80, 20)
    rows = rows_of(tmp_path)
    runs = [(task, len(list(group))) for task, group in groupby(row["task"] for row in rows)]
    assert runs == [(task, count) for count in (8, 8, 4) for task in range(4)]
    for name, of in (("spmm", 0), ("spmv", 1)):
        operator = OPERATORS[name]
        extents = dict(zip(operator.axes, (19, 23, 8), strict=False))
        by_hand = {str(one.canonical(operator, extents)) for one in presets(operator, extents, 2).values()}
        own = [row["schedule"] for row in rows if row["task"] == of]
        assert set(own[: len(by_hand)]) == by_hand and len(set(own)) == 20
    assert found.failed == sum(row["error"] is not None for row in rows) > 0


def test_draws_and_children_both_come(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    for name in ("sample", "mutate", "crossover"):
        own = getattr(Space, name)

        def counted(*args: Any, _name: str = name, _own: Any = own) -> Schedule:
            counts[_name] += 1
            return _own(*args)

        monkeypatch.setattr(Space, name, counted)
    collect(wanted("a")[:1], tmp_path, schedules=100, threads=2)
    assert 30 <= counts["sample"] <= 70 and counts["mutate"] > 15 and counts["crossover"] > 5


def test_a_disturbed_trial_is_measured_once_more(made: Made, tmp_path: Path) -> None:
    made.disturbed = 3  # the first twice, the second once and then not
    found = collect(wanted("a")[:1], tmp_path, schedules=2, threads=1)
    first, second = rows_of(tmp_path)
    assert len(made.asked) == 4 and found.disturbed == 1
    assert first["disturbed"] and not second["disturbed"]
    latency = [1.0 + sum(map(ord, first["schedule"])) % 61 + number / 1024 for number in (1, 2)]
    assert first["latency_ms"] == min(latency), "the faster of two that were disturbed"


def test_a_budget_leaves_no_task_out(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(10**6))
    monkeypatch.setattr(collecting.time, "time", lambda: float(next(ticks)))
    found = collect(wanted(), tmp_path, schedules=1000, threads=1, budget_s=90.0)
    counts = Counter(row["task"] for row in rows_of(tmp_path))
    assert set(counts) == set(range(4)) and found.fewest == min(counts.values())
    assert max(counts.values()) <= 2 * min(counts.values())
    assert found.rows < 90


def test_going_on(made: Made, tmp_path: Path) -> None:
    def stop(_: str, fraction: float) -> None:
        if fraction > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(wanted(), tmp_path, schedules=12, threads=1, progress=stop)
    before = rows_of(tmp_path)
    assert sum(
        len(LabelSet.open(tmp_path).rows(task).schedules) for task in LabelSet.open(tmp_path).tasks
    ) == sum(row["error"] is None for row in before), "what there is can be used"
    made.asked.clear()
    found = collect(wanted(), tmp_path, schedules=12, threads=1)
    after = rows_of(tmp_path)
    assert after[: len(before)] == before and len(after) == found.rows == 48
    assert len(made.asked) == found.added == 48 - len(before)
    assert len({(row["task"], row["schedule"]) for row in after}) == 48
    made.asked.clear()
    made.opened.clear()
    again = collect(wanted(), tmp_path, schedules=12, threads=1)
    assert again.added == 0 and not made.asked and not made.opened


def test_a_folder_grows(made: Made, tmp_path: Path) -> None:
    collect(wanted("net1"), tmp_path, schedules=4, threads=1)
    found = collect(wanted("graph22"), tmp_path, schedules=4, threads=1)
    assert (found.tasks, found.rows, found.added) == (2, 16, 8)
    found = collect(wanted("net1"), tmp_path, schedules=6, threads=1)
    assert (found.rows, found.added) == (20, 4)
    found = collect(wanted("net1"), tmp_path, schedules=4, threads=2)
    assert (found.rows, found.added) == (28, 8), "with other threads it is another task"
    assert len(LabelSet.open(tmp_path).tasks) == 6


def test_a_pattern_is_one_task_whatever_it_is_called(made: Made, tmp_path: Path) -> None:
    twins = [replace(one, matrix=name) for name in ("net1", "mesh9") for one in wanted("net1")]
    assert collect(twins, tmp_path, schedules=4, threads=1).tasks == 2
    assert collect(twins[2:], tmp_path, schedules=4, threads=1).added == 0
    assert {task.matrix for task in LabelSet.open(tmp_path).tasks} == {"net1"}


@pytest.mark.parametrize("how", ["broken", "unopened"])
def test_a_task_whose_reference_does_not_run_is_passed_over(how: str, made: Made, tmp_path: Path) -> None:
    setattr(made, how, "spmv")
    first, again = (collect(wanted(), tmp_path, schedules=8, threads=1) for _ in range(2))
    said = "made to fail" if how == "broken" else "RunError: no room"
    assert first.broken == again.broken == dict.fromkeys(("spmv on net1", "spmv on graph22"), said)
    assert first.fewest == 1 and first.rows == again.rows == 18


def test_a_small_space_is_measured_to_its_end(made: Made, tmp_path: Path) -> None:
    one = Wanted(operator="spmv", matrix="a", pattern=Pattern.of(np.array([0]), np.array([0]), (1, 1)))
    found = collect([one], tmp_path, schedules=10_000, threads=1)
    assert 4 <= found.rows < 1000 and len(made.asked) == found.rows


def test_on_a_cluster(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def map_unordered(function: Any, items: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        calls.append(options)
        for place, item in reversed(list(enumerate(items))):
            yield place, pickle.loads(pickle.dumps(function(pickle.loads(pickle.dumps(item)))))

    monkeypatch.setattr(collecting, "map_unordered", map_unordered)
    found = collect(wanted(), tmp_path, schedules=10, threads=3, cluster="auto")
    assert calls == 2 * [{"cluster": "auto", "cpus_per_task": 3.0}]
    assert (found.rows, found.fewest) == (40, 10)
    assert collect(wanted(), tmp_path, schedules=10, threads=3).added == 0, "it is the same machine"


def test_another_machine_is_another_task(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collect(wanted("a"), tmp_path, schedules=4, threads=1)
    monkeypatch.setattr(collecting, "describe_cpu", lambda: "another")
    assert collect(wanted("a"), tmp_path, schedules=4, threads=1).added == 8
    assert len({task.device for task in LabelSet.open(tmp_path).tasks}) == 2


_KILLED = """
import sys
from pathlib import Path
import numpy as np
from sparseflow.tuning.measure.collection import Wanted, collect
from sparseflow.tuning.schedule.matrices import Pattern

rows, cols = np.nonzero(np.random.default_rng(4).random((19, 23)) < 0.3)
pattern = Pattern.of(rows, cols, (19, 23))
collect(
    [Wanted(operator="spmm", matrix="net1", pattern=pattern, n_cols=8),
     Wanted(operator="spmv", matrix="net1", pattern=pattern)],
    sys.argv[1], schedules=1000, threads=1, cache=Path(sys.argv[2]),
    progress=lambda *told: print(told, flush=True),
)
"""


def test_killed_in_the_middle(tmp_path: Path) -> None:
    folder, cache = tmp_path / "labels", tmp_path / "cache"
    cache.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(folder), str(cache)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        try:
            told = [process.stdout.readline() for _ in range(5)]
        finally:
            process.send_signal(signal.SIGKILL)
    assert all(told), "it came so far"
    assert not (folder / labels.FILE).exists()
    before = rows_of(folder)
    assert len(before) >= 5
    collect(wanted("net1"), folder, schedules=6, threads=1, cache=cache)
    after = rows_of(folder)
    assert after[: len(before)] == before
    assert len({(row["task"], row["schedule"]) for row in after}) == len(after)
    had = Counter(row["task"] for row in before)
    assert Counter(row["task"] for row in after) == {task: max(6, had[task]) for task in (0, 1)}
    assert len(LabelSet.open(folder).tasks) == 2


# What cannot be done ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"operator": "spmx"}, "no operator is called 'spmx'"),
        ({"n_cols": None}, "spmm needs `n_cols`"),
        ({"operator": "spmv"}, "spmv takes a vector"),
        ({"dtype": "float16"}, "must be float32 or float64"),
        ({"pattern": Pattern.of(np.array([], int), np.array([], int), (2, 2))}, "net1 has no elements"),
    ],
)
def test_what_cannot_be_wanted(change: dict[str, Any], said: str, made: Made, tmp_path: Path) -> None:
    good = wanted("net1")
    with pytest.raises(InputError, match=said):
        collect([*good, replace(good[0], **change)], tmp_path, threads=1)
    assert not made.asked and rows_of(tmp_path) == []


@pytest.mark.parametrize(
    "options", [{"schedules": 0}, {"seed": -1}, {"budget_s": 0.0}, {"budget_s": float("nan")}, {"threads": 0}]
)
def test_options_out_of_range(options: dict[str, Any], made: Made, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(options))}`"):
        collect(wanted(), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_nothing_is_wanted(made: Made, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing is wanted"):
        collect([], tmp_path)


def test_folders_that_are_something_else(made: Made, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        collect(wanted(), tmp_path / "file")
    labels.write_labels(tmp_path / "imported", [])
    with pytest.raises(InputError, match="labels that were not collected here"):
        collect(wanted(), tmp_path / "imported")


@pytest.mark.usefixtures("refused_at_once")
def test_a_folder_is_written_by_one_only(made: Made, tmp_path: Path) -> None:
    def intrude(*_: object) -> None:
        with pytest.raises(RunError, match="written by another process"):
            collect(wanted(), tmp_path, schedules=1)

    collect(wanted()[:1], tmp_path, schedules=1, threads=1, progress=intrude)


def test_no_compiler(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DeviceError, match="no C compiler"):
        collect(wanted(), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_damaged_pattern_stops_it(made: Made, tmp_path: Path) -> None:
    collect(wanted("net1"), tmp_path, schedules=1, threads=1)
    (path,) = (tmp_path / labels.PATTERNS).iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(FileFormatError, match=r"is not a pattern|is damaged"):
        collect(wanted("net1"), tmp_path, schedules=2, threads=1)
