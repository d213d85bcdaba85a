"""Searches side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparseflow.errors import FileFormatError
from sparseflow.tuning.model.cost_model import Scorer
from sparseflow.tuning.schedule.problem import Problem
from sparseflow.tuning.search import comparison
from sparseflow.tuning.search.comparison import Searched, compare_searches, read_searched


def test_each_method_with_the_model_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def explore(*args: Any, **options: Any) -> Any:
        asked.append((options["method"], options["prior"]))
        return real(*args, **options)

    def prior(problem: Problem, threads: int) -> Scorer:
        return lambda schedules: np.zeros(len(schedules))

    real = comparison.explore
    monkeypatch.setattr(comparison, "explore", explore)
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))
    given = ("eye", "spmv", np.eye(9, dtype=np.float32), tmp_path / "searches")
    options: dict[str, Any] = {"methods": ["random"], "trials": 3, "prior": prior, "threads": 1}
    found = compare_searches(*given, **options)
    assert asked == [("random", None), ("guided-random", prior)]
    assert [one.method for one in found] == ["random", "guided-random"]
    for one in found:
        assert one.problem == "eye, spmv" and len(one.ratios) == 4 + 3
        assert {"propose", "build", "compile", "measure", "rest"} <= set(one.seconds)
    assert compare_searches(*given, **options) == found and len(asked) == 2, "what is done is not done again"
    (path,) = (tmp_path / "searches").glob("*guided-random*")
    path.write_text("{}")
    with pytest.raises(FileFormatError, match="is no search"):
        read_searched(path)


def test_when_a_search_has_arrived() -> None:
    one = Searched(problem="p", method="m", ratios=(None, 2.0, 1.04, 1.0), seconds={})
    assert one.best() == [float("inf"), 2.0, 1.04, 1.0]
    assert (one.arrived(1.0), one.arrived(0.5), one.arrived(2.0)) == (3, None, 2)
