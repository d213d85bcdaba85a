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

from onnx import TensorProto, helper

from sparseflow.cli.root import run
from sparseflow.core.telemetry.schema import LoadReading
from sparseflow.latency import api, calibration, first_answer
from sparseflow.latency.measure import collection
from sparseflow.latency.measure.blocks import list_blocks
from sparseflow.latency.measure.fingerprint import DeviceFingerprint
from sparseflow.latency.measure.peaks import Peaks
from sparseflow.latency.model.predictor import Predictor
from tests.latency.conftest import few_tries
from tests.latency.onnx_models import FLOAT, convnet, looping, model, save
from tests.latency.synthetic import SyntheticBench, make_collection, make_networks, slowdown

pytestmark = pytest.mark.usefixtures("undrawn_figures")

PEAKS = Peaks(flops_per_s=1e10, bytes_per_s=1e9, launch_ms=0.01)


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
    assert record["fingerprint"] == predictor.fingerprint.to_dict() and record["notes"] == []
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
        kernels_ms = sum(k["count"] * k["mean_ms"] for k in result["per_kernel"])
        assert result["call_ms"] + kernels_ms == pytest.approx(result["mean_ms"])
    memory = idle["memory"]
    assert memory["peak_bytes"] == memory["weight_bytes"] + memory["activation_bytes"] > 0
    text = run_text(["predict", model, "--predictor", file], capsys)
    assert f"mean {idle['mean_ms']:.3f} ms" in text and "no load: 1.00x; 100 %" in text
    assert "1 thread; idle" in text and idle["threads"] == 1
    assert "measured" in text and "Conv_Relu" in text
    text = run_text(["predict", model, "--predictor", file, "--load", "0.6"], capsys)
    assert f"others 60 %: {loaded['slowdown']:.2f}x" in text and "extrapolated" not in text
    text = run_text(["predict", model, "--predictor", file, "--load", "0.95"], capsys)
    assert "95 % is above the highest one of the training, 80 %" in text


