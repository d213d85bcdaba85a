"""`sparseflow latency` train, predict, evaluate and overlap: text output, JSON output and errors."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("yaml")
pytest.importorskip("xgboost")
pytest.importorskip("scipy")

from onnx import helper

from sparseflow.cli.root import run
from sparseflow.core.telemetry.schema import LoadReading
from sparseflow.latency import api
from sparseflow.latency.measure import collection
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.model.predictor import Predictor
from tests.latency.conftest import few_tries
from tests.latency.onnx_models import FLOAT, convnet, model, save, values
from tests.latency.synthetic import SyntheticBench, make_collection, make_networks, slowdown


@dataclass(frozen=True)
class Trained:
    """Predictor of a synthetic device, the output of its training, and models."""

    file: Path
    printed: str
    models: list[Path]
    kernels: list[Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    models, kernels = make_networks(folder, 2)
    idle = make_collection(folder, models, kernels, out="rest", levels=[0.0])
    loaded_collection = make_collection(folder, models, [], out="load", levels=[0.0, 0.4, 0.8], rounds=1)
    file = folder / "predictors" / "made_up.json"
    with pytest.MonkeyPatch.context() as patch, few_tries():
        printed: list[str] = []
        patch.setattr("typer.echo", lambda text, **settings: printed.append(text))
        assert run(["latency", "train", str(idle), str(loaded_collection), "--out", str(file), "--json"]) == 0
    (text,) = printed
    return Trained(file, text, models, kernels)


@pytest.fixture(autouse=True)
def _synthetic_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace fingerprint checks and instruments by those of the synthetic device."""

    class Bench(SyntheticBench):
        def __enter__(self) -> Bench:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(DeviceFingerprint, "check_local_device", lambda self, gpu=0: None)
    monkeypatch.setattr(collection, "LocalInstruments", Bench)


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """Run a command with --json and parse its only output line."""
    assert run(["latency", *arguments, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def run_text(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command and join its output to one line."""
    assert run(["latency", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_train_saves_predictor_and_reports_quality(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.loads(trained.printed)
    assert record["path"] == str(trained.file)
    predictor = Predictor.load(trained.file)
    assert {name: record[name] for name in predictor.quality} == predictor.quality
    assert record["fingerprint"] == predictor.fingerprint.to_dict()
    assert set(record["models"]) == {"rest", "loaded", "loaded_blind"}
    table = record["table"]
    assert table["rows"] == record["counts"]["kernels"] and len(table["head"]) == 5
    for row in table["head"]:
        assert list(row) == ["kernel_id", *table["columns"], "latency_ms"]
        assert row["latency_ms"] == predictor.measured_ms[row["kernel_id"]]
        assert sum(row[name] for name in table["columns"] if name.startswith("op=")) == 1.0

    kernels = make_collection(tmp_path, [], trained.kernels, levels=[0.0], rounds=1)
    out = tmp_path / "predictor.json"
    text = run_text(["train", str(kernels), "--out", str(out), "--regressor", "random_forest"], capsys)
    assert "training data:" in text and table["head"][0]["kernel_id"] in text
    assert "leaky" in text and "under load" not in text and "random_forest *" in text
    assert "Made Up, CPUExecutionProvider" in text
    assert Predictor.load(out).regressor.kind == "random_forest"


def test_predict_idle_and_under_load(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = str(trained.models[0]), str(trained.file)
    idle = run_json(["predict", model, "--predictor", file], capsys)
    loaded = run_json(["predict", model, "--predictor", file, "--load", "0.6"], capsys)
    assert idle["model"] == model and idle["load"] == {} and loaded["load"] == {"others": 0.6}
    assert idle["idle_ms"] == loaded["idle_ms"] == pytest.approx(idle["mean_ms"])
    assert loaded["slowdown"] == pytest.approx(slowdown(0.6), rel=0.1)
    for result in (idle, loaded):
        low, high = result["interval"]
        assert low <= result["mean_ms"] <= high and result["p50_ms"] <= result["p95_ms"]
        assert sum(k["count"] * k["mean_ms"] for k in result["per_kernel"]) == pytest.approx(
            result["mean_ms"]
        )
    text = run_text(["predict", model, "--predictor", file], capsys)
    assert f"mean {idle['mean_ms']:.3f} ms" in text and "no load: 1.00x; 100 %" in text
    assert "measured" in text and "Conv_Relu" in text
    text = run_text(["predict", model, "--predictor", file, "--load", "0.6"], capsys)
    assert f"others 60 %: {loaded['slowdown']:.2f}x" in text


def test_predict_guess_says_so_and_strict_fails(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=8)
    weights = {"w": values(1, 24, 4), "r": values(1, 24, 8)}
    path = save(model([node], [("x", FLOAT, [5, 1, 4])], [("y", FLOAT, None)], weights), tmp_path)
    command = ["predict", str(path), "--predictor", str(trained.file)]
    text = run_text(command, capsys)
    assert "to unbounded; 100 % of it is a guess)" in text
    assert "note: 100 % of the latency is a guess" in text and "the work of GRU is unknown" in text
    assert run_json([*command, "--strict"], capsys, code=1)["interval"][1] is None
    assert "the sums omit the unknown work of: 1 GRU" in run_text(["analyze", str(path)], capsys)
    run_json(["predict", str(trained.models[0]), "--predictor", str(trained.file), "--strict"], capsys)


def test_check_exit_codes_report_and_baseline(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, junit, baseline = str(trained.models[0]), tmp_path / "report.xml", tmp_path / "latency.json"
    command = ["check", path, "--predictor", str(trained.file)]
    (entry,) = run_json([*command, "--budget-ms", "1e6", "--strict"], capsys)["models"]
    assert entry["status"] == "passed" and entry["name"] == path
    budget = ["--budget-ms", str(entry["mean_ms"] / 2), "--junit", str(junit)]
    assert run_json([*command, *budget], capsys, code=1)["counts"] == {"passed": 0, "failed": 1, "error": 0}
    assert b"<failure" in junit.read_bytes()
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"no model")
    result = run_json([*command, str(bad), *budget], capsys, code=2)
    assert result["counts"] == {"passed": 0, "failed": 1, "error": 1} and b"<error" in junit.read_bytes()

    against = ["--baseline", str(baseline)]
    run_json([*command, *against, "--update-baseline"], capsys)
    record = json.loads(baseline.read_text())
    assert record["mean_ms"] == {path: entry["mean_ms"]}
    baseline.write_text(json.dumps({**record, "mean_ms": {path: entry["mean_ms"] / 1.2}}))
    (regressed,) = run_json([*command, *against], capsys, code=1)["models"]
    assert regressed["change"] == pytest.approx(0.2)
    assert run(["latency", *command, *against]) == 1
    out = capsys.readouterr().out
    assert "+20.0 %" in out and f"{path}: the mean latency" in out
    run_json([*command, *against, "--max-regression", "21%"], capsys)
    run_json([*command, *against, "--update-baseline"], capsys)
    assert json.loads(baseline.read_text()) == record


def test_predict_config_gives_predictor_and_telemetry_and_options_win(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[dict[str, Any]] = []

    class Reader:
        def __init__(self, source: str, **settings: Any) -> None:
            requests.append({"source": source, **settings})

        def read(self, window_s: float) -> LoadReading:
            requests[-1]["window_s"] = window_s
            return LoadReading(
                timestamp_s=1e9, interval_s=1.0, source="host", device="cpu", shares={"others": 0.4}
            )

    monkeypatch.setattr(api, "open_reader", Reader)
    folder = tmp_path / "inference"
    folder.mkdir()
    (folder / "predictor.json").write_bytes(trained.file.read_bytes())
    config = folder / "config.yaml"
    config.write_text(
        "predictor: predictor.json\nwindow_s: 5\ntelemetry:\n  source: prometheus\n  url: http://a:9090\n"
        "  labels: {gpu: '0'}\n  metrics: [others]\n  max_age_s: 7\n"
    )
    command = ["predict", str(trained.models[0]), "--config", str(config)]
    assert run_json(command, capsys)["load"] == {"others": 0.4}
    options = ["--url", "http://b:1", "--label", "gpu=1", "--max-age-s", "30", "--window-s", "1"]
    run_json([*command, *options], capsys)
    run_json([*command, "--live", "host"], capsys)
    shared = {"source": "prometheus", "metrics": ["others"], "device": "cuda:0"}
    assert requests == [
        {**shared, "url": "http://a:9090", "labels": {"gpu": "0"}, "max_age_s": 7.0, "window_s": 5.0},
        {**shared, "url": "http://b:1", "labels": {"gpu": "1"}, "max_age_s": 30.0, "window_s": 1.0},
        {**shared, "source": "host", "url": None, "labels": None, "metrics": None, "max_age_s": 30.0,
         "window_s": 5.0},
    ]  # fmt: skip
    assert run_json([*command, "--load", "0.6"], capsys)["load"] == {"others": 0.6}
    error = run_json([*command, "--predictor", str(tmp_path / "absent")], capsys, code=2)["error"]
    assert "absent" in error["message"]
    config.write_text("telemetry: {source: prometheus, adress: http://a}")
    assert "telemetry.adress" in run_json(command, capsys, code=2)["error"]["message"]


def test_predict_live_reads_current_load(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["predict", str(trained.models[0]), "--predictor", str(trained.file)]
    result = run_json([*command, "--live", "host", "--window-s", "0.2"], capsys)
    assert 0.0 <= result["load"]["others"] <= 1.0 and result["mean_ms"] >= result["idle_ms"]


def test_evaluate_compares_and_writes_report(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["evaluate", *map(str, trained.models), "--predictor", str(trained.file), "--rounds", "1"]
    result = run_json([*command, "--load", "0", "--load", "0.6", "--out", str(tmp_path / "out")], capsys)
    assert Path(result["report"]) == tmp_path / "out" / "report.html"
    page = Path(result["report"]).read_text()
    assert all(path.stem in page for path in trained.models)
    assert len(result["rows"]) == 2 * len(trained.models)
    assert [part["level"] for part in result["summary"]] == [0.0, 0.6]
    assert result["summary"][1]["slowdown"] == pytest.approx(slowdown(0.6), rel=0.02)
    text = run_text([*command, "--load", "0", "--load", "0.6"], capsys)
    assert "load 0.00: MAPE" in text and "slowdown 1.43x (predicted" in text and "–" in text
    assert "report:" not in text
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"no model")
    result = run_json([*command, str(bad)], capsys, code=1)
    assert len(result["rows"]) == len(trained.models) and list(result["problems"]) == [str(bad)]
    assert run_json([*command], capsys)["report"] is None
    assert f"report: {tmp_path}" in run_text([*command, "--out", str(tmp_path / "two")], capsys)


def test_overlap_reports_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save(convnet(), tmp_path))
    result = run_json(["overlap", model], capsys)
    assert result["model"] == model and result["mode"] in ("sum", "critical_path")
    assert result["nodes"] > 0 and result["nodes"] % 5 == 0
    assert 0.0 <= result["share"] < 1.0 and result["busy_ms"] > 0.0 and result["span_ms"] > 0.0
    text = run_text(["overlap", model, "--parallel"], capsys)
    assert "nodes ran" in text and "in parallel: " in text
    open_model = str(save(convnet(batch="N"), tmp_path, "open.onnx"))
    assert run_json(["overlap", open_model, "--shape", "x=2,3,12,12"], capsys)["nodes"] > 0
    assert run_json(["overlap", open_model], capsys, code=2)["error"]["type"] == "InputError"


def test_invalid_arguments_exit_with_2_and_show_the_value(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = str(trained.models[0]), str(trained.file)
    absent, trap, bad = (tmp_path / name for name in ("absent", "trap.json", "bad.onnx"))
    trap.write_bytes(pickle.dumps({"format": "sparseflow.latency.predictor"}))
    bad.write_bytes(b"no model")
    (tmp_path / "empty").mkdir()
    base = ["predict", model, "--predictor", file]
    for arguments, kind, value in (
        (["train"], "UsageError", "collections"),
        (["train", str(absent)], "InputError", "absent"),
        (["train", str(absent), "--regressor", "forest"], "UsageError", "'forest'"),
        (["train", str(absent), "--composition", "fastest"], "UsageError", "'fastest'"),
        (["predict", model, "--predictor", str(absent)], "InputError", "absent"),
        (["predict", model, "--predictor", str(trap)], "FileFormatError", "trap.json"),
        (["predict", str(bad), "--predictor", file], "FileFormatError", "bad.onnx"),
        (["predict", str(absent), "--predictor", file], "InputError", "absent"),
        ([*base, "--load", "1.5"], "UsageError", "--load"),
        ([*base, "--load", "0.5", "--live", "host"], "InputError", "--load 0.5"),
        ([*base, "--url", "http://127.0.0.1:9"], "InputError", "--live prometheus"),
        ([*base, "--live", "prometheus"], "InputError", "url"),
        ([*base, "--live", "dcgm"], "UsageError", "'dcgm'"),
        ([*base, "--shape", "x"], "InputError", "--shape x"),
        ([*base, "--device", "cuda:1"], "InputError", "--device cuda:1"),
        (["evaluate", str(absent), "--predictor", file], "InputError", "absent"),
        (["evaluate", model, "--predictor", str(absent)], "InputError", "absent"),
        (["evaluate", model, "--predictor", file, "--load", "2"], "UsageError", "--load"),
        (["evaluate", model, "--predictor", file, "--rounds", "0"], "UsageError", "--rounds"),
        (["overlap", str(bad)], "FileFormatError", "bad.onnx"),
        (["check", model, "--predictor", file], "InputError", "--budget-ms"),
        (["check", model, "--predictor", file, "--update-baseline"], "InputError", "--baseline"),
        (["check", model, "--predictor", file, "--baseline", str(absent)], "InputError", "absent"),
        (["check", model, "--predictor", file, "--max-guess", "0.1"], "InputError", "--max-guess 0.1"),
        (["check", str(tmp_path / "empty"), "--predictor", file, "--strict"], "InputError", "empty"),
    ):
        error = run_json(arguments, capsys, code=2)["error"]
        assert error["type"] == kind and value in error["message"], (arguments, error)


def test_unreachable_server_and_foreign_device_fail(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["predict", str(trained.models[0]), "--predictor", str(trained.file)]
    url = "http://127.0.0.1:1"
    error = run_json([*base, "--live", "prometheus", "--url", url], capsys, code=1)["error"]
    assert error["type"] == "DeviceError" and url in error["message"]
    monkeypatch.undo()
    error = run_json(base, capsys, code=2)["error"]
    assert error["type"] == "InputError" and "Made Up" in error["message"]
