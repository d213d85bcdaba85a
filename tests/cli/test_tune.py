"""`sparseflow tune`, for readers and for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy")

from sparseflow import tuning
from sparseflow.cli.root import run

MATRIX = "%%MatrixMarket matrix coordinate real general\n4 3 4\n1 2 5\n2 1 1\n2 3 2\n4 3 -1\n"


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.mtx"
    path.write_text(MATRIX)
    return str(path)


def test_a_kernel_is_found_shown_and_saved(
    matrix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "kernel.sfk", tmp_path / "trials"
    command = ["tune", "spmm", matrix, "--n-cols", "8", "--trials", "2", "--threads", "1"]
    assert run([*command, "--out", str(out), "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "tuned" in shown and "tiled_csr" in shown and "library" in shown and str(out) in shown
    kernel = tuning.load(out)
    dense = np.arange(24, dtype=np.float32).reshape(3, 8)
    a = np.array([[0, 5, 0], [1, 0, 2], [0, 0, 0], [0, 0, -1]], np.float32)
    assert np.allclose(kernel(dense), a @ dense)
    assert run([*command, "--folder", str(folder), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["trials"]) == 5 and told["speedup"] >= 1.0
    assert set(told["baselines"]) == {"csr", "tiled_csr", "bcsr4x1", "library"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["spmm"], "needs `n_cols`"),
        (["spmv", "--n-cols", "3"], "takes a vector"),
        (["matmul"], "matmul"),
        (["spmv", "--method", "guess"], "choose one of: random"),
        (["spmv", "--dtype", "float16"], "must be float32 or float64"),
        (["spmv", "--budget", "0"], "must be above 0"),
        (["spmv", "--out", "/nowhere/k.sfk"], "no folder /nowhere"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: list[str], said: str, matrix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", arguments[0], matrix, *arguments[1:]]) == 2
    assert said in capsys.readouterr().err
