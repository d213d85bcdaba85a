"""Comparison of searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.tuning.model.cost_model import ScheduleScorer
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.search import comparison
from sparseflow.tuning.search.comparison import SearchRecord, compare_searches, compute_gains
from tests.conformance import check_artifact_file


def test_compare_each_method_with_and_without_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proposals = []

    def create_session(*args: Any, **options: Any) -> Any:
        proposals.append((options["method"], options["prior"]))
        return real(*args, **options)

    def prior(problem: SparseProblem, threads: int) -> ScheduleScorer:
        return lambda schedules: np.zeros(len(schedules))

    real = comparison.TuningSession
    monkeypatch.setattr(comparison, "TuningSession", create_session)
    arguments = ("eye", "spmv", np.eye(9, dtype=np.float32), tmp_path / "searches")
    options: dict[str, Any] = {"methods": ["random"], "max_trials": 3, "prior": prior, "threads": 1}
    result = compare_searches(*arguments, **options)
    assert proposals == [("random", None), ("guided-random", prior)]
    assert [item.method for item in result] == ["random", "guided-random"]
    for item in result:
        assert item.problem == "eye, spmv" and len(item.ratios) == 5 + 3
        assert {"propose", "build", "compile", "measure", "rerank", "other"} <= set(item.seconds)
        assert len(item.elapsed_s) == len(item.ratios) and list(item.elapsed_s) == sorted(item.elapsed_s)
        phases = item.sum_phases()
        assert phases["measure"] == item.seconds["measure"] + item.seconds["rerank"] > item.seconds["measure"]
        assert sum(phases.values()) == pytest.approx(sum(item.seconds.values())) and "rerank" not in phases
    assert compare_searches(*arguments, **options) == result and len(proposals) == 2, (
        "what is done is not done again"
    )
    (path,) = (tmp_path / "searches").glob("*guided-random*")
    check_artifact_file(SearchRecord.load, path, hint="search again")


def make_record(method: str, *ratios: float | None) -> SearchRecord:
    elapsed_s = tuple(float(count) for count in range(1, len(ratios) + 1))
    return SearchRecord(problem="p", method=method, ratios=ratios, elapsed_s=elapsed_s, seconds={})


def test_count_until_goal() -> None:
    item = make_record("m", None, 2.0, 1.04, 1.0)
    assert item.best_ratios() == [float("inf"), 2.0, 1.04, 1.0]
    assert (item.count_until(1.0), item.count_until(0.5), item.count_until(2.0)) == (3, None, 2)
    assert (item.compute_time_until(1.0), item.compute_time_until(0.5)) == (3.0, None)


def test_gain_goal_is_reached_with_and_without_model() -> None:
    records = [
        make_record("random", 2.0, 1.5, 1.0, 0.9),
        make_record("guided-random", 2.0, 0.8, 0.4),
        make_record("annealing", 2.0, 0.5),
        make_record("guided-annealing", 2.0, 2.0, 1.0),
        make_record("qlearning", None),
        make_record("guided-qlearning", 1.0),
        make_record("evolutionary", 1.0),
    ]
    better, worse = compute_gains(records)
    assert (better.method, better.counts, better.seconds, better.factor) == (
        "random",
        (4, 2),
        (4.0, 2.0),
        2.0,
    )
    assert (worse.method, worse.counts) == ("annealing", (2, 3)), "a model that misleads is shown, too"
