"""`sparseflow adaptive`, for readers and for scripts: from a training to an answer within a budget."""

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
    """Where the command trained a model for some steps; not to be written into."""
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
    """The model, in a copy of the folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return "run/model"


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_from_a_training_to_an_answer(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["adaptive", "grid-vqa", "--config", "quick.yaml", "--out", "run"]
    assert run(again) == 0  # done already
    assert "accuracy of the full plan" in capsys.readouterr().out
    assert run([*again, "--set", "train.steps=6"]) == 2
    assert "another training" in capsys.readouterr().err
    assert run(["adaptive", "importance", model, "--samples", "8", "--out", "importance.json", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["samples"] == 8 and "weights" not in output.err
    profile = ["adaptive", "profile", model, "--importance", "importance.json", "--out", "profile.parquet"]
    few = [
        "--plans",
        "8",
        "--tokens",
        "6",
        "--tokens",
        "12",
        "--repeats",
        "2",
        "--steps",
        "2",
        "--runner",
        "eager",
    ]
    assert run([*profile, *few, "--json"]) == 0
    found = told(capsys)
    # 8 plans, and 6 without image, at two lengths, twice.
    assert (found["requests"], found["failed"]) == (56, 0)
    # With more new tokens the highest tier does not fit into the context.
    ask = ["adaptive", "generate", model, "how many one are there", "--image", "canvas.png"]
    ask += ["--max-new-tokens", "16"]
    assert run([*ask, "--profile", found["predictor"], "--budget-ms", "1e9", "--json"]) == 0
    answer = told(capsys)
    assert answer["budget_met"] and answer["feasible"] and answer["plan"]["tier"] == "high"
    assert run([*ask, "--profile", found["predictor"], "--budget-ms", "0.01"]) == 0
    assert "budget missed" in capsys.readouterr().err
    reject = ["--budget-ms", "0.01", "--on-infeasible", "reject"]
    assert run([*ask, "--profile", found["predictor"], *reject]) == 1
    assert "no plan keeps the budget; it needs at least" in capsys.readouterr().err


def test_importance_of_another_model_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adaptive", "importance", model, "--samples", "4", "--out", "deep/importance.json"]) == 0
    again = ["adaptive", "grid-vqa", "--config", "quick.yaml", "--out", "other", "--set", "train.seed=1"]
    assert run(again) == 0
    capsys.readouterr()
    profile = ["adaptive", "profile", "other/model", "--out", "profile.parquet"]
    assert run([*profile, "--importance", "deep/importance.json"]) == 2
    assert "deep/importance.json is of another model (id" in capsys.readouterr().err
    assert run([*profile, "--importance", "absent.json"]) == 2
    assert "there is no file absent.json; measure with `sparseflow" in capsys.readouterr().err


def test_replicas_make_the_same_app_each(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = ["adaptive", "profile", model, "--out", "profile.parquet", "--plans", "6", "--steps", "2"]
    assert run([*profile, "--tokens", "6", "--repeats", "1", "--runner", "eager"]) == 0
    started: list[dict[str, Any]] = []

    def start(make: Any, **how: Any) -> None:
        # What travels to another process.
        started.append({"app": pickle.loads(pickle.dumps(make))(), **how})

    monkeypatch.setattr(serve, "serve_replicas", start)
    ask = ["adaptive", "serve", model, "--profile", "profile.parquet", "--plans", "2", "--batch", "2"]
    assert run([*ask, "--replicas", "3", "--port", "0", "--drain-s", "1"]) == 0
    (found,) = started
    assert (found["replicas"], found["port"], found["drain_s"], found["gpus_each"]) == (3, 0, 1.0, 0.0)
    service = found["app"].state.service
    assert service.model == "model"
    service.backend.close()
    assert run([*ask, "--replicas", "0"]) == 2


def test_an_answer_needs_no_profile_and_a_budget_does(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    ask = ["adaptive", "generate", model, "how many one are there", "--max-new-tokens", "3"]
    assert run([*ask, "--json"]) == 0
    assert told(capsys)["plan"]["tier"] is None
    assert run([*ask, "--budget-ms", "100"]) == 2
    assert "a budget needs a profile" in capsys.readouterr().err
    assert run([*ask, "--image", "absent.png"]) == 2
    assert "absent.png cannot be read" in capsys.readouterr().err
    assert run([*ask, "--profile", "absent.parquet"]) == 2
    assert "there is no profile absent.parquet" in capsys.readouterr().err


def test_prompts_that_cannot_be_used_are_bad_input(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    Path("damaged.png").write_bytes(Path("canvas.png").read_bytes()[:60])
    Path("notes.txt").write_text("no image")
    ask = ["adaptive", "generate", model]
    for given, said in (
        (["how many", "--image", "damaged.png"], "image damaged.png: the image is damaged"),
        (["how many", "--image", "notes.txt"], "image notes.txt: the image is none of PNG"),
        (["how " * 3000], "this model's context is"),
        (["<image> how many", "--image", "canvas.png"], "text must not hold '<image>'"),
    ):
        assert run([*ask, *given]) == 2
        assert said in capsys.readouterr().err


def test_a_model_of_text_takes_no_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny.olmoe().save_pretrained("text")
    Vocabulary(["how", "many"]).tokenizer.save_pretrained("text")
    ask = ["adaptive", "generate", "text", "how many", "--max-new-tokens", "2"]
    assert run([*ask, "--json"]) == 0
    assert told(capsys)["plan"]["tier"] is None
    assert run([*ask, "--image", "a.png"]) == 2
    assert "this model takes no images" in capsys.readouterr().err


def test_where_nobody_can_listen_is_said_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["adaptive", "serve", "no-model", "--profile", "absent.parquet"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run([*ask, "--port", str(taken.getsockname()[1])]) == 2
    assert "name another port, or 0" in capsys.readouterr().err
    for wrong in ("-1", "nan"):
        assert run([*ask, "--port", "0", "--drain-s", wrong]) == 2
        assert "`drain_s`" in capsys.readouterr().err
    assert run([*ask, "--port", "0"]) == 2
    assert "no-model holds no model" in capsys.readouterr().err


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adaptive", "generate", str(tmp_path), "hello"]) == 2
    assert "holds no model: there is no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert run(["adaptive", "generate", str(tmp_path), "hello"]) == 2
    assert "holds no model that can be read" in capsys.readouterr().err


def profiled(model: str, *more: str) -> list[str]:
    """A small profile by the model's own forward."""
    few = ["--plans", "6", "--text-plans", "2", "--steps", "2", "--repeats", "1", "--runner", "eager"]
    return ["adaptive", "profile", model, *few, *more]


