"""The demo: budgets on a model that never learnt anything, its run, its page and its command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from sparseflow.adaptive import demo
from sparseflow.adaptive.api import Attached
from sparseflow.adaptive.demo import run_demo
from sparseflow.adaptive.demo_page import QUICKEST, WHOLE, AdaptiveDemoResult
from sparseflow.adaptive.grid_vqa.dataset import VqaSample
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.profile import PlanProfile
from sparseflow.cli.root import run
from sparseflow.core.run import Run
from sparseflow.errors import InputError
from tests.adaptive.grid_vqa.little import quick, untrained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random weights."""
    return untrained(tmp_path_factory.mktemp("made") / "grid-vqa", quick(**{"images.digits": True}))


@pytest.fixture(scope="module")
def shown(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[AdaptiveDemoResult, list[str]]:
    said: list[str] = []
    out = tmp_path_factory.mktemp("runs")
    found = run_demo(model, out=out, questions=3, budgets=3, progress=lambda what, share: said.append(what))
    return found, said


def test_every_question_is_answered_under_every_budget_and_without(
    shown: tuple[AdaptiveDemoResult, list[str]],
) -> None:
    found, said = shown
    rows: list[dict[str, Any]] = Run.open(found.run).read_rows()
    assert len(rows) == 3 * (3 + 2) and found.questions == 3
    assert {row["way"] for row in rows} == {WHOLE, QUICKEST, "budget"}
    budgets = [each.budget_ms for each in found.budgets]
    assert budgets == sorted(budgets) and len(budgets) == 3
    assert sorted({row["budget_ms"] for row in rows if row["budget_ms"]}) == budgets
    for each in found.budgets:
        mine = [row for row in rows if row["budget_ms"] == each.budget_ms]
        in_time = [row["measured_ms"] <= each.budget_ms for row in mine]
        assert each.in_time == pytest.approx(sum(in_time) / 3)
        assert each.goodput <= min(each.in_time, each.right)
    assert said[0] == "loading the model" and said[-1] == "done"


def test_the_run_has_a_page(shown: tuple[AdaptiveDemoResult, list[str]]) -> None:
    found, _ = shown
    page = found.report.read_text()
    assert "Answers within a budget" in page and "<svg" in page
    assert "sparseflow adaptive demo --model grid-vqa --num-questions 3 --num-budgets 3 --device cpu" in page


def test_of_a_large_model_less_is_measured_and_asked(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if each request took minutes.
    for name in ("_MEASURING_S", "_FIRST_S", "_ANSWERING_S"):
        monkeypatch.setattr(demo, name, 0.0)
    said: list[str] = []
    found = run_demo(model, out=tmp_path, budgets=2, progress=lambda what, share: said.append(what))
    assert found.questions == 10
    measured = PlanProfile.load(found.run / "profile" / "profile.parquet")
    assert {visit.round for visit in measured.measurements} == {0, 1, 2}
    assert (
        said[1].startswith("measuring plans: first round, load 0") and "answering: question 10 of 10" in said
    )
    told = run_demo(model, out=tmp_path, questions=11, budgets=2)
    assert told.questions == 11, "who says how many is asked as many"


def test_of_a_small_model_all_is_measured(
    shown: tuple[AdaptiveDemoResult, list[str]],
) -> None:
    found, _ = shown
    measured = PlanProfile.load(found.run / "profile" / "profile.parquet")
    assert {visit.round for visit in measured.measurements} == set(range(8))
    cells = {(visit.plan.id, visit.text_tokens, visit.round) for visit in measured.measurements}
    assert len(cells) == len(measured.measurements), "none is measured twice"


def test_first_requests_are_run_again_where_one_was_held_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MEASURING_S", "_FIRST_S"):
        monkeypatch.setattr(demo, name, 0.0)
    said: list[str] = []
    forgot: list[float] = []
    tried = iter([9.0, 9.0])
    monkeypatch.setattr(demo, "_learn_on", lambda attached, first, ms: next(tried))
    monkeypatch.setattr(PlanLatencyPredictor, "forget", lambda self, share: forgot.append(share))
    run_demo(model, out=tmp_path, questions=1, budgets=2, progress=lambda what, share: said.append(what))
    assert forgot == [1.0], "once, and no third time"
    assert sum("once more: one of them was held up" in what for what in said) == 1


def test_what_first_requests_took_over_what_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Fake:
        def generate(self, *, latency_budget_ms: float, **inputs: Any) -> SimpleNamespace:
            asked.append(latency_budget_ms)
            return SimpleNamespace(predicted_ms=10.0, measured_ms=50.0 if len(asked) == 2 else 9.0)

    attached, first = cast(Attached, Fake()), [cast(VqaSample, SimpleNamespace(inputs={}))]
    assert demo._learn_on(attached, first, np.array([8.0, 16.0])) == 5.0
    assert asked == [10.0, 20.0] * 16
    asked.clear()
    monkeypatch.setattr(demo, "_FIRST_S", 0.0)
    demo._learn_on(attached, first, np.array([8.0, 16.0]))
    assert asked == [10.0, 20.0], "each plan's budget once, however long it takes"


def test_how_many_questions_there_is_time_for() -> None:
    assert demo._fitting(np.array([10.0, 20.0]), [15.0, 30.0]) == 40
    # 100 and 2000, 200 and 1700 below budgets, then the dearest plan again: 6 seconds a question.
    assert demo._fitting(np.array([100.0, 2000.0]), [200.0, 1700.0, 2500.0]) == 30
    assert demo._fitting(np.array([100.0, 60000.0]), [200.0, 1e5]) == 10


def test_by_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--questions", "2", "--budgets", "2", "--out", str(tmp_path)]
    assert run(["adaptive", "demo", "--model", str(model), *few, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["budgets"]) == 2 and Path(told["report"]).is_file()


def test_what_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`questions` \(=0\) must be at least 1"):
        run_demo(model, out=tmp_path, questions=0)
    with pytest.raises(InputError, match=r"`seed` \(=-1\) not negative"):
        run_demo(model, out=tmp_path, seed=-1)
    with pytest.raises(
        InputError, match=r"there is no folder .*/nothing; these come with SparseFlow: .*digits"
    ):
        run_demo(tmp_path / "nothing", out=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no model of Grid-VQA"):
        run_demo(tmp_path / "empty", out=tmp_path)
    lists = tmp_path / "lists"
    shutil.copytree(model, lists)
    told = json.loads((lists / "grid_vqa.json").read_text())
    told["settings"]["test_shares"] = {"list": 1.0}
    (lists / "grid_vqa.json").write_text(json.dumps(told))
    with pytest.raises(InputError, match="only 0 of 72 questions have an answer of one word"):
        run_demo(lists, out=tmp_path, questions=1)
    assert not list(tmp_path.glob("*demo*")), "nothing is left of a run that never began"
