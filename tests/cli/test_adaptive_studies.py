"""`sparseflow adaptive` train, eval and plot, with one process and with two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("sklearn")

from sparseflow.adaptive.study.results import load_results
from sparseflow.cli.root import run
from tests.adaptive.grid_vqa.little import QUICK
from tests.adaptive.study import small

ROOT = Path(__file__).parents[2]
SAMPLE_OPTIONS = [
    "--max-train-samples", "40", "--max-validation-samples", "16", "--max-test-samples", "24",
    "--num-budgets", "6",
]  # fmt: skip
TRAIN_OPTIONS = ["--set", "steps=3", "--set", "prompts=8", "--set", "validation=16", "--seeds", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a model that was trained for a few steps, and its profile."""
    directory = tmp_path_factory.mktemp("studies")
    (directory / "quick.yaml").write_text(json.dumps(QUICK))
    assert (
        run(
            [
                "adaptive",
                "grid-vqa",
                "--config",
                str(directory / "quick.yaml"),
                "--out",
                str(directory / "run"),
            ]
        )
        == 0
    )
    small.profile_of(small.opened(directory / "run" / "model")).save(directory / "profile.parquet")
    return directory


@pytest.fixture(autouse=True)
def _enter_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@pytest.mark.usefixtures("undrawn_figures")
def test_train_eval_plot_write_results_and_pages(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "adaptive",
        "train",
        "run/model",
        "--profile",
        "profile.parquet",
        "--out",
        "study",
        *SAMPLE_OPTIONS,
        *TRAIN_OPTIONS,
    ]
    assert run(command) == 0
    output = capsys.readouterr()
    for word in ("lookup table", "supervised on oracle", "page: study/report.html"):
        assert word in output.out
    assert "weights" not in output.err
    assert sorted(load_results("study")["command"].split()) == sorted(["sparseflow", *command])
    # Pages are slow to write and are not needed below.
    monkeypatch.setattr("sparseflow.adaptive.study.run.write_page", lambda *_: None)
    assert run([*command, "--json"]) == 0
    result: Any = json.loads(capsys.readouterr().out)
    assert result["controllers"] == "study/controllers.safetensors"
    assert result["policies"][0]["name"] == "controllers" and result["samples"]["test"] == 24
    assert run([*command, "--set", "steps=4"]) == 2
    assert "steps" in capsys.readouterr().err

    eval_command = [
        "adaptive",
        "eval",
        "run/model",
        "--profile",
        "profile.parquet",
        "--out",
        "evaluation",
        *SAMPLE_OPTIONS,
        "--json",
    ]
    assert run(eval_command) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["policies"][0]["name"] == "lookup table" and "controllers" not in scores
    assert run([*eval_command, "--controller", result["controllers"], "--attainment", "0.9"]) == 0
    controller_scores = json.loads(capsys.readouterr().out)
    assert (
        controller_scores["policies"][0]["name"] == "controllers" and controller_scores["attainment"] == 0.9
    )

    assert run(["adaptive", "plot", "study", "--out", "pages/again.html"]) == 0
    assert capsys.readouterr().out == "page: pages/again.html\n"
    assert "lookup table" in Path("pages/again.html").read_text("utf-8")
    plot_command = [
        "adaptive",
        "plot",
        "--profile",
        "profile.parquet",
        "--plan-quality",
        scores["plan_quality"],
        "--json",
    ]
    assert run(plot_command) == 0
    assert json.loads(capsys.readouterr().out) == {"page": "report.html"}
    assert "<svg" in Path("report.html").read_text("utf-8")


def test_invalid_arguments_exit_with_2_and_show_the_value(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([], ["study", "--plan-quality", "w.json"], ["--profile", "profile.parquet"]):
        assert run(["adaptive", "plot", *arguments]) == 2
        assert "--plan-quality" in capsys.readouterr().err
    command = ["adaptive", "train", "run/model", "--profile", "profile.parquet", "--out", "refused"]
    for arguments, value in (
        (["--set", "steps"], "--set steps"),
        (["--set", "stepz=1"], "stepz"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["--attainment", "1.5"], "`attainment` (=1.5)"),
        (["--max-train-samples", "0"], "--max-train-samples"),
    ):
        assert run([*command, *arguments]) == 2
        assert value in capsys.readouterr().err


@pytest.mark.slow
def test_train_with_two_processes(folder: Path) -> None:
    process = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            "-m", "sparseflow", "adaptive", "train", "run/model", "--profile", "profile.parquet",
            "--out", "two", *SAMPLE_OPTIONS, *TRAIN_OPTIONS, "--json",
        ],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert result["policies"][0]["name"] == "controllers" and Path("two/report.html").is_file()
