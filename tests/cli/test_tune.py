"""`sparseflow tune`: text output, JSON output and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("scipy")

from sparseflow import tuning
from sparseflow.cli.root import run
from sparseflow.tuning.schedule.matrix_files import read_matrix
from sparseflow.tuning.schedule.operators import get_operator
from sparseflow.tuning.schedule.presets import build_presets
from sparseflow.tuning.schedule.problem import SparseProblem
from sparseflow.tuning.search import rerank
from sparseflow.tuning.search.winners import WinnerCache

MATRIX = "%%MatrixMarket matrix coordinate real general\n4 3 4\n1 2 5\n2 1 1\n2 3 2\n4 3 -1\n"


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(rerank, "_TURN_S", 0.0)
    monkeypatch.setattr(rerank, "_NUM_TURNS", 1)
    monkeypatch.setattr(rerank, "_NUM_PROCESSES", 1)
    path = tmp_path / "a.mtx"
    path.write_text(MATRIX)
    return str(path)


def test_tune_writes_kernel_and_resumes_trials(
    matrix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    command = ["tune", "spmm", matrix, "--n-cols", "8", "--trials", "2", "--threads", "1", "--out", str(out)]
    command += ["--budget-s", "inf"]  # a short call would end the search
    assert run(command) == 0
    output = capsys.readouterr().out
    kernel_file = out / "kernel.sfk"
    assert all(word in output for word in ("tuned", "tiled_csr", "library", str(kernel_file)))
    kernel = tuning.load(kernel_file)
    dense = np.arange(24, dtype=np.float32).reshape(3, 8)
    a = np.array([[0, 5, 0], [1, 0, 2], [0, 0, 0], [0, 0, -1]], np.float32)
    assert np.allclose(kernel(dense), a @ dense)
    assert run([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["trials"]) == 5 and result["speedup"] >= 1.0 and result["kernel"] == str(kernel_file)
    assert set(result["baselines"]) == {"csr", "tiled_csr", "bcsr4x1", "library"}


def test_tune_without_budget_measures_nothing(matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "spmv", matrix, "--budget-s", "0"]) == 0
    output = capsys.readouterr().out
    assert "not measured" in output and "schedule: " in output and "speedup" not in output


def test_tune_again_starts_from_winner(matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", "spmm", matrix, "--n-cols", "8", "--threads", "1", "--trials", "1"]
    command += ["--budget-s", "inf"]
    problem = SparseProblem(
        operator=get_operator("spmm"), matrix=read_matrix(matrix, dtype=np.float32), n_cols=8
    )
    WinnerCache().add(problem, 1, build_presets(problem.operator, problem.extents, 1)["csr"])
    for arguments, expected in (([], 1), (["--no-warm-start"], 0)):
        assert run([*command, *arguments]) == 0
        assert capsys.readouterr().out.count("started from the schedule of a similar matrix") == expected


def test_tuning_tune_is_the_same_command(matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tuning", "tune", "spmv", matrix, "--trials", "0", "--threads", "1", "--json"]
    assert run(command) == 0
    assert json.loads(capsys.readouterr().out)["kernel"] is None


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["spmm"], "`n_cols`"),
        (["spmv", "--n-cols", "3"], "3"),
        (["matmul"], "matmul"),
        (["spmv", "--method", "guess"], "guess"),
        (["spmv", "--dtype", "int8"], "'int8'"),
        (["spmv", "--budget-s", "-1"], "--budget-s"),
    ],
)
def test_invalid_arguments_exit_with_2_and_show_the_value(
    arguments: list[str], value: str, matrix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", arguments[0], matrix, *arguments[1:]]) == 2
    assert value in capsys.readouterr().err


@pytest.mark.parametrize("out", ["/proc/run", "a.mtx"])
def test_unwritable_output_exits_with_1_before_the_search(
    out: str, matrix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(Path(matrix).parent / out)
    assert run(["tune", "spmv", matrix, "--out", out]) == 1
    assert out in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!DOCTYPE html>\n<html><body>404 Not found</body></html>\n", "a.mtx is not a readable matrix"),
        (MATRIX.replace("matrix", "vector", 1), "a.mtx"),
        (MATRIX[:-2] + "E", "a.mtx"),
        (MATRIX.replace("-1", "1e-60"), "--dtype float64"),
        (MATRIX.replace("real", "integer").replace("-1", "16777217"), "--dtype float64"),
    ],
)
def test_unreadable_matrix_exits_with_2(
    text: str, words: str, matrix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(matrix).write_text(text)
    assert run(["tune", "spmv", matrix]) == 2
    assert words in capsys.readouterr().err


def test_half_precision_needs_a_gpu(matrix: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "spmm", matrix, "--n-cols", "8", "--dtype", "float16"]) == 2
    assert "for GPUs" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert run(["tune", "spmm", matrix, "--n-cols", "8", "--device", "cuda"]) != 0
        assert "CUDA" in capsys.readouterr().err