def test_predictors_of_several_profiles_lie_side_by_side(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(profiled(model, "--tokens", "6", "--out", "profile.parquet", "--json")) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["predictor"] == "predictor.json"
    assert "without --importance plans skip blocks by a guess" in output.err
    first = Path("predictor.json").read_bytes()
    other = profiled(model, "--tokens", "7", "--out", "other.parquet")
    assert run([*other, "--json"]) == 0
    assert told(capsys)["predictor"] == "other.predictor.json"
    assert Path("predictor.json").read_bytes() == first
    # It is of the same profile.
    assert run([*other, "--repeats", "2"]) == 0
    record = json.loads(Path("other.predictor.json").read_text())
    elsewhere = record["about"]["device"] | {"name": "Abacus"}
    for changed, says in (
        ({"about": record["about"] | {"model_id": "foreign"}}, "is of another model: foreign, and yours is"),
        ({"about": record["about"] | {"device": elsewhere}}, "is of another device: "),
        ({"format": "another"}, "no predictor of this version"),
    ):
        Path("other.predictor.json").write_text(json.dumps(record | changed))
        capsys.readouterr()
        assert run([*other, "--repeats", "3"]) == 2
        error = capsys.readouterr().err
        assert says in error and "move it away, or change --out" in error
        assert json.loads(Path("other.predictor.json").read_text()) == record | changed


def test_tiers_that_do_not_fit_are_left_out(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = json.loads(Path(model, "config.json").read_text())["text_config"]["max_position_embeddings"]
    assert run(profiled(model, "--out", "whole.parquet", "--json")) == 0
    assert told(capsys)["tiers_left_out"] == []
    whole = PlanLatencyPredictor.load("whole.predictor.json").about
    assert whole.how["max_tokens"] == context
    # Without --tokens, prompts are as long as still leaves room for the highest tier.
    longest = max(visit.text_tokens for visit in PlanProfile.read("whole.parquet").visits)
    assert longest == min(64, context - whole.vision_tokens["high"] - 2)
    limit = whole.vision_tokens["medium"] + 12 + 2
    lower = profiled(model, "--tokens", "12", "--out", "profile.parquet")
    assert run([*lower, "--max-tokens", str(limit), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["tiers_left_out"] == ["high"]
    assert output.err.count("is left out") == 1
    assert f"tier high is left out: {whole.vision_tokens['high']} vision tokens" in output.err
    found = PlanProfile.read("profile.parquet")
    assert {visit.plan.tier for visit in found.visits} == {"low", "medium", None}
    # Plans that were not measured are predicted.
    assert PlanLatencyPredictor.load("predictor.json").space.geometry.tiers == ("low", "medium", "high")
    assert run([*lower, "--max-tokens", str(limit + 1)]) == 2
    assert "has another `how`" in capsys.readouterr().err
    for wrong, says in (
        (["--max-tokens", str(context + 1)], f"more than the model's context, {context} tokens"),
        (["--max-tokens", "13"], "12 tokens of text and 3 new ones are more than the 13"),
        (["--max-tokens", "14", "--text-plans", "0"], "no plan fits"),
    ):
        assert run([*lower, *wrong]) == 2
        assert says in capsys.readouterr().err
    # A server takes the requests that were measured.
    served: list[Any] = []
    monkeypatch.setattr(serve, "serve", lambda make, **how: served.append(make()))
    assert run(["adaptive", "serve", model, "--profile", "predictor.json", "--plans", "2"]) == 0
    service = served[0].state.service
    assert service.prompts.context == service.backend.context == limit
    service.backend.close()


def test_an_engine_is_profiled_under_load_and_tells_what_it_records(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, float]] = []
    monkeypatch.setattr(
        "sparseflow.cli.progress.progress_bar", lambda: nullcontext(lambda *it: shown.append(it))
    )

    def measure(runner: Any, space: Any, out: Path, *, progress: Any, **how: Any) -> Any:
        runner._progress(1, 3)
        progress("round 1", 0.25)
        runner._progress(2, 3)
        raise InputError(f"asked for {how['loads']} and {how['batches']}")

    monkeypatch.setattr("sparseflow.adaptive.profile.by_group", measure, raising=False)
    asked = ["adaptive", "profile", model, "--out", "profile.parquet", "--plans", "6"]
    assert run(asked) == 2
    assert "asked for [0.0, 0.7] and [1, 8]" in capsys.readouterr().err
    assert shown == [("recorded 1 of 3", 0.0), ("round 1", 0.25), ("recorded 2 of 3", 0.25)]
    assert run([*asked, "--load", "0.2", "--batch", "2"]) == 2
    assert "asked for [0.2] and [2]" in capsys.readouterr().err
    assert run([*asked, "--runner", "other"]) == 2
    assert "--runner 'other' must be engine or eager" in capsys.readouterr().err


def test_profile_tells_its_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adaptive", "profile", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for default in ("By default 16 and 64", "By default 0 and 0.7", "By default 1 and --max-batch"):
        assert default in text


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adaptive", "doctor", "--json"]) == 0
    found = told(capsys)
    assert [each["name"] for each in found["extras"]] == ["adaptive", "distributed"]
    cpu = found["devices"][0]
    assert cpu["kind"] == "cpu" and cpu["memory_bytes"] > 0 and cpu["name"]
    assert run(["adaptive", "doctor"]) == 0
    assert f"cpu: {cpu['name']}, " in capsys.readouterr().out
