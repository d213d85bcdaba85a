"""`sparseflow adaptive`, for readers and for scripts: from a training to an answer within a budget."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")
pytest.importorskip("fastapi")
pytest.importorskip("PIL")

from sparseflow.adaptive import serve
from sparseflow.cli.root import run
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
    ask = ["adaptive", "generate", model, "how many one are there", "--image", "canvas.png"]
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


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adaptive", "generate", str(tmp_path), "hello"]) == 2
    assert "holds no model: there is no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert run(["adaptive", "generate", str(tmp_path), "hello"]) == 2
    assert "holds no model that can be read" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["adaptive", "doctor", "--json"]) == 0
    assert [each["name"] for each in told(capsys)["extras"]] == ["adaptive", "distributed"]
