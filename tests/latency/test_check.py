"""Checks of predicted latencies: limits, baselines, models without a prediction and the JUnit report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from onnx import TensorProto, helper

from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.check import CheckResult, LatencyBaseline, ModelCheck, check_models
from sparseflow.latency.graph.analysis import analyze
from sparseflow.latency.junit import write_junit
from tests.latency.conftest import MadeUp, of_this_machine
from tests.latency.onnx_models import branching, convnet, model, save

TEXT = TensorProto.STRING

pytestmark = pytest.mark.usefixtures("at_home")


def make_text_model(folder: Path) -> Path:
    """Save a model whose only operator was not measured and has unknown work."""
    node = helper.make_node("StringConcat", ["x", "x"], ["y"])
    return save(model([node], [("x", TEXT, [5])], [("y", TEXT, None)], opset=20), folder, "text.onnx")


def get_statuses(result: CheckResult) -> list[str]:
    return [entry.status for entry in result.models]


def test_budget_limits_the_selected_statistic(made_up: MadeUp) -> None:
    path = made_up.models[0]
    prediction = check_models([path], made_up.predictor).models[0].prediction
    assert prediction is not None
    limits_ms = {"mean": prediction.mean_ms, "p95": prediction.p95_ms, "high": prediction.interval[1]}
    for statistic, limit_ms in limits_ms.items():
        for factor, status in ((1.001, "passed"), (0.999, "failed")):
            result = check_models([path], made_up.predictor, budget_ms=factor * limit_ms, statistic=statistic)
            assert get_statuses(result) == [status], (statistic, factor)
    with pytest.raises(InputError, match="median"):
        check_models([path], made_up.predictor, budget_ms=1.0, statistic="median")


def test_guess_and_unbounded_interval_fail_only_if_limited(made_up: MadeUp, tmp_path: Path) -> None:
    path = make_text_model(tmp_path)
    for statistic, status in (("mean", "passed"), ("high", "failed")):
        result = check_models([path], made_up.predictor, budget_ms=1e9, statistic=statistic)
        assert get_statuses(result) == [status]
    (entry,) = check_models([path, *made_up.models[:1]], made_up.predictor, max_guess=0.05).models[:1]
    assert len(entry.problems) == 2 and "StringConcat" in entry.problems[0]
    (entry,) = check_models([path], made_up.predictor, max_guess=1.0).models
    assert entry.status == "failed" and len(entry.problems) == 1


def test_directory_is_checked_beside_models_that_cannot_be_predicted(made_up: MadeUp, tmp_path: Path) -> None:
    shutil.copy(made_up.models[0], tmp_path / "a.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    save(convnet(batch="N"), tmp_path, "open.onnx")
    analyze(made_up.models[1], out_dir=tmp_path / "graph")
    paths = [tmp_path, tmp_path / "graph", tmp_path / "absent.onnx"]
    result = check_models(paths, of_this_machine(made_up.predictor), budget_ms=1e9)
    assert [Path(entry.name).name for entry in result.models] == [
        "a.onnx", "bad.onnx", "open.onnx", "graph", "absent.onnx",
    ]  # fmt: skip
    assert get_statuses(result) == ["passed", "error", "error", "passed", "error"]
    assert result.counts == {"passed": 2, "failed": 0, "error": 3}
    assert "--shape x=" in result.models[2].problems[0]
    record = json.loads(json.dumps(result.to_dict()))
    assert record["models"][1]["mean_ms"] is None and record["models"][0]["change"] is None


def test_shapes_apply_to_models_with_the_input(made_up: MadeUp, tmp_path: Path) -> None:
    path = save(convnet(batch="N"), tmp_path, "open.onnx")
    paths = [path, make_text_model(tmp_path)]
    with pytest.raises(InputError, match="images"):
        check_models(paths, made_up.predictor, shapes={"images": (1, 3, 8, 8)})
    result = check_models([path], made_up.predictor, shapes={"x": (2, 3, 12, 12)}, load=0.5)
    assert result.models[0].name == f"{path.as_posix()} x=2,3,12,12 load=0.5"
    assert get_statuses(result) == ["passed"]


def test_dimensions_and_values_apply_to_models_that_have_them(made_up: MadeUp, tmp_path: Path) -> None:
    paths = [save(convnet(batch="N"), tmp_path, "open.onnx"), save(branching(), tmp_path, "branch.onnx")]
    for key in ("flag", "branch:flag"):
        result = check_models(
            paths, made_up.predictor, budget_ms=1e9, shapes={"batch": (2,)}, inputs={key: "true"}
        )
        assert get_statuses(result) == ["passed", "passed"]
        assert [entry.name for entry in result.models] == [
            f"{paths[0].as_posix()} batch=2", f"{paths[1].as_posix()} flag=true",
        ]  # fmt: skip
    with pytest.raises(InputError, match="flags, open:flag"):
        check_models(paths, made_up.predictor, inputs={"flags": True, "open:flag": True})


def test_baseline_detects_regressions_and_new_models(made_up: MadeUp, tmp_path: Path) -> None:
    first, second, third = made_up.models[:3]
    baseline = check_models([first, second], made_up.predictor).make_baseline()
    baseline = LatencyBaseline.load(baseline.save(tmp_path / "latency.json"))
    paths = [first, second, third]
    assert get_statuses(check_models(paths, made_up.predictor, baseline=baseline)) == [
        "passed", "passed", "failed",
    ]  # fmt: skip
    lower = baseline.model_copy(
        update={"mean_ms": {name: value / 1.1 for name, value in baseline.mean_ms.items()}}
    )
    result = check_models([first], made_up.predictor, baseline=lower)
    assert result.models[0].change == pytest.approx(0.1)
    assert get_statuses(result) == ["failed"] and "10.0 %" in result.models[0].problems[0]
    result = check_models([first], made_up.predictor, baseline=lower, max_regression=0.11)
    assert get_statuses(result) == ["passed"]
    updated = result.make_baseline(lower)
    assert updated.mean_ms[first.as_posix()] == baseline.mean_ms[first.as_posix()]
    assert updated.mean_ms[second.as_posix()] == lower.mean_ms[second.as_posix()]


def test_baseline_of_another_predictor_is_refused_and_replaced(made_up: MadeUp) -> None:
    (path, other), predictor = made_up.models[:2], made_up.predictor
    baseline = check_models([other], predictor).make_baseline()
    changed = predictor.model_copy(update={"quality": {}})
    with pytest.raises(InputError, match="another predictor"):
        check_models([path], changed, baseline=baseline)
    assert list(check_models([path], changed).make_baseline(baseline).mean_ms) == [path.as_posix()]


def test_foreign_baseline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--update-baseline"):
        LatencyBaseline.load(tmp_path / "absent.json")
    (tmp_path / "zero.json").write_text(
        json.dumps({**LatencyBaseline(predictor_sha256="", mean_ms={}).to_dict(), "mean_ms": {"a": 0}})
    )
    with pytest.raises(FileFormatError, match=r"mean_ms\.a"):
        LatencyBaseline.load(tmp_path / "zero.json")


def test_junit_counts_and_escapes(made_up: MadeUp, tmp_path: Path) -> None:
    passed, failed = check_models(made_up.models[:2], made_up.predictor).models
    name = 'a<b>&"\x1b[31m\udc80.onnx'
    result = CheckResult(
        models=(
            passed,
            ModelCheck(name=failed.name, prediction=failed.prediction, problems=("slow", "a guess")),
            ModelCheck(name=name, prediction=None, problems=("not <ONNX>\x00",)),
        ),
        predictor_sha256="",
    )
    suite = ElementTree.parse(write_junit(result, tmp_path / "report.xml")).getroot()[0]
    assert [suite.get(key) for key in ("tests", "failures", "errors")] == ["3", "1", "1"]
    assert [[child.tag for child in case] for case in suite] == [[], ["failure", "failure"], ["error"]]
    assert suite[2].get("name") == 'a<b>&"�[31m�.onnx' and suite[2][0].text == "not <ONNX>�"
    assert passed.prediction is not None
    assert float(suite[0].get("time", "")) == pytest.approx(passed.prediction.mean_ms / 1e3, abs=1e-9)
