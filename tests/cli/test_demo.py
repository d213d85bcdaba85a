"""`sparseflow demo`: one object for a script, a table for a reader, bad usage is two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

import numpy as np

from sparseflow.cli.root import run
from sparseflow.errors import MissingExtraError
from sparseflow.spiking import demo, zoo
from sparseflow.spiking.catalog import Settings, build


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tiny network and a few images in place of the shipped ones; returns a folder for runs."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 16, 16), dtype=np.uint8)
    card = {"network": {"depth": 18}, "normalization": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        zoo, "load", lambda name: build("spiking_resnet18", Settings(width=8, image=16, steps=2))
    )
    monkeypatch.setattr(zoo, "images", lambda: (pixels, np.arange(6)))
    monkeypatch.setattr(zoo, "_card", lambda name: card)
    return tmp_path / "runs"


def test_a_script_gets_one_object_at_the_end(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--json", "--out", str(tiny), "--batch-size", "3", "--rounds", "4", "--no-compile"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert out.count("\n") == 1
    assert {
        "speedup", "speedup_interval", "predictions_identical", "accuracy_before", "accuracy_after", "layers",
        "report",
    } <= set(found)  # fmt: skip
    assert found["predictions_identical"] is True and found["images"] == 6 and found["batch"] == 3
    assert Path(found["report"]).read_text().lower().startswith("<!doctype html>")
    assert len(found["layers"]) == 20
    run_folder = Path(found["run"])
    assert run_folder.parent == tiny
    assert {"run.json", "samples.parquet", "report.html"} <= {p.name for p in run_folder.iterdir()}


def test_a_reader_gets_a_table(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["demo", "--out", str(tiny), "--batch-size", "3", "--rounds", "4", "--no-compile", "--no-cache"])
        == 0
    )
    out = capsys.readouterr().out.replace("\n", " ")
    for part in ("layer", "firing", "zero blocks", "backend", "conv1", "accuracy on 6 images", "end to end"):
        assert part in out
    assert "all predictions identical" in out and "report:" in out and "eager" in out
    assert not (tiny.parent / "cache").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch-size", "0"],
        ["--batch-size", "257"],
        ["--batch-size", "x"],
        ["--rounds", "3"],
        ["--nonsense"],
        ["surplus"],
    ],
)
def test_bad_usage_is_two(arguments: list[str], tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--out", str(tiny), *arguments]) == 2
    assert "sparseflow: " in capsys.readouterr().err and not tiny.exists()


def test_a_missing_extra_is_two(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(**_: Any) -> Any:
        raise MissingExtraError("spikingjelly", "spiking")

    monkeypatch.setattr(demo, "run_demo", absent)
    assert run(["demo", "--json", "--out", str(tiny)]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == "MissingExtraError" and "sparseflow[spiking]" in err
