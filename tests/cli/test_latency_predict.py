"""`sparseflow latency train`, `predict`, `evaluate` and `overlap`, for readers and for scripts."""

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

from sparseflow.cli.root import run
from sparseflow.latency import collect
from sparseflow.latency.fingerprint import Fingerprint
from sparseflow.latency.predictor import Predictor
from tests.latency.conftest import few_tries
from tests.latency.onnx_models import convnet, save
from tests.latency.synthetic import SyntheticBench, collection, networks, slowdown


@dataclass(frozen=True)
class Trained:
    """A predictor that the command made of the made-up device, what it printed, and models to ask about."""

    file: Path
    printed: str
    models: list[Path]
    kernels: list[Path]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    models, kernels = networks(folder, 2)
    rest = collection(folder, models, kernels, out="rest", levels=[0.0])
    beside = collection(folder, models, [], out="load", levels=[0.0, 0.4, 0.8], rounds=1)
    file = folder / "predictors" / "made_up.json"
    with pytest.MonkeyPatch.context() as patch, few_tries():
        printed: list[str] = []
        patch.setattr("typer.echo", lambda text, **settings: printed.append(text))
        assert run(["latency", "train", str(rest), str(beside), "--out", str(file), "--json"]) == 0
    (text,) = printed
    return Trained(file, text, models, kernels)


@pytest.fixture(autouse=True)
def made_up_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine passes for the made-up device, and its instruments for this machine's."""

    class Bench(SyntheticBench):
        def __enter__(self) -> Bench:
            return self

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(Fingerprint, "check_here", lambda self, gpu=0: None)
    monkeypatch.setattr(collect, "Bench", Bench)


