"""`sparseflow adaptive train`, `eval` and `plot`, for readers and for scripts, by one process and by two."""

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

from sparseflow.adaptive.study.results import read
from sparseflow.cli.root import run
from tests.adaptive.grid_vqa.little import QUICK
from tests.adaptive.study import small

ROOT = Path(__file__).parents[2]
FEW = ["--samples", "40", "--validation", "16", "--test", "24", "--budgets", "6"]
STEPS = ["--set", "steps=3", "--set", "prompts=8", "--set", "validation=16", "--seeds", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model that was trained for some steps, and a profile of it."""
    found = tmp_path_factory.mktemp("studies")
    (found / "quick.yaml").write_text(json.dumps(QUICK))
    assert (
        run(["adaptive", "grid-vqa", "--config", str(found / "quick.yaml"), "--out", str(found / "run")]) == 0
    )
    small.profile_of(small.opened(found / "run" / "model")).write(found / "profile.parquet")
    return found


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_from_a_profile_to_a_page(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ["adaptive", "train", "run/model", "--profile", "profile.parquet", "--out", "study", *FEW, *STEPS]
    assert run(ask) == 0
    output = capsys.readouterr()
    for word in ("Controllers against lookup table:", "supervised on oracle", "page: study/report.html"):
        assert word in output.out
    assert "weights" not in output.err
    assert sorted(read("study")["command"].split()) == sorted(["sparseflow", *ask])
    # From here on pages of studies, which take longer than these, are not drawn again.
    monkeypatch.setattr("sparseflow.adaptive.study.run.write_page", lambda *_: None)
    assert run([*ask, "--json"]) == 0  # done already
    told: Any = json.loads(capsys.readouterr().out)
    assert told["controllers"] == "study/controllers.safetensors"
    assert told["policies"][0]["name"] == "controllers" and told["samples"]["test"] == 24
    assert run([*ask, "--set", "steps=4"]) == 2
    assert "is of another training, with other steps" in capsys.readouterr().err

    judge = [
        "adaptive",
        "eval",
        "run/model",
        "--profile",
        "profile.parquet",
        "--out",
        "judged",
        *FEW,
        "--json",
    ]
    assert run(judge) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["policies"][0]["name"] == "lookup table" and "controllers" not in alone
    assert run([*judge, "--controller", told["controllers"], "--attainment", "0.9"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["policies"][0]["name"] == "controllers" and again["attainment"] == 0.9

    assert run(["adaptive", "plot", "study", "--out", "pages/again.html"]) == 0
    assert capsys.readouterr().out == "page: pages/again.html\n"
    assert "Who wins" in Path("pages/again.html").read_text("utf-8")
    few = ["adaptive", "plot", "--profile", "profile.parquet", "--worth", alone["worth"], "--json"]
    assert run(few) == 0
    assert json.loads(capsys.readouterr().out) == {"page": "report.html"}
    assert "Plans that none beats" in Path("report.html").read_text("utf-8")


def test_what_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ([], ["study", "--worth", "w.json"], ["--profile", "profile.parquet"]):
        assert run(["adaptive", "plot", *wrong]) == 2
        assert "give the folder of a study, or both --profile and --worth" in capsys.readouterr().err
    ask = ["adaptive", "train", "run/model", "--profile", "profile.parquet", "--out", "refused"]
    for more, told in (
        (["--set", "steps"], "must be a name and a value"),
        (["--set", "stepz=1"], "not known: stepz"),
        (["--config", "absent.yaml"], "there is no file absent.yaml"),
        (["--attainment", "1.5"], "`attainment` (=1.5) must be a share"),
        (["--samples", "0"], "Invalid value for '--samples'"),
    ):
        assert run([*ask, *more]) == 2
        assert told in capsys.readouterr().err


def test_two_processes(folder: Path) -> None:
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            "-m", "sparseflow", "adaptive", "train", "run/model", "--profile", "profile.parquet",
            "--out", "two", *FEW, *STEPS, "--json",
        ],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # of the first process alone
    assert told["policies"][0]["name"] == "controllers" and Path("two/report.html").is_file()
