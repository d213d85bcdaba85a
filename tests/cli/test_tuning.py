"""`sparseflow tuning`: text output, JSON output and errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")

import scipy.sparse as sp

from sparseflow.cli.root import run
from sparseflow.tuning.codegen.kernel import LibraryKernel
from sparseflow.tuning.measure import collection as collecting
from sparseflow.tuning.measure.evaluator import Trial
from sparseflow.tuning.measure.labels import LabelSet
from sparseflow.tuning.model.net.pretrained import load_network
from sparseflow.tuning.schedule.matrices import as_coo
from sparseflow.tuning.schedule.operators import OPERATORS
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.schedule.schedule import Schedule
from tests.tuning.synthetic_labels import SMALL, on_disk

pytestmark = pytest.mark.usefixtures("undrawn_figures")

MATRIX = "%%MatrixMarket matrix coordinate pattern general\n300 500 3\n1 2\n2 1\n300 500\n"
LINE = (
    "2 i 2 i0 64 i1 4 j 2 j0 128 j1 4 1 A 4 i0 i1 j0 j1 A 4 i0 0 i1 0 j0 1 j1 0 0 4 i0 i1 j0 j1 "
    "i0 None None 0 8 1"
)


class Evaluator:
    """Returns constant measurements."""

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
    monkeypatch.setattr(collecting, "ScheduleEvaluator", Evaluator)
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
    net = SMALL.model_dump()
    sampling = {"schedules": 6, "matrices": 2}
    settings = {"net": net, "steps": 4, "validate_every": 2, "sampling": sampling}
    (tmp_path / "small.json").write_text(json.dumps(settings))
    return on_disk(tmp_path / "labels")


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_collect_skips_unreadable_files_of_a_directory(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "matrices" / "a.mtx").write_text("<html>")
    (folder / "matrices" / "b.mtx").write_text("%%MatrixMarket matrix coordinate real general\n3 3 0\n")
    command = ["tuning", "collect", "matrices", "--workloads", "spmv", "--schedules", "1", "--out", "labels"]
    assert run([*command, "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["tasks"] == 1
    assert all(text in " ".join(output.err.split()) for text in ("skipped", "web page", "no elements"))


def test_collect_then_repeat_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "tuning", "collect", "matrices", "net100.mtx.gz", "--synthetic", "2", "--workloads",
        "spmm:4,spmv,spmm:4", "--schedules", "3", "--threads", "1", "--families", "families.json",
        "--out", "out",
    ]  # fmt: skip
    assert run(command) == 0
    output = capsys.readouterr().out
    assert "8 tasks" in output and "24 rows (24 new" in output and "labels: out" in output
    tasks = LabelSet.open("out").tasks
    assert {(task.matrix, task.family) for task in tasks} >= {("net7", "seven"), ("net100", "net")}
    assert {"uniform", "banded"} < {task.family for task in tasks}
    assert {task.n_cols for task in tasks} == {4, None}
    assert run([*command, "--json"]) == 0
    result = read_json(capsys)
    assert (result["tasks"], result["rows"], result["added"], result["out_dir"]) == (8, 24, 0, "out")
    assert run([*command, "--synthetic", "3", "--json"]) == 0
    assert read_json(capsys)["added"] == 6, "the first two are drawn again"


def test_import_counts_rows_and_rejected_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tuning", "import", "labels.tsv", "--operator", "spmv", "--matrices", "matrices"]
    assert run([*command, "--out", "out", "--families", "families.json"]) == 0
    output = capsys.readouterr().out
    assert "1 rows of 1 tasks, 1 with" in output and "labels: out" in output
    assert "rejected: 1 rows, latency; line 3: latency: '-'" in output
    (task,) = LabelSet.open("out").tasks
    assert (task.family, task.device, task.threads, task.shape) == ("seven", "labels", 8, (300, 500))
    assert run([*command, "--out", "other", "--json"]) == 0
    result = read_json(capsys)
    assert (result["rows"], result["tasks"], result["rejected"]["latency"]["rows"]) == (1, 1, 1)


def test_train_eval_and_plot(
    labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ["--config", "small.json", "--set", "steps=2"]
    command = [
        "tuning", "train", "labels", "--out", "net", "--operators", "spmv", "--hold-out", "f1", *settings,
        "--set", "loss=margin", "--set", "net.pattern.kind=strided", "--set", "net.pattern.pooling=last",
        "--set", "net.context_mode=cross",
    ]  # fmt: skip
    assert run([*command, "--json"]) == 0
    result = read_json(capsys)
    assert result["tasks"] == 2 and result["held_out"]["tasks"] == 1 and result["limits"] == {}
    config = load_network(result["net"]).config
    assert config.pattern is not None
    assert (config.context_mode, config.pattern.kind, config.pattern.pooling) == ("cross", "strided", "last")
    assert run(command) == 0
    assert "24 labels of 2 tasks" in capsys.readouterr().out
    assert run([*command, "--set", "net.pattern=null"]) == 2
    assert "net" in capsys.readouterr().err
    fine_tune = ["tuning", "train", "labels", "--out", "tuned", "--set", f"init={result['net']}"]
    assert run([*fine_tune, "--set", "steps=1", "--set", "learning_rate=1.0e-9", "--json"]) == 0
    assert load_network(read_json(capsys)["net"]).config == config

    command = ["tuning", "eval", "labels", "--out", "study", "--operators", "spmv", "--folds", "2", *settings]
    assert run([*command, "--json"]) == 0
    result = read_json(capsys)
    assert json.loads(Path("study/scores.json").read_text())["scores"] == result["scores"]
    assert {line["model"] for line in result["scores"]} == {
        "boosted_trees_spmv", "WACONet_spmv", "AutoSparseNet_WACONet_spmv", "AutoSparseNet_spmv",
        "AutoSparseNet_Pretrained_spmv", "AutoSparseNet_Full", "AutoSparseNet_Pretrained",
        "AutoSparseNet_Ensemble_spmv",
    }  # fmt: skip
    assert run(command) == 0
    assert "AutoSparseNet_Full" in capsys.readouterr().out
    trees_only = ["--folds", "2", "--out", "few", "--models", "boosted_trees_spmv", *settings]
    assert run(["tuning", "eval", "labels", "--json", *trees_only]) == 0
    assert {line["model"] for line in read_json(capsys)["scores"]} == {"boosted_trees_spmv"}
    assert run(["tuning", "eval", "labels", *trees_only, "--models", "trees"]) == 2
    assert "`models` (='trees') must be one of: boosted_trees_spmm" in capsys.readouterr().err
    page = Path(result["page"]).read_text()
    facts = [
        "sparseflow tuning eval labels --out study --operators spmv --folds 2 --config small.json",
        json.loads(Path("study/scores.json").read_text())["environment"]["platform"],
    ]
    assert all(fact in page for fact in facts)
    Path(result["page"]).unlink()
    assert run(["tuning", "plot", "study", "--json"]) == 0
    assert read_json(capsys) == {"page": result["page"]}
    assert all(fact in Path(result["page"]).read_text() for fact in facts)
    for bad, value in ((["--suite", "all"], "'all'"), (["--config", "none.json"], "none.json")):
        assert run([*command, *bad]) == 2
        assert value in capsys.readouterr().err


def test_screen_writes_the_list_that_train_excludes(
    labels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sp.save_npz("m0.npz", sp.eye_array(9))
    Path("m1.mtx").write_text("no matrix")
    command = ["tuning", "screen", "m0.npz", "m1.mtx", "--config", "small.json", "--out", "screening"]
    assert run([*command, "--json"]) == 0
    result = read_json(capsys)
    assert [(row["matrix"], row["fits"]) for row in result["rows"]] == [("m0", True), ("m1", False)]
    assert run(command) == 0
    out = capsys.readouterr().out
    assert "1 of 2 matrices fit" in out and "m1" in out
    train = ["tuning", "train", "labels", "--config", "small.json", "--set", "steps=1", "--operators", "spmv"]
    assert run([*train, "--exclude", result["excluded"], "--out", "net", "--json"]) == 0
    assert read_json(capsys)["tasks"] == 2
    assert run([*train, "--exclude", "none.txt", "--out", "net"]) == 2
    assert "none.txt" in capsys.readouterr().err


def test_export_writes_c_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    problem = SparseProblem(operator=OPERATORS["spmv"], matrix=as_coo(np.eye(5)))
    LibraryKernel(problem).save("kernel.sfk")
    command = ["tuning", "export", "kernel.sfk"]
    assert run([*command, "c"]) == 0
    output = capsys.readouterr().out
    assert "preset csr" in output and "files: c" in output
    assert run([*command, "json", "--prefix", "eye", "--json"]) == 0
    result = read_json(capsys)
    assert (result["folder"], result["preset"]) == ("json", "csr")
    assert sorted(result["files"]) == sorted(path.name for path in Path("json").iterdir())
    assert "int eye_spmv(" in Path("json/eye_kernel.h").read_text()
    for arguments, value in (
        ([*command, "c"], "c is not an empty directory"),
        ([*command, "d", "--prefix", "1d"], "'1d'"),
        (["tuning", "export", "none.sfk", "d"], "none.sfk"),
        (["tuning", "export", "c/README.md", "d"], "README.md"),
    ):
        assert run(arguments) == 2
        assert value in capsys.readouterr().err
    assert not Path("d").exists()


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["collect"], "--synthetic"),
        (["collect", "empty"], "empty"),
        (["collect", "none.mtx"], "none.mtx"),
        (["collect", "matrices", "broken.mtx"], "broken.mtx"),
        (["collect", "matrices", "--workloads", "spmm"], "'spmm'"),
        (["collect", "matrices", "--workloads", "spmm:0"], "'spmm:0'"),
        (["collect", "matrices", "--workloads", "spmv:8"], "'spmv:8'"),
        (["collect", "matrices", "--workloads", ""], "''"),
        (["collect", "matrices", "--dtype", "half"], "'half'"),
        (["collect", "matrices", "--budget-s", "0"], "`budget_s` (=0"),
        (["collect", "matrices", "--families", "labels.tsv"], "labels.tsv"),
        (["import", "labels.tsv", "--operator", "spmm"], "labels.tsv"),
        (["import", "broken.mtx", "--operator", "spmm"], "broken.mtx"),
        (["import", "labels.tsv", "--operator", "spmv", "--matrix", "a"], "labels.tsv"),
        (["import", "labels.tsv", "--operator", "spmv", "--matrices", "empty"], "net7.mtx"),
    ],
)
def test_invalid_arguments_exit_with_2_and_show_the_value(
    arguments: list[str], value: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tuning", *arguments, "--out", "out"]) == 2
    assert value in capsys.readouterr().err
    assert not (folder / "out" / "labels.parquet").exists()