def told(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    """The one object on standard output."""
    assert run(["latency", *arguments, "--json"]) == code
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def shown(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a reader gets, on one line."""
    assert run(["latency", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_train(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(trained.printed)
    assert record["path"] == str(trained.file)
    predictor = Predictor.load(trained.file)
    assert {name: record[name] for name in predictor.quality} == predictor.quality
    assert record["fingerprint"] == predictor.fingerprint.to_dict()
    assert set(record["models"]) == {"rest", "loaded", "loaded_blind"}

    kernels = collection(tmp_path, [], trained.kernels, levels=[0.0], rounds=1)
    out = tmp_path / "predictor.json"
    text = shown(["train", str(kernels), "--out", str(out), "--kind", "random_forest"], capsys)
    assert "leaky" in text and "beside loads" not in text
    assert "random_forest *" in text, "the one that was asked for is marked"
    assert "Made Up, CPUExecutionProvider" in text
    assert Predictor.load(out).model.kind == "random_forest"


def test_predict(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = str(trained.models[0]), str(trained.file)
    rest = told(["predict", model, "--predictor", file], capsys)
    loaded = told(["predict", model, "--predictor", file, "--load", "0.6"], capsys)
    assert rest["model"] == model and rest["load"] == {} and loaded["load"] == {"others": 0.6}
    assert rest["rest_ms"] == loaded["rest_ms"] == pytest.approx(rest["mean_ms"])
    assert loaded["slowdown"] == pytest.approx(slowdown(0.6), rel=0.1)
    for found in (rest, loaded):
        low, high = found["interval"]
        assert low <= found["mean_ms"] <= high and found["p50_ms"] <= found["p95_ms"]
        assert sum(k["count"] * k["mean_ms"] for k in found["per_kernel"]) == pytest.approx(found["mean_ms"])
    text = shown(["predict", model, "--predictor", file], capsys)
    assert f"mean {rest['mean_ms']:.3f} ms" in text and "no load: 1.00x; 100 % of it from kernels" in text
    assert "measured" in text and "Conv_Relu" in text
    text = shown(["predict", model, "--predictor", file, "--load", "0.6"], capsys)
    assert f"beside others 60 %: {loaded['slowdown']:.2f}x" in text


def test_predict_beside_the_load_that_is_there_now(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", str(trained.models[0]), "--predictor", str(trained.file)]
    found = told([*command, "--live", "host", "--window", "0.2"], capsys)
    assert 0.0 <= found["load"]["others"] <= 1.0 and found["mean_ms"] >= found["rest_ms"]


def test_evaluate(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["evaluate", *map(str, trained.models), "--predictor", str(trained.file), "--rounds", "1"]
    found = told([*command, "--level", "0", "--level", "0.6", "--out", str(tmp_path / "out")], capsys)
    assert Path(found["report"]) == tmp_path / "out" / "report.html"
    page = Path(found["report"]).read_text()
    assert all(path.stem in page for path in trained.models)
    assert len(found["rows"]) == 2 * len(trained.models)
    assert [part["level"] for part in found["summary"]] == [0.0, 0.6]
    assert found["summary"][1]["slowdown"] == pytest.approx(slowdown(0.6), rel=0.02)
    text = shown([*command, "--level", "0", "--level", "0.6"], capsys)
    assert "load 0.00: MAPE" in text and "slowdown 1.43x (predicted" in text and "–" in text
    assert "report:" not in text
    assert told([*command], capsys)["report"] is None
    assert f"report: {tmp_path}" in shown([*command, "--out", str(tmp_path / "two")], capsys)


def test_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(save(convnet(), tmp_path))
    found = told(["overlap", model], capsys)
    assert found["model"] == model and found["mode"] in ("sum", "critical_path")
    assert found["nodes"] > 0 and found["nodes"] % 5 == 0
    assert 0.0 <= found["share"] < 1.0 and found["busy_ms"] > 0.0 and found["span_ms"] > 0.0
    text = shown(["overlap", model, "--parallel"], capsys)
    assert "nodes ran" in text and "beside another: " in text
    open_model = str(save(convnet(batch="N"), tmp_path, "open.onnx"))
    assert told(["overlap", open_model, "--shape", "x=2,3,12,12"], capsys)["nodes"] > 0
    assert told(["overlap", open_model], capsys, code=2)["error"]["type"] == "InputError"


def test_what_cannot_be_used_exits_with_2_and_says_why(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = str(trained.models[0]), str(trained.file)
    absent, trap, bad = (tmp_path / name for name in ("absent", "trap.json", "bad.onnx"))
    trap.write_bytes(pickle.dumps({"format": "sparseflow.latency.predictor"}))
    bad.write_bytes(b"no model")
    ask = ["predict", model, "--predictor", file]
    for arguments, kind, said in (
        (["train"], "UsageError", "collections"),
        (["train", str(absent)], "FileFormatError", "holds no collection"),
        (["train", str(absent), "--kind", "forest"], "InputError", "'forest'"),
        (["train", str(absent), "--mode", "fastest"], "InputError", "'fastest'"),
        (["predict", model, "--predictor", str(absent)], "InputError", "sparseflow latency train"),
        (["predict", model, "--predictor", str(trap)], "FileFormatError", "is not JSON"),
        (["predict", str(bad), "--predictor", file], "FileFormatError", "bad.onnx"),
        (["predict", str(absent), "--predictor", file], "InputError", "absent"),
        ([*ask, "--load", "1.5"], "UsageError", "--load"),
        ([*ask, "--load", "0.5", "--live", "host"], "InputError", "not both"),
        ([*ask, "--url", "http://127.0.0.1:9"], "InputError", "--live prometheus"),
        ([*ask, "--live", "prometheus"], "InputError", "url"),
        ([*ask, "--live", "dcgm"], "InputError", "'dcgm'"),
        ([*ask, "--shape", "x"], "InputError", "--shape x"),
        (["evaluate", str(absent), "--predictor", file], "InputError", "no file or folder"),
        (["evaluate", model, "--predictor", str(absent)], "InputError", "sparseflow latency train"),
        (["evaluate", model, "--predictor", file, "--level", "2"], "InputError", "levels"),
        (["evaluate", model, "--predictor", file, "--rounds", "0"], "UsageError", "--rounds"),
        (["overlap", str(bad)], "FileFormatError", "bad.onnx"),
    ):
        error = told(arguments, capsys, code=2)["error"]
        assert error["type"] == kind and said in error["message"], (arguments, error)


def test_a_failure_exits_with_1(
    trained: Trained, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ["predict", str(trained.models[0]), "--predictor", str(trained.file)]
    error = told([*ask, "--live", "prometheus", "--url", "http://127.0.0.1:1"], capsys, code=1)["error"]
    assert error["type"] == "DeviceError" and "cannot be reached" in error["message"]
    monkeypatch.undo()
    error = told(ask, capsys, code=2)["error"]
    assert error["type"] == "InputError" and "this machine is of another device" in error["message"]