def test_predict_hugging_face_folder(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    capsys.readouterr()
    arguments = ["predict", f"hf:{tmp_path}", "--predictor", str(trained.file)]
    single, batch = (run_json([*arguments, *more], capsys) for more in ([], ["--shape", "batch=8"]))
    assert single["model"] == f"hf:{tmp_path}" and batch["mean_ms"] > single["mean_ms"]
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    assert run(["latency", *arguments]) == 2
    assert "pickled weights are not loaded" in capsys.readouterr().err


def test_predict_sweep_and_loads_print_table_and_write_picture(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save(convnet(batch="N", size="side"), tmp_path))
    file = str(trained.file)
    arguments = ["predict", path, "--predictor", file, "--shape", "side=8", "--sweep", "batch=1,2,4"]
    result = run_json([*arguments, "--plot", str(tmp_path / "sweep.svg")], capsys)
    assert [point["sizes"] for point in result["points"]] == [{"batch": [n]} for n in (1, 2, 4)]
    assert [point["items"] for point in result["points"]] == [1, 2, 4]
    means = [point["prediction"]["mean_ms"] for point in result["points"]]
    assert means == sorted(means)
    assert result["plot"] == str(tmp_path / "sweep.svg") and "batch" in (tmp_path / "sweep.svg").read_text()
    text = run_text([*arguments, "--load", "0.4"], capsys)
    assert "items/s" in text and "memory MB" in text
    shapes = ["predict", path, "--predictor", file, "--sweep", "x=1,3,8,8:1,3,12,12"]
    text = run_text([*shapes, "--plot", str(tmp_path / "shapes.png")], capsys)
    assert "1×3×12×12" in text and (tmp_path / "shapes.png").read_bytes().startswith(b"\x89PNG")
    loads = ["predict", str(trained.models[0]), "--predictor", file, "--loads", "0:0.8:0.4"]
    result = run_json([*loads, "--plot", str(tmp_path / "loads.png")], capsys)
    assert [entry["load"] for entry in result["loads"]] == [{"others": s} for s in (0.0, 0.4, 0.8)]
    assert "p95" in run_text(loads, capsys) and (tmp_path / "loads.png").is_file()


def test_predict_beside_co_runner(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(trained.models[0])
    other = save(convnet(batch="N", size=12), tmp_path)
    arguments = ["predict", path, "--predictor", str(trained.file), "--beside", f"{other}@2000/s"]
    options = ["--beside-shape", "x=2,3,12,12", "--beside-cpus", "1"]
    result = run_json([*arguments, *options], capsys)
    assert result["slowdown"] > 1.2 and result["load"] == {}
    assert result["co_runner"]["rate_per_s"] == 2000.0 and result["co_runner"]["core_share"] == 1.0
    assert f"beside {other}" in run_text([*arguments, *options], capsys).replace(" ", " ")
    for more in ([], ["--load", "0.5"], ["--beside-cpus", "9"], ["--sweep", "batch=1"]):
        assert run(["latency", *arguments, *more]) == 2
    assert run(["latency", *arguments[:-2], "--beside-cpus", "1"]) == 2


def test_predict_sweep_with_failures_and_limits(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save(convnet(batch="N", size=8), tmp_path))
    arguments = ["predict", path, "--predictor", str(trained.file)]
    result = run_json([*arguments, "--sweep", "batch=1,1000000000"], capsys, code=1)
    assert result["points"][0]["problem"] is None and "GB" in result["points"][1]["problem"]
    for options in (
        ["--sweep", "batch"], ["--sweep", "batch=x"], ["--sweep", "=1"], ["--sweep", "batch=1,-2"],
        ["--sweep", "batch=1", "--sweep", "batch=2"], ["--loads", "0.9:0"], ["--loads", "0"],
        ["--loads", "0:0.9:0"], ["--loads", "0:2"], ["--sweep", "batch=1", "--loads", "0:1"],
        ["--loads", "0:1", "--load", "0.5"], ["--plot", str(tmp_path / "a.png")],
        ["--sweep", "batch=1", "--plot", str(tmp_path / "a.jpg")],
    ):  # fmt: skip
        assert run(["latency", *arguments, *options]) == 2, options


def test_predict_guess_says_so_and_strict_fails(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = helper.make_node(
        "TfIdfVectorizer", ["x"], ["y"], mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0,
        ngram_counts=[0], ngram_indexes=[0, 1, 2], pool_int64s=[0, 1, 2],
    )  # fmt: skip
    inputs = [("x", TensorProto.INT64, [6])]
    path = save(model([node], inputs, [("y", FLOAT, [3])]), tmp_path)
    command = ["predict", str(path), "--predictor", str(trained.file)]
    text = run_text(command, capsys)
    assert "to unbounded; 100 % of it is a guess)" in text
    assert (
        "note: 100 % of the latency is a guess" in text and "the work of TfIdfVectorizer is unknown" in text
    )
    assert run_json([*command, "--strict"], capsys, code=1)["interval"][1] is None
    assert "the sums omit the unknown work of: 1 TfIdfVectorizer" in run_text(["analyze", str(path)], capsys)
    run_json(["predict", str(trained.models[0]), "--predictor", str(trained.file), "--strict"], capsys)


def test_predict_loop_from_its_body(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--predictor", str(trained.file), "--strict"]
    for trips in (1, 500):
        path = save(looping(trips), tmp_path, f"{trips}.onnx")
        result = run_json(["predict", str(path), *command], capsys, code=1)
        assert [kernel["source"] for kernel in result["per_kernel"]] == ["composed"]
        assert "did not measure MatMul" in result["notes"][0] and result["interval"][1] is not None
    assert "Loop" in run_text(["analyze", str(path)], capsys)


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
    assert len(result["rows"]) == 2 * len(trained.models) and result["threads"] == 1
    assert [part["level"] for part in result["summary"]] == [0.0, 0.6]
    assert result["summary"][1]["slowdown"] == pytest.approx(slowdown(0.6), rel=0.02)
    text = run_text([*command, "--load", "0", "--load", "0.6"], capsys)
    assert "load 0.00: MAPE" in text and "slowdown 1.43x (predicted" in text and "–" in text
    assert "report:" not in text
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"no model")
    result = run_json([*command, str(bad)], capsys, code=1)
    assert len(result["rows"]) == len(trained.models) and list(result["problems"]) == [str(bad)]
    save(convnet(batch="n"), tmp_path, "open.onnx")
    result = run_json([*command, str(tmp_path / "open.onnx"), "--shape", "x=2,3,12,12"], capsys)
    assert "open" in {row["model"] for row in result["rows"]} and not result["problems"]
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
        (["quickstart", "--loads", "0.3,half"], "InputError", "--loads 0.3,half"),
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


@pytest.mark.usefixtures("_empty_directories")
def test_predict_without_predictor(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(trained.models[0])
    stated = run_json(["predict", model, "--peaks", "flops=1e10,bytes=1e9,launch_us=10"], capsys)
    slower = run_json(["predict", model, "--peaks", "flops=1e9,bytes=1e8,launch_us=100"], capsys)
    assert stated["origin"] == "peaks" and "calibrate" in " ".join(stated["notes"])
    assert slower["mean_ms"] == pytest.approx(10.0 * stated["mean_ms"], rel=0.05)
    text = run_text(["predict", model, "--peaks", "flops=1e10,bytes=1e9,launch_us=10"], capsys)
    assert "first answer from peaks, measured 0 seconds ago" in text
    assert "10 GFLOP/s, 1 GB/s, 10 µs per launch" in text
    text = run_text(["predict", model, "--predictor", str(trained.file)], capsys)
    assert "trained predictor, measured" in text and "Made Up, CPUExecutionProvider, threads 1" in text
    assert run(["latency", "predict", model, "--peaks", "flops=1e10"]) == 2
    assert "--peaks flops=1e10" in capsys.readouterr().err


@pytest.mark.usefixtures("_empty_directories")
def test_calibrate_predictor_answers(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "list_blocks", lambda: list_blocks()[:1])
    monkeypatch.setattr(calibration, "measure_idle_ms", lambda runner, seconds: 1.0)
    monkeypatch.setattr(first_answer, "measure_peaks", lambda provider, **settings: PEAKS)
    result = run_json(["calibrate", "--budget-s", "5"], capsys)
    assert result["networks"] == 1 and Path(result["path"]).is_relative_to(tmp_path)
    assert run_json(["predict", str(trained.models[0])], capsys)["origin"] == "calibrated"
    text = run_text(["calibrate", "--budget-s", "5", "--out", str(tmp_path / "here.json")], capsys)
    assert "% before" in text and str(tmp_path / "here.json") in text
    assert run(["latency", "calibrate", "--budget-s", "1"]) == 2


@pytest.fixture
def _empty_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))
