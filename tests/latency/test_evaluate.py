"""Predicted against measured on the made-up device, and the page of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from sparseflow.errors import InputError, RunError
from sparseflow.latency import collect
from sparseflow.latency.campaign import Item, Telemetry
from sparseflow.latency.collect import read, read_plan
from sparseflow.latency.dataset import load_before
from sparseflow.latency.evaluate import Evaluated, Evaluation, evaluate
from sparseflow.latency.report import write_report
from tests.latency.conftest import MadeUp
from tests.latency.synthetic import SyntheticBench, slowdown

LEVELS = (0.0, 0.6)


class Bench(SyntheticBench):
    """The made-up device in the place of this machine."""

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

    def fails(self, item: Item, level: float) -> bool:
        return item.id in self.broken


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, at_home: None) -> type[Bench]:
    made = type("Fresh", (Bench,), {"opened": []})
    monkeypatch.setattr(collect, "Bench", made)
    return made


def row(model: str = "net", level: float = 0.0, predicted: float = 1.0, measured: float = 1.0) -> Evaluated:
    return Evaluated(
        model=model, level=level, achieved=level,
        measured_ms=measured, measured_p50_ms=measured, measured_p95_ms=measured,
        predicted_ms=predicted, predicted_p50_ms=predicted, predicted_p95_ms=predicted,
        low_ms=0.9 * predicted, high_ms=1.1 * predicted, coverage=1.0,
    )  # fmt: skip


def test_every_model_is_compared_at_every_level(made_up: MadeUp, bench: type[Bench], tmp_path: Path) -> None:
    told: list[str] = []
    found = evaluate(
        made_up.models, made_up.predictor, levels=LEVELS, rounds=2, out=tmp_path, seconds=0.2,
        progress=lambda what, done: told.append(what),
    )  # fmt: skip
    names = sorted(path.stem for path in made_up.models)
    assert [(r.model, r.level) for r in found.rows] == [(name, level) for name in names for level in LEVELS]
    assert (found.device, found.provider) == ("Made Up", "CPUExecutionProvider") and told
    for one in found.rows:
        assert one.predicted_ms == pytest.approx(one.measured_ms, rel=0.15)
        assert one.achieved == one.level and one.coverage == 1.0
        assert one.low_ms <= one.predicted_ms <= one.high_ms
    rest, loaded = found.summary()
    assert (rest["level"], rest["models"], rest["slowdown"], rest["predicted_slowdown"]) == (0.0, 6, 1.0, 1.0)
    assert loaded["slowdown"] == pytest.approx(slowdown(0.6), rel=0.02)
    assert loaded["predicted_slowdown"] == pytest.approx(slowdown(0.6), rel=0.1)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["summary"] == found.summary()
    # Models run as they did when the predictor was trained.
    config = read_plan(tmp_path).config
    mark = made_up.predictor.fingerprint
    assert (config["provider"], config["threads"], config["stressor"]) == ("cpu", mark.threads, "cpu-fma")
    assert (config["telemetry"]["source"], config["min_time_s"]) == (mark.telemetry, 0.2)
    assert len(read(tmp_path)) == bench.opened[0].measured


def test_what_was_measured_is_kept_and_not_measured_again(
    made_up: MadeUp, bench: type[Bench], tmp_path: Path
) -> None:
    file = made_up.predictor.save(tmp_path / "predictor.json")
    folder = tmp_path / "kept"
    first, again = (evaluate(made_up.models[:1], file, rounds=1, out=folder) for _ in range(2))
    assert first == again
    assert [one.measured > 0 for one in bench.opened] == [True, False]
    nowhere = evaluate(made_up.models[:1], file, rounds=1, levels=[0.6], stressor="cpu-stream")
    assert [one["slowdown"] for one in nowhere.summary()] == [None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "predictor.json"]


def test_a_prediction_is_told_what_was_read_before_and_not_what_was_asked_for(
    made_up: MadeUp, bench: type[Bench]
) -> None:
    bench.error = 0.3
    (found,) = evaluate(made_up.models[:1], made_up.predictor, levels=[0.6], rounds=1).rows
    graph = made_up.data.graphs[made_up.models[0].stem]
    assert found.predicted_ms == made_up.predictor.predict(graph, {"others": 0.6 - 0.3}).mean_ms
    assert found.measured_ms / found.predicted_ms == pytest.approx(slowdown(0.6) / slowdown(0.3), rel=0.1)
    assert load_before(
        {"before_others": 0.3, "before_busy": 0.5, "before_tensor": None, "before_timestamp_s": 1.0,
         "before_interval_s": 0.5, "before_source": "host", "load_others": 0.9, "level": 0.6}
    ) == {"others": 0.3, "busy": 0.5}  # fmt: skip


def test_a_model_that_cannot_run_is_an_error_that_names_it(made_up: MadeUp, bench: type[Bench]) -> None:
    bench.broken = ("net1_b1_8",)
    with pytest.raises(RunError, match=r"net1_b1_8.*it fails"):
        evaluate(made_up.models, made_up.predictor, rounds=1)
    bench.broken = tuple(path.stem for path in made_up.models)
    with pytest.raises(RunError, match="it fails"):
        evaluate(made_up.models, made_up.predictor, rounds=1)


def test_what_cannot_be_used_is_refused_before_anything_runs(
    made_up: MadeUp, bench: type[Bench], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        evaluate([tmp_path / "absent.onnx"], made_up.predictor)
    with pytest.raises(InputError, match="sparseflow latency train"):
        evaluate(made_up.models, tmp_path / "absent.json")
    assert all(one.measured == 0 for one in bench.opened)


def test_a_predictor_of_another_device_is_not_evaluated_here(
    made_up: MadeUp, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("it must be refused before it is opened")

    monkeypatch.setattr(collect, "Bench", never)
    with pytest.raises(InputError, match="this machine is of another device"):
        evaluate(made_up.models, made_up.predictor, telemetry=Telemetry())


def test_errors_have_a_sign_and_the_summary_counts_what_is_near() -> None:
    rows = (
        row("a", 0.0, predicted=1.05),
        row("b", 0.0, predicted=0.8),
        row("a", 0.6, predicted=2.0, measured=2.0),
        row("c", 0.6, predicted=3.0, measured=2.0),
    )
    assert [one.error for one in rows] == pytest.approx([0.05, -0.2, 0.0, 0.5])
    assert [one.within for one in rows] == [True, False, True, False]
    found = Evaluation(rows=rows, device="d", provider="p")
    rest, loaded = found.summary()
    assert rest == {
        "level": 0.0, "models": 2, "mape": pytest.approx(0.125), "within_10": 0.5, "intervals": 0.5,
        "slowdown": 1.0, "predicted_slowdown": 1.0,
    }  # fmt: skip
    # Only the model that was measured at rest too tells a slowdown.
    assert loaded["slowdown"] == 2.0 and loaded["predicted_slowdown"] == pytest.approx(2.0 / 1.05)


def test_the_page_holds_every_model_and_what_training_held_out(made_up: MadeUp, tmp_path: Path) -> None:
    rows = tuple(
        row(path.stem, level, predicted=1.234 * slowdown(level), measured=slowdown(level))
        for path in made_up.models
        for level in LEVELS
    )
    found = Evaluation(rows=rows, device="Made Up <1>", provider="CPUExecutionProvider")
    page = write_report(
        found, tmp_path / "new", quality=made_up.predictor.quality, environment={"seed": 7},
        reproduce="sparseflow latency evaluate models",
    )  # fmt: skip
    assert page == tmp_path / "new" / "report.html"
    text = page.read_text()
    assert all(path.stem in text for path in made_up.models)
    for said in (
        "23.4 %", "at load 0.6", "at rest", "Made Up &lt;1&gt;", "whole kernels held out",
        "whole networks held out", "leaky", "not told of them", "sparseflow latency evaluate models",
        "<svg",
    ):  # fmt: skip
        assert said in text, said
    assert "Made Up <1>" not in text
    plain = write_report(found, tmp_path).read_text()
    assert "held out" not in plain and all(path.stem in plain for path in made_up.models)
