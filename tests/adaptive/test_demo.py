"""Tests of the demo with an untrained model."""

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
from sparseflow.adaptive.demo_page import FASTEST_PLAN, FULL_MODEL, AdaptiveDemoResult
from sparseflow.adaptive.grid_vqa.dataset import VqaSample
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.profile import PlanProfile
from sparseflow.cli.root import run
from sparseflow.core.run import Run
from sparseflow.errors import InputError
from tests.adaptive.grid_vqa.little import quick, untrained


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return untrained(tmp_path_factory.mktemp("made") / "grid-vqa", quick(**{"images.digits": True}))


@pytest.fixture(scope="module")
def demo_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[AdaptiveDemoResult, list[str]]:
    messages: list[str] = []
    result = run_demo(
        model,
        out_dir=tmp_path_factory.mktemp("runs"),
        num_questions=3,
        num_budgets=3,
        progress=lambda message, fraction: messages.append(message),
    )
    return result, messages


def test_run_demo_answers_each_question_with_each_budget_and_baseline(
    demo_run: tuple[AdaptiveDemoResult, list[str]],
) -> None:
    result, messages = demo_run
    rows: list[dict[str, Any]] = Run.open(result.run).read_rows()
    assert len(rows) == 3 * (3 + 2) and result.num_questions == 3
    assert {row["method"] for row in rows} == {FULL_MODEL, FASTEST_PLAN, "budget"}
    budgets_ms = [budget.budget_ms for budget in result.budgets]
    assert budgets_ms == sorted(budgets_ms) and len(budgets_ms) == 3
    assert sorted({row["budget_ms"] for row in rows if row["budget_ms"]}) == budgets_ms
    for budget in result.budgets:
        in_time = [
            row["measured_ms"] <= budget.budget_ms for row in rows if row["budget_ms"] == budget.budget_ms
        ]
        assert budget.in_time == pytest.approx(sum(in_time) / 3)
        assert budget.goodput <= min(budget.in_time, budget.accuracy)
    assert messages[0] == "loading the model" and messages[-1] == "done"


def test_run_demo_writes_page(demo_run: tuple[AdaptiveDemoResult, list[str]]) -> None:
    result, _ = demo_run
    page = result.report.read_text()
    assert "<svg" in page
    assert "sparseflow adaptive demo --model grid-vqa --num-questions 3 --num-budgets 3 --device cpu" in page


