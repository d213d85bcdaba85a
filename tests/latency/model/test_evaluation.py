"""Evaluation on the synthetic device, and its report page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import FileFormatError, InputError, RunError
from sparseflow.latency.measure import collection
from sparseflow.latency.measure.collection import read_plan, read_rows
from sparseflow.latency.measure.config import TelemetryConfig
from sparseflow.latency.measure.idle import get_load_before
from sparseflow.latency.measure.plan import Target
from sparseflow.latency.model.evaluation import EvaluationRow, PredictorEvaluation, evaluate
from sparseflow.latency.report import write_report
from tests.latency.conftest import MadeUp
from tests.latency.onnx_models import convnet, save
from tests.latency.synthetic import SyntheticBench, slowdown

LEVELS = (0.0, 0.6)


class Bench(SyntheticBench):
    """Synthetic device as this machine's instruments."""

    opened: list[Bench]
    error = 0.0
    broken: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        type(self).opened.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    @contextmanager
    def block(self, level: float) -> Iterator[Mapping[str, Any]]:
        with super().block(level) as facts:
            yield {**facts, "before_others": max(level - self.error, 0.0), "before_timestamp_s": 1.0}

    def fails(self, target: Target, level: float) -> bool:
        return target.id in self.broken


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, at_home: None) -> type[Bench]:
    bench_type = type("Fresh", (Bench,), {"opened": []})
    monkeypatch.setattr(collection, "LocalInstruments", bench_type)
    return bench_type


def row(
    model: str = "net", level: float = 0.0, predicted: float = 1.0, measured: float = 1.0
) -> EvaluationRow:
    return EvaluationRow(
        model=model, level=level, achieved=level,
        measured_ms=measured, measured_p50_ms=measured, measured_p95_ms=measured,
        predicted_ms=predicted, predicted_p50_ms=predicted, predicted_p95_ms=predicted,
        low_ms=0.9 * predicted, high_ms=1.1 * predicted, coverage=1.0,
    )  # fmt: skip


def test_evaluate_all_models_and_levels(made_up: MadeUp, bench: type[Bench], tmp_path: Path) -> None:
    messages: list[str] = []
    evaluation = evaluate(
        made_up.models, made_up.predictor, levels=LEVELS, rounds=2, out_dir=tmp_path, min_time_s=0.2,
        progress=lambda message, fraction: messages.append(message),
    )  # fmt: skip
    names = sorted(path.stem for path in made_up.models)
    assert [(r.model, r.level) for r in evaluation.rows] == [
        (name, level) for name in names for level in LEVELS
    ]
    assert (evaluation.device, evaluation.provider) == ("Made Up", "CPUExecutionProvider") and messages
    for row in evaluation.rows:
        assert row.predicted_ms == pytest.approx(row.measured_ms, rel=0.15)
        assert row.achieved == row.level and row.coverage == 1.0
        assert row.low_ms <= row.predicted_ms <= row.high_ms
    idle, loaded = evaluation.summarize()
    assert (idle.level, idle.models, idle.slowdown, idle.predicted_slowdown) == (0.0, 6, 1.0, 1.0)
    assert loaded.slowdown == pytest.approx(slowdown(0.6), rel=0.02)
    assert loaded.predicted_slowdown == pytest.approx(slowdown(0.6), rel=0.1)
    assert json.loads(json.dumps(evaluation.to_dict(), allow_nan=False))["summary"] == list(
        map(asdict, evaluation.summarize())
    )
    # Models run with the settings of the training.
    config = read_plan(tmp_path).config
    fingerprint = made_up.predictor.fingerprint
    assert (config["provider"], config["threads"], config["stressor"]) == (
        fingerprint.provider,
        fingerprint.threads,
        "cpu-fma",
    )
    assert (config["telemetry"]["source"], config["min_time_s"]) == (fingerprint.telemetry, 0.2)
    assert len(read_rows(tmp_path)) == bench.opened[0].measured


def test_evaluate_reuses_measurements(made_up: MadeUp, bench: type[Bench], tmp_path: Path) -> None:
    file = made_up.predictor.save(tmp_path / "predictor.json")
    folder = tmp_path / "kept"
    first, repeated = (evaluate(made_up.models[:1], file, rounds=1, out_dir=folder) for _ in range(2))
    assert first == repeated
    assert [bench_instance.measured > 0 for bench_instance in bench.opened] == [True, False]
    nowhere = evaluate(made_up.models[:1], file, rounds=1, levels=[0.6], stressor="cpu-stream")
    assert [bench_instance.slowdown for bench_instance in nowhere.summarize()] == [None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "predictor.json"]


def test_evaluate_uses_load_read_before(made_up: MadeUp, bench: type[Bench]) -> None:
    bench.error = 0.3
    (result,) = evaluate(made_up.models[:1], made_up.predictor, levels=[0.6], rounds=1).rows
    graph = made_up.data.graphs[made_up.models[0].stem]
    assert result.predicted_ms == made_up.predictor.predict(graph, {"others": 0.6 - 0.3}).mean_ms
    assert result.measured_ms / result.predicted_ms == pytest.approx(slowdown(0.6) / slowdown(0.3), rel=0.1)
    assert get_load_before(
        {"before_others": 0.3, "before_busy": 0.5, "before_tensor": None, "before_timestamp_s": 1.0,
         "before_interval_s": 0.5, "before_source": "host", "load_others": 0.9, "level": 0.6}
    ) == {"others": 0.3, "busy": 0.5}  # fmt: skip


