"""`sparseflow tuning`, for readers and for scripts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")

from sparseflow.cli.root import run
from sparseflow.tuning import collect as collecting
from sparseflow.tuning.evaluate import Trial
from sparseflow.tuning.labels import LabelSet
from sparseflow.tuning.net.saved import load
from sparseflow.tuning.schedule import Schedule
from tests.tuning.net.labels import SMALL, on_disk

MATRIX = "%%MatrixMarket matrix coordinate pattern general\n300 500 3\n1 2\n2 1\n300 500\n"
LINE = (
    "2 i 2 i0 64 i1 4 j 2 j0 128 j1 4 1 A 4 i0 i1 j0 j1 A 4 i0 0 i1 0 j0 1 j1 0 0 4 i0 i1 j0 j1 "
    "i0 None None 0 8 1"
)


class Evaluator:
    """Makes measurements up."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def measure(self, schedule: Schedule) -> Trial:
        return Trial(schedule=schedule, latency_ms=1.0, ratio=1.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(collecting, "Evaluator", Evaluator)
    (tmp_path / "empty").mkdir()
    (tmp_path / "matrices").mkdir()
    (tmp_path / "matrices" / "net7.mtx").write_text(MATRIX)
    (tmp_path / "net100.mtx.gz").write_bytes(gzip.compress(MATRIX.replace("2 1\n", "2 2\n").encode()))
    (tmp_path / "broken.mtx").write_text(MATRIX[:-20])
    (tmp_path / "labels.tsv").write_text(
        f"matrix\tschedule\tlatency_ms\nnet7\t{LINE}\t0.5\nnet7\t{LINE}\t-\n"
    )
    (tmp_path / "families.json").write_text('{"net7": "seven"}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    """Labels of three matrices with the patterns of two, and the settings of a small network."""
    net = SMALL.to_dict()
    sampling = {"schedules": 6, "matrices": 2}
    settings = {"net": net, "steps": 4, "validate_every": 2, "sampling": sampling}
    (tmp_path / "small.json").write_text(json.dumps(settings))
    return on_disk(tmp_path / "labels")


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_collect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "tuning", "collect", "matrices", "net100.mtx.gz", "--synthetic", "2", "--operators",
        "spmm:4,spmv,spmm:4", "--schedules", "3", "--threads", "1", "--families", "families.json",
        "--out", "out",
    ]  # fmt: skip
    assert run(command) == 0
    shown = capsys.readouterr().out
    assert (
        "8 tasks, 3 rows or more of each" in shown and "24 rows (24 new" in shown and "labels: out" in shown
    )
    tasks = LabelSet.open("out").tasks
    assert {(task.matrix, task.family) for task in tasks} >= {("net7", "seven"), ("net100", "net")}
    assert {"uniform", "banded"} < {task.family for task in tasks}
    assert {task.n_cols for task in tasks} == {4, None}
    assert run([*command, "--json"]) == 0
    found = told(capsys)
    assert (found["tasks"], found["rows"], found["added"], found["folder"]) == (8, 24, 0, "out")
    assert run([*command, "--synthetic", "3", "--json"]) == 0
    assert told(capsys)["added"] == 6, "the first two are drawn again"


def test_import(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tuning", "import", "labels.tsv", "--operator", "spmv", "--matrices", "matrices"]
    assert run([*command, "--out", "out", "--families", "families.json"]) == 0
    shown = capsys.readouterr().out
    assert "1 rows of 1 tasks, of 1 the pattern is known" in shown
    assert "rejected: 1 rows, latency; line 3: latency: '-'" in shown and "labels: out" in shown
    (task,) = LabelSet.open("out").tasks
    assert (task.family, task.device, task.threads, task.shape) == ("seven", "labels", 8, (300, 500))
    assert run([*command, "--out", "other", "--json"]) == 0
    found = told(capsys)
    assert (found["rows"], found["tasks"], found["rejected"]["latency"]["rows"]) == (1, 1, 1)


def test_train_eval_and_plot(
    labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["--config", "small.json", "--steps", "2"]
    command = [
        "tuning", "train", "labels", "--out", "net", "--operators", "spmv", "--hold-out", "f1", *settings,
        "--loss", "margin", "--pattern", "strided", "--pooling", "last", "--joined", "cross",
    ]  # fmt: skip
    assert run([*command, "--json"]) == 0
    found = told(capsys)
    assert found["tasks"] == 2 and found["held_out"]["tasks"] == 1 and found["limits"] == {}
    config = load(found["net"]).config
    assert config.pattern is not None
    assert (config.joined, config.pattern.kind, config.pattern.pooling) == ("cross", "strided", "last")
    assert run(command) == 0
    assert "learnt from 24 labels of 2 tasks" in capsys.readouterr().out
    assert run([*command, "--pattern", "none"]) == 2
    assert "another training" in capsys.readouterr().err
    begun = ["tuning", "train", "labels", "--out", "begun", "--begin", found["net"], "--steps", "1"]
    assert run([*begun, "--rate", "1e-9", "--json"]) == 0
    assert load(told(capsys)["net"]).config == config

    command = ["tuning", "eval", "labels", "--out", "study", "--operators", "spmv", "--folds", "2", *settings]
    assert run([*command, "--json"]) == 0
    found = told(capsys)
    assert json.loads(Path("study/scores.json").read_text())["scores"] == found["scores"]
    assert {line["model"] for line in found["scores"]} == {
        "boosted_trees_spmv", "WACONet_spmv", "AutoSparseNet_WACONet_spmv", "AutoSparseNet_spmv",
        "AutoSparseNet_Pretrained_spmv", "AutoSparseNet_Full", "AutoSparseNet_Pretrained",
    }  # fmt: skip
    assert run(command) == 0
    assert "AutoSparseNet_Full" in capsys.readouterr().out
    Path(found["page"]).unlink()
    assert run(["tuning", "plot", "study", "--json"]) == 0
    assert told(capsys) == {"page": found["page"]}
    assert Path(found["page"]).is_file()
    for bad, said in ((["--models", "all"], "must be one of"), (["--config", "none.json"], "no file")):
        assert run([*command, *bad]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["collect"], "there is nothing to measure on"),
        (["collect", "empty"], "empty holds no .mtx or .mtx.gz file"),
        (["collect", "none.mtx"], "there is no file none.mtx"),
        (["collect", "matrices", "broken.mtx"], "broken.mtx is not a Matrix Market file"),
        (["collect", "matrices", "--operators", "spmm"], "'spmm' must be spmm:64, with its columns"),
        (["collect", "matrices", "--operators", "spmm:0"], "'spmm:0' must be spmm:64"),
        (["collect", "matrices", "--operators", "spmv:8"], "'spmv:8' must be spmv alone"),
        (["collect", "matrices", "--operators", ""], "no operator is called ''"),
        (["collect", "matrices", "--dtype", "half"], "must be float32 or float64"),
        (["collect", "matrices", "--budget", "0"], "above 0"),
        (["collect", "matrices", "--families", "labels.tsv"], "labels.tsv is not JSON"),
        (["import", "labels.tsv", "--operator", "spmm"], "holds no labels of spmm"),
        (["import", "broken.mtx", "--operator", "spmm"], "does not begin with a header"),
        (["import", "labels.tsv", "--operator", "spmv", "--matrix", "a"], "names its matrices"),
        (["import", "labels.tsv", "--operator", "spmv", "--matrices", "empty"], "such as net7.mtx"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tuning", *arguments, "--out", "out"]) == 2
    assert said in capsys.readouterr().err
    assert not (folder / "out" / "labels.parquet").exists()