def test_run_demo_slow_model_measures_and_asks_less(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_PROFILE_TIME_S", "_WARMUP_TIME_S", "_ANSWER_TIME_S"):
        monkeypatch.setattr(demo, name, 0.0)
    messages: list[str] = []
    result = run_demo(
        model,
        out_dir=tmp_path,
        num_budgets=2,
        progress=lambda message, fraction: messages.append(message),
    )
    assert result.num_questions == 10
    profile = PlanProfile.load(result.run / "profile" / "profile.parquet")
    assert {measurement.round for measurement in profile.measurements} == {0, 1, 2}
    assert messages[1].startswith("measuring plans: first round, load 0")
    assert "answering: question 10 of 10" in messages
    assert run_demo(model, out_dir=tmp_path, num_questions=11, num_budgets=2).num_questions == 11


def test_run_demo_fast_model_measures_all_rounds(
    demo_run: tuple[AdaptiveDemoResult, list[str]],
) -> None:
    result, _ = demo_run
    profile = PlanProfile.load(result.run / "profile" / "profile.parquet")
    assert {measurement.round for measurement in profile.measurements} == set(range(8))
    cells = {
        (measurement.plan.id, measurement.text_tokens, measurement.round)
        for measurement in profile.measurements
    }
    assert len(cells) == len(profile.measurements)


def test_run_demo_outlier_in_warmup_repeats_it_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_PROFILE_TIME_S", "_WARMUP_TIME_S"):
        monkeypatch.setattr(demo, name, 0.0)
    messages: list[str] = []
    forgotten: list[float] = []
    ratios = iter([9.0, 9.0])
    monkeypatch.setattr(demo, "_warm_up", lambda attached, samples, p50_ms: next(ratios))
    monkeypatch.setattr(PlanLatencyPredictor, "forget", lambda self, fraction: forgotten.append(fraction))
    run_demo(
        model,
        out_dir=tmp_path,
        num_questions=1,
        num_budgets=2,
        progress=lambda message, fraction: messages.append(message),
    )
    assert forgotten == [1.0]
    assert sum(message.startswith("warming up again") for message in messages) == 1


def test_warm_up_returns_max_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets_ms: list[float] = []

    class FakeAttached:
        def generate(self, *, latency_budget_ms: float, **inputs: Any) -> SimpleNamespace:
            budgets_ms.append(latency_budget_ms)
            return SimpleNamespace(predicted_ms=10.0, measured_ms=50.0 if len(budgets_ms) == 2 else 9.0)

    attached, samples = cast(Attached, FakeAttached()), [cast(VqaSample, SimpleNamespace(inputs={}))]
    assert demo._warm_up(attached, samples, np.array([8.0, 16.0])) == 5.0
    assert budgets_ms == [10.0, 20.0] * 16
    budgets_ms.clear()
    monkeypatch.setattr(demo, "_WARMUP_TIME_S", 0.0)
    demo._warm_up(attached, samples, np.array([8.0, 16.0]))
    assert budgets_ms == [10.0, 20.0], "the budget of each plan once"


def test_measure_baselines_ignores_stalls() -> None:
    times_ms = {"full": iter([20.0, 21.0, 900.0, 19.0, 20.5, 2000.0, 20.0]), "fast": iter([5.0] * 7)}

    class FakeAttached:
        def generate(self, *, plan: str, **inputs: Any) -> SimpleNamespace:
            return SimpleNamespace(measured_ms=next(times_ms[plan]))

    attached, samples = cast(Attached, FakeAttached()), [cast(VqaSample, SimpleNamespace(inputs={}))]
    baselines: Any = {FULL_MODEL: "full", FASTEST_PLAN: "fast"}
    assert demo._measure_baselines(attached, baselines, samples) == {FULL_MODEL: 20.5, FASTEST_PLAN: 5.0}


def test_count_questions_uses_time_limit() -> None:
    assert demo._count_questions(np.array([10.0, 20.0]), [15.0, 30.0]) == 40
    # 100 + 2000 ms for the baselines and 200 + 1700 + 2000 ms for the budgets: 6 s per question.
    assert demo._count_questions(np.array([100.0, 2000.0]), [200.0, 1700.0, 2500.0]) == 30
    assert demo._count_questions(np.array([100.0, 60000.0]), [200.0, 1e5]) == 10


def test_demo_command_prints_json(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_PROFILE_TIME_S", "_WARMUP_TIME_S"):
        monkeypatch.setattr(demo, name, 0.0)
    options = ["--num-questions", "2", "--num-budgets", "2", "--out", str(tmp_path)]
    assert run(["adaptive", "demo", "--model", str(model), *options, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["budgets"]) == 2 and Path(record["report"]).is_file()


def test_run_demo_invalid_input_raises(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`num_questions` \(=0\)"):
        run_demo(model, out_dir=tmp_path, num_questions=0)
    with pytest.raises(InputError, match=r"`seed` \(=-1\)"):
        run_demo(model, out_dir=tmp_path, seed=-1)
    with pytest.raises(InputError, match=r"/missing .*digits"):
        run_demo(tmp_path / "missing", out_dir=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty"):
        run_demo(tmp_path / "empty", out_dir=tmp_path)
    lists = tmp_path / "lists"
    shutil.copytree(model, lists)
    record = json.loads((lists / "grid_vqa.json").read_text())
    record["settings"]["test_shares"] = {"list": 1.0}
    (lists / "grid_vqa.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"expected 1 .*0 of 72"):
        run_demo(lists, out_dir=tmp_path, num_questions=1)
    assert not list(tmp_path.glob("*demo*"))
