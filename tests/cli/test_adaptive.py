"""`sparseflow adaptive`: text output, JSON output and errors, from a training to an answer."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("fastapi")
pytest.importorskip("PIL")

from sparseflow.adaptive import serve
from sparseflow.adaptive.grid_vqa.vocabulary import Vocabulary
from sparseflow.adaptive.predictor import PlanLatencyPredictor
from sparseflow.adaptive.profile import PlanProfile
from sparseflow.cli.root import run
from sparseflow.errors import InputError
from tests.adaptive import tiny
from tests.adaptive.grid_vqa.little import QUICK


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model that was trained for a few steps; read-only."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("trained")
    (folder / "quick.yaml").write_text(json.dumps(QUICK))  # JSON is YAML
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["adaptive", "grid-vqa", "--config", "quick.yaml", "--out", "run"]) == 0
    pixels = np.random.default_rng(0).integers(0, 256, (24, 24, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "canvas.png")
    return folder


@pytest.fixture
def model(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Path of the model in a copy of the directory, which becomes the working directory."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return "run/model"


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_train_profile_generate_within_budget(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    repeat = ["adaptive", "grid-vqa", "--config", "quick.yaml", "--out", "run"]
    assert run(repeat) == 0
    assert "accuracy of the full plan" in capsys.readouterr().out
    assert run([*repeat, "--set", "train.steps=6"]) == 2
    assert "train.steps" in capsys.readouterr().err
    assert (
        run(["adaptive", "importance", model, "--max-samples", "8", "--out", "importance.json", "--json"])
        == 0
    )
    output = capsys.readouterr()
    assert json.loads(output.out)["samples"] == 8 and "weights" not in output.err
    profile = ["adaptive", "profile", model, "--importance", "importance.json", "--out", "profile.parquet"]
    options = [
        "--num-plans",
        "8",
        "--text-tokens",
        "6",
        "--text-tokens",
        "12",
        "--rounds",
        "2",
        "--decode-steps",
        "2",
        "--runner",
        "eager",
    ]
    assert run([*profile, *options, "--json"]) == 0
    result = read_json(capsys)
    # 8 plans, and 6 without image, at two lengths, twice.
    assert (result["requests"], result["failed"]) == (56, 0)
    # With more new tokens the highest tier does not fit into the context.
    command = ["adaptive", "generate", model, "how many one are there", "--image", "canvas.png"]
    command += ["--max-new-tokens", "16"]
    assert run([*command, "--profile", result["predictor"], "--budget-ms", "1e9", "--json"]) == 0
    answer = read_json(capsys)
    assert answer["budget_met"] and answer["feasible"] and answer["plan"]["tier"] == "high"
    assert run([*command, "--profile", result["predictor"], "--budget-ms", "0.01"]) == 0
    assert "budget missed" in capsys.readouterr().err
    reject = ["--budget-ms", "0.01", "--on-infeasible", "reject"]
    assert run([*command, "--profile", result["predictor"], *reject]) == 1
    assert " ms" in capsys.readouterr().err


def test_profile_importance_of_another_model_exits_with_2(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["adaptive", "importance", model, "--max-samples", "4", "--out", "deep/importance.json"]) == 0
    repeat = ["adaptive", "grid-vqa", "--config", "quick.yaml", "--out", "other", "--set", "train.seed=1"]
    assert run(repeat) == 0
    capsys.readouterr()
    profile = ["adaptive", "profile", "other/model", "--out", "profile.parquet"]
    assert run([*profile, "--importance", "deep/importance.json"]) == 2
    assert "deep/importance.json" in capsys.readouterr().err
    assert run([*profile, "--importance", "absent.json"]) == 2
    assert "absent.json" in capsys.readouterr().err


def test_serve_replicas_receive_picklable_app_factory(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = [
        "adaptive",
        "profile",
        model,
        "--out",
        "profile.parquet",
        "--num-plans",
        "6",
        "--decode-steps",
        "2",
    ]
    assert run([*profile, "--text-tokens", "6", "--rounds", "1", "--runner", "eager"]) == 0
    started: list[dict[str, Any]] = []

    def start(make: Any, **options: Any) -> None:
        started.append({"app": pickle.loads(pickle.dumps(make))(), **options})

    monkeypatch.setattr(serve, "serve_replicas", start)
    command = [
        "adaptive",
        "serve",
        model,
        "--profile",
        "profile.parquet",
        "--max-plans",
        "2",
        "--max-batch-size",
        "2",
    ]
    assert run([*command, "--replicas", "3", "--port", "0", "--drain-s", "1"]) == 0
    (result,) = started
    assert (result["replicas"], result["port"], result["drain_s"], result["gpus_per_replica"]) == (
        3,
        0,
        1.0,
        0.0,
    )
    service = result["app"].state.service
    assert service.model == "model"
    service.backend.close()
    assert run([*command, "--replicas", "0"]) == 2


def test_generate_budget_needs_profile(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    command = ["adaptive", "generate", model, "how many one are there", "--max-new-tokens", "3"]
    assert run([*command, "--json"]) == 0
    assert read_json(capsys)["plan"]["tier"] is None
    assert run([*command, "--budget-ms", "100"]) == 2
    assert "profile" in capsys.readouterr().err
    assert run([*command, "--image", "absent.png"]) == 2
    assert "absent.png" in capsys.readouterr().err
    assert run([*command, "--profile", "absent.parquet"]) == 2
    assert "absent.parquet" in capsys.readouterr().err


def test_generate_invalid_prompt_exits_with_2(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    Path("damaged.png").write_bytes(Path("canvas.png").read_bytes()[:60])
    Path("notes.txt").write_text("no image")
    command = ["adaptive", "generate", model]
    for arguments, value in (
        (["how many", "--image", "damaged.png"], "damaged.png"),
        (["how many", "--image", "notes.txt"], "notes.txt"),
        (["how " * 3000], "context"),
        (["<image> how many", "--image", "canvas.png"], "'<image>'"),
    ):
        assert run([*command, *arguments]) == 2
        assert value in capsys.readouterr().err


def test_generate_text_model_refuses_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.build_olmoe().save_pretrained("text")
    Vocabulary(["how", "many"]).tokenizer.save_pretrained("text")
    command = ["adaptive", "generate", "text", "how many", "--max-new-tokens", "2"]
    assert run([*command, "--json"]) == 0
    assert read_json(capsys)["plan"]["tier"] is None
    assert run([*command, "--image", "a.png"]) == 2
    assert "images" in capsys.readouterr().err


def test_serve_checks_address_before_reading_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["adaptive", "serve", "no-model", "--profile", "absent.parquet"]
    with socket.create_server(("127.0.0.1", 0)) as bound_socket:
        assert run([*command, "--port", str(bound_socket.getsockname()[1])]) == 2
    assert "port" in capsys.readouterr().err
    for wrong in ("-1", "nan"):
        assert run([*command, "--port", "0", "--drain-s", wrong]) == 2
        assert "`drain_s`" in capsys.readouterr().err
    assert run([*command, "--port", "0"]) == 2
    assert "no-model" in capsys.readouterr().err


def test_generate_invalid_model_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adaptive", "generate", str(tmp_path), "hello"]) == 2
    assert "config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert run(["adaptive", "generate", str(tmp_path), "hello"]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def profile_command(model: str, *more: str) -> list[str]:
    """Command of a small profile with the model's forward."""
    options = [
        "--num-plans",
        "6",
        "--num-text-plans",
        "2",
        "--decode-steps",
        "2",
        "--rounds",
        "1",
        "--runner",
        "eager",
    ]
    return ["adaptive", "profile", model, *options, *more]


