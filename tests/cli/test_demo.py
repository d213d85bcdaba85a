"""`sparseflow demo`: text output, JSON output and errors."""

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
from sparseflow.spiking import demo
from sparseflow.spiking.models import pretrained
from sparseflow.spiking.models.model_zoo import NetworkConfig, build_network


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the shipped network and images by tiny ones; return a directory for runs."""
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 16, 16), dtype=np.uint8)
    card = {"network": {"depth": 18}, "normalization": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    monkeypatch.setenv("SPARSEFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        pretrained,
        "load_network",
        lambda name: build_network("spiking_resnet18", NetworkConfig(width=8, image_size=16, time_steps=2)),
    )
    monkeypatch.setattr(pretrained, "load_images", lambda: (pixels, np.arange(6)))
    monkeypatch.setattr(pretrained, "_read_card", lambda name: card)
    return tmp_path / "runs"


def test_demo_json_prints_one_object_and_writes_run(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--json", "--out", str(tiny), "--batch-size", "3", "--rounds", "4", "--no-compile"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    result = json.loads(out)
    assert out.count("\n") == 1
    assert {
        "speedup", "speedup_interval", "predictions_identical", "accuracy_before", "accuracy_after", "layers",
        "report",
    } <= set(result)  # fmt: skip
    assert result["predictions_identical"] is True and result["images"] == 6 and result["batch"] == 3
    assert Path(result["report"]).read_text().lower().startswith("<!doctype html>")
    assert len(result["layers"]) == 20
    run_folder = Path(result["run"])
    assert run_folder.parent == tiny
    assert {"run.json", "samples.parquet", "report.html"} <= {p.name for p in run_folder.iterdir()}


def test_demo_text_shows_layers_and_speedup(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_bad_usage_exits_with_2(arguments: list[str], tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--out", str(tiny), *arguments]) == 2
    assert "sparseflow: " in capsys.readouterr().err and not tiny.exists()


def test_missing_extra_exits_with_2(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(**_: Any) -> Any:
        raise MissingExtraError("spikingjelly", "spiking")

    monkeypatch.setattr(demo, "run_demo", absent)
    assert run(["demo", "--json", "--out", str(tiny)]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == "MissingExtraError" and "sparseflow[spiking]" in err