def test_evaluate_failing_model_is_reported(made_up: MadeUp, bench: type[Bench]) -> None:
    bench.broken = ("net1_b1_8",)
    evaluation = evaluate(made_up.models, made_up.predictor, rounds=1)
    assert [row.model for row in evaluation.rows] == sorted(
        path.stem for path in made_up.models if path.stem != "net1_b1_8"
    )
    assert evaluation.problems.keys() == {"net1_b1_8"} and "it fails" in evaluation.problems["net1_b1_8"]
    assert evaluation.to_dict()["problems"] == evaluation.problems
    bench.broken = tuple(path.stem for path in made_up.models)
    with pytest.raises(RunError, match="none of 6 models"):
        evaluate(made_up.models, made_up.predictor, rounds=1)


def test_evaluate_invalid_files_do_not_stop_others(
    made_up: MadeUp, bench: type[Bench], tmp_path: Path
) -> None:
    good = save(convnet(), tmp_path / "models", "good.onnx")
    save(convnet(batch="N"), tmp_path / "models", "open.onnx")
    (tmp_path / "models" / "cut.onnx").write_bytes(good.read_bytes()[:200])
    evaluation = evaluate([tmp_path / "models"], made_up.predictor, rounds=1)
    assert [row.model for row in evaluation.rows] == ["good"]
    problems = {Path(name).name: problem for name, problem in evaluation.problems.items()}
    assert problems.keys() == {"open.onnx", "cut.onnx"} and "--shape x=1,3,12,12" in problems["open.onnx"]
    shapes = {"x": (2, 3, 12, 12)}
    evaluation = evaluate([tmp_path / "models" / "open.onnx"], made_up.predictor, rounds=1, shapes=shapes)
    assert [row.model for row in evaluation.rows] == ["open"] and not evaluation.problems
    good.unlink()
    with pytest.raises(InputError, match="none of 2 files"):
        evaluate([tmp_path / "models"], made_up.predictor, rounds=1)
    # The only file gives its own error.
    with pytest.raises(FileFormatError, match=r"cut\.onnx"):
        evaluate([tmp_path / "models" / "cut.onnx"], made_up.predictor, rounds=1)


def test_evaluate_load_of_idle_predictor_raises(made_up: MadeUp, bench: type[Bench]) -> None:
    contention = replace(made_up.predictor.contention, samples=0)
    predictor = made_up.predictor.model_copy(update={"contention": contention})
    with pytest.raises(InputError, match="idle measurements only"):
        evaluate(made_up.models, predictor, levels=[0.0, 0.6])
    assert bench.opened == []


def test_evaluation_row_of_unbounded_interval() -> None:
    unbounded = replace(row(), high_ms=math.inf)
    assert unbounded.in_interval
    assert json.loads(json.dumps(unbounded.to_dict(), allow_nan=False))["high_ms"] is None


def test_evaluate_invalid_arguments_raise(made_up: MadeUp, bench: type[Bench], tmp_path: Path) -> None:
    with pytest.raises(InputError):
        evaluate([tmp_path / "absent.onnx"], made_up.predictor)
    with pytest.raises(InputError):
        evaluate(made_up.models, tmp_path / "absent.json")
    assert all(instruments.measured == 0 for instruments in bench.opened)


def test_evaluate_other_device_raises(made_up: MadeUp, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("it must be refused before it is opened")

    monkeypatch.setattr(collection, "LocalInstruments", never)
    with pytest.raises(InputError):
        evaluate(made_up.models, made_up.predictor, telemetry=TelemetryConfig())


def test_summarize_errors_and_intervals() -> None:
    rows = (
        row("a", 0.0, predicted=1.05),
        row("b", 0.0, predicted=0.8),
        row("a", 0.6, predicted=2.0, measured=2.0),
        row("c", 0.6, predicted=3.0, measured=2.0),
    )
    assert [row.error for row in rows] == pytest.approx([0.05, -0.2, 0.0, 0.5])
    assert [row.in_interval for row in rows] == [True, False, True, False]
    evaluation = PredictorEvaluation(rows=rows, device="d", provider="p", threads=1)
    idle, loaded = evaluation.summarize()
    assert asdict(idle) == {
        "level": 0.0, "models": 2, "mape": pytest.approx(0.125), "within_10": 0.5, "intervals": 0.5,
        "slowdown": 1.0, "predicted_slowdown": 1.0,
    }  # fmt: skip
    # Only the model with an idle measurement has a slowdown.
    assert loaded.slowdown == 2.0 and loaded.predicted_slowdown == pytest.approx(2.0 / 1.05)


def test_report_contains_models_and_quality(made_up: MadeUp, tmp_path: Path) -> None:
    rows = tuple(
        row(path.stem, level, predicted=1.234 * slowdown(level), measured=slowdown(level))
        for path in made_up.models
        for level in LEVELS
    )
    evaluation = PredictorEvaluation(
        rows=rows, device="Made Up <1>", provider="CPUExecutionProvider", threads=2
    )
    page = write_report(
        evaluation, tmp_path / "new", quality=made_up.predictor.quality, environment={"seed": 7},
        reproduce="sparseflow latency evaluate models",
    )  # fmt: skip
    assert page == tmp_path / "new" / "report.html"
    text = page.read_text()
    assert all(path.stem in text for path in made_up.models)
    for text_part in (
        "23.4 %", "load 0.6", "idle", "Made Up &lt;1&gt;", "held-out kernels", "held-out networks", "leaky",
        "load unknown", "sparseflow latency evaluate models",
        "<svg",
    ):  # fmt: skip
        assert text_part in text, text_part
    assert "Made Up <1>" not in text
    plain = write_report(evaluation, tmp_path).read_text()
    assert "held-out" not in plain and all(path.stem in plain for path in made_up.models)