def test_profile_refuses_to_overwrite_foreign_predictor(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(profile_command(model, "--text-tokens", "6", "--out", "profile.parquet", "--json")) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["predictor"] == "predictor.json"
    assert "--importance" in output.err
    first = Path("predictor.json").read_bytes()
    other = profile_command(model, "--text-tokens", "7", "--out", "other.parquet")
    assert run([*other, "--json"]) == 0
    assert read_json(capsys)["predictor"] == "other.predictor.json"
    assert Path("predictor.json").read_bytes() == first
    assert run([*other, "--rounds", "2"]) == 0
    record = json.loads(Path("other.predictor.json").read_text())
    other_device = record["metadata"]["device"] | {"name": "Abacus"}
    for changed, value in (
        ({"metadata": record["metadata"] | {"model_id": "foreign"}}, "foreign"),
        ({"metadata": record["metadata"] | {"device": other_device}}, "Abacus"),
        ({"format": "another"}, "other.predictor.json"),
    ):
        Path("other.predictor.json").write_text(json.dumps(record | changed))
        capsys.readouterr()
        assert run([*other, "--rounds", "3"]) == 2
        error = capsys.readouterr().err
        assert value in error and "--out" in error
        assert json.loads(Path("other.predictor.json").read_text()) == record | changed


def test_profile_leaves_out_tiers_that_do_not_fit(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = json.loads(Path(model, "config.json").read_text())["text_config"]["max_position_embeddings"]
    assert run(profile_command(model, "--out", "full.parquet", "--json")) == 0
    assert read_json(capsys)["tiers_left_out"] == []
    full = PlanLatencyPredictor.load("full.predictor.json").metadata
    assert full.config["max_tokens"] == context
    # Without --text-tokens, prompts are as long as still leaves room for the highest tier.
    longest = max(measurement.text_tokens for measurement in PlanProfile.load("full.parquet").measurements)
    assert longest == min(64, context - full.vision_tokens["high"] - 2)
    limit = full.vision_tokens["medium"] + 12 + 2
    lower = profile_command(model, "--text-tokens", "12", "--out", "profile.parquet")
    assert run([*lower, "--max-tokens", str(limit), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["tiers_left_out"] == ["high"]
    warning = " ".join(output.err.split())
    assert warning.count("is left out") == 1 and f"{full.vision_tokens['high']} vision tokens" in warning
    result = PlanProfile.load("profile.parquet")
    assert {measurement.plan.tier for measurement in result.measurements} == {"low", "medium", None}
    # Plans that were not measured are predicted.
    assert PlanLatencyPredictor.load("predictor.json").space.geometry.tiers == ("low", "medium", "high")
    assert run([*lower, "--max-tokens", str(limit + 1)]) == 2
    assert "profile.parquet" in capsys.readouterr().err
    for arguments, value in (
        (["--max-tokens", str(context + 1)], f"{context} tokens"),
        (["--max-tokens", "13"], "--max-tokens 13"),
        (["--max-tokens", "14", "--num-text-plans", "0"], "--max-tokens 14"),
    ):
        assert run([*lower, *arguments]) == 2
        assert value in capsys.readouterr().err
    # A server takes the requests that were measured.
    served: list[Any] = []
    monkeypatch.setattr(serve, "run_server", lambda make, **options: served.append(make()))
    assert run(["adaptive", "serve", model, "--profile", "predictor.json", "--max-plans", "2"]) == 0
    service = served[0].state.service
    assert service.prompts.context == service.backend.context == limit
    service.backend.close()


def test_profile_engine_measures_under_load_and_reports_progress(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[tuple[str, float]] = []
    monkeypatch.setattr(
        "sparseflow.cli.adaptive.profiling.progress_bar",
        lambda: nullcontext(lambda *args: messages.append(args)),
    )

    def measure(runner: Any, space: Any, out: Path, *, progress: Any, **options: Any) -> Any:
        runner._progress("warmed up 1 of 3 steps", 1 / 3)
        progress("round 1", 0.25)
        runner._progress("warmed up 2 of 3 steps", 2 / 3)
        raise InputError(f"measuring {options['loads']} and {options['batch_sizes']}")

    monkeypatch.setattr("sparseflow.adaptive.profile.model_profile.collect_profile_by_group", measure)
    command = ["adaptive", "profile", model, "--out", "profile.parquet", "--num-plans", "6"]
    assert run(command) == 2
    assert "measuring [0.0, 0.7] and [1, 8]" in capsys.readouterr().err
    assert messages == [
        ("warmed up 1 of 3 steps", 0.0), ("round 1", 0.25), ("warmed up 2 of 3 steps", 0.25)
    ]  # fmt: skip
    assert run([*command, "--load", "0.2", "--batch-size", "2"]) == 2
    assert "measuring [0.2] and [2]" in capsys.readouterr().err
    assert run([*command, "--runner", "other"]) == 2
    assert "'other'" in capsys.readouterr().err


def test_profile_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adaptive", "profile", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for default in ("16 and 64", "0 and 0.7", "1 and --max-batch-size"):
        assert default in text
