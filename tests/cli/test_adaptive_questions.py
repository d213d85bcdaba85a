"""`sparseflow adaptive` importance, eval and train with --questions, of a text model and of a LLaVA."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from sparseflow.adaptive.controllers.controllers import Controllers
from sparseflow.adaptive.profile.importance import BlockImportance
from sparseflow.adaptive.profile.plan_quality import PlanQuality
from sparseflow.cli.root import run
from tests.adaptive.questions import folders

pytestmark = pytest.mark.usefixtures("undrawn_figures")

ROOT = Path(__file__).parents[2]
QUESTION_OPTIONS = ["--questions", "questions.jsonl"]
TRAIN_OPTIONS = [
    "--set", "steps=3", "--set", "prompts=8", "--set", "minibatches=2", "--set", "validation=16",
    "--seeds", "1", "--num-budgets", "6",
]  # fmt: skip


@pytest.fixture(scope="module", params=["olmoe", "llava_siglip"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a model and questions."""
    directory = tmp_path_factory.mktemp(request.param)
    opened = folders.opened(folders.model_folder(directory / "model", request.param))
    lines = folders.lines(opened, directory, 27, images=opened.image_processor is not None)
    for index, line in enumerate(lines):
        line["split"] = ("train", "val", "test")[index % 3]
    folders.write(directory / "questions.jsonl", lines)
    return directory


@pytest.fixture(autouse=True)
def _enter_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_importance_eval_train_generate_with_questions(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = folders.opened(folder / "model")
    importance_command = [
        "adaptive",
        "importance",
        "model",
        *QUESTION_OPTIONS,
        "--max-samples",
        "12",
        "--beam",
        "1",
        "--out",
        "importance.json",
    ]
    capsys.readouterr()
    assert run([*importance_command, "--json"]) == 0
    assert read_json(capsys)["samples"] == 12
    importance = BlockImportance.load("importance.json")
    assert 0.0 < importance.full_score < 1.0 and any(drop.drop > 0.0 for drop in importance.single_drops)
    # Other questions have another journal.
    assert run([*importance_command, "--max-samples", "10"]) == 0
    assert len(list(folder.glob("importance-*.jsonl"))) == 2

    folders.profile_of(opened, importance.make_space()).save(folder / "profile.parquet")
    study = ["model", "--profile", "profile.parquet", *QUESTION_OPTIONS]
    capsys.readouterr()
    assert run(["adaptive", "eval", *study, "--out", "study", "--num-budgets", "6", "--json"]) == 0
    scores = read_json(capsys)
    assert scores["samples"] == {"train": 9, "validation": 9, "test": 9}
    plan_quality = PlanQuality.load(scores["plan_quality"])
    assert (
        plan_quality.task == "questions of questions.jsonl"
        and plan_quality.samples == 18
        and max(plan_quality.accuracy) > 0.0
    )
    page = Path(scores["page"]).read_text("utf-8")
    assert "questions of questions.jsonl" in page
    assert "Grid-VQA" not in page

    monkeypatch.setattr("sparseflow.adaptive.study.run.write_page", lambda *_: None)
    # Answers of the evaluation are reused.
    monkeypatch.setattr("sparseflow.adaptive.questions.file_task.QuestionTask.evaluate_plans", None)
    assert run(["adaptive", "train", *study, "--out", "study", *TRAIN_OPTIONS, "--json"]) == 0
    trained = read_json(capsys)
    assert trained["policies"][0]["name"] == "controllers"
    assert Controllers.load(trained["controllers"]).space == importance.make_space()
    image = ["--image", "0.png"] if opened.image_processor is not None else []
    budget = ["--profile", "profile.parquet", "--controller", trained["controllers"], "--budget-ms", "1e5"]
    assert (
        run(["adaptive", "generate", "model", "w7 w8", *image, *budget, "--max-new-tokens", "2", "--json"])
        == 0
    )
    assert read_json(capsys)["feasible"]


@pytest.mark.parametrize("folder", ["olmoe"], indirect=True)
def test_eval_killed_study_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders.profile_of(folders.opened(folder / "model")).save(folder / "all.parquet")
    command = [
        "adaptive",
        "eval",
        "model",
        "--profile",
        "all.parquet",
        *QUESTION_OPTIONS,
        "--out",
        "killed",
        "--num-budgets",
        "6",
        "--json",
    ]
    code = (
        "import sys; from sparseflow.adaptive.questions.file_task import QuestionTask; "
        "QuestionTask.chunk_size = 3; "
        "from sparseflow.cli.root import run; sys.exit(run(sys.argv[1:]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    first = folder / "killed" / "outcomes" / "train-000000.safetensors"
    while not first.is_file():
        assert process.poll() is None, "the process ended before it was killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    modified_before = {path: path.stat().st_mtime_ns for path in first.parent.glob("*.safetensors")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sparseflow.adaptive.questions.file_task.QuestionTask.chunk_size", 3)
        assert run(command) == 0
    assert read_json(capsys)["samples"]["train"] == 9
    assert all(path.stat().st_mtime_ns == modified_ns for path, modified_ns in modified_before.items())


def test_invalid_questions_exit_with_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders.profile_of(folders.opened(folder / "model")).save(folder / "all.parquet")
    for command in (
        ["importance", "model", "--out", "refused.json"],
        ["eval", "model", "--profile", "all.parquet", "--out", "refused"],
        ["train", "model", "--profile", "all.parquet", "--out", "refused"],
    ):
        assert run(["adaptive", *command]) == 2
        error = capsys.readouterr().err
        assert "--questions" in error
        for name, line, value in (
            ("absent.jsonl", None, "absent.jsonl"),
            ("broken.jsonl", "{", "line 1"),
            (
                "typo.jsonl",
                '{"prompt": "w7", "anser": "w8"}',
                "answer",
            ),
            ("few.jsonl", '{"prompt": "w7", "answer": "w8"}', "few.jsonl"),
        ):
            if line is not None:
                (folder / name).write_text(line + "\n")
            assert run(["adaptive", *command, "--questions", name]) == 2
            assert value in " ".join(capsys.readouterr().err.split())
        assert run(["adaptive", *command, *QUESTION_OPTIONS, "--archive", "images.tar"]) == 2
        assert "Grid-VQA" in capsys.readouterr().err
