"""`sparseflow demo`: text output, JSON output and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Replace the shipped network and images by tiny ones; return a directory for runs."""
    folder = tmp_path_factory.mktemp("demo")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 3, 16, 16), dtype=np.uint8)
    card = {"network": {"depth": 18}, "normalization": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    config = NetworkConfig(width=8, image_size=16, time_steps=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEFLOW_CACHE", str(folder / "cache"))
        patch.setattr(pretrained, "load_network", lambda name: build_network("spiking_resnet18", config))
        patch.setattr(pretrained, "load_images", lambda: (pixels, np.arange(6)))
        patch.setattr(pretrained, "load_card", lambda name: card)
        yield folder / "runs"


@pytest.fixture(scope="module")
def result(tiny: Path) -> demo.DemoResult:
    """Result of one demo of the tiny network."""
    return demo.run_demo(out_dir=tiny, batch_size=3, rounds=4, compile_baselines=False)


@pytest.fixture
def calls(result: demo.DemoResult, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the demo by its result; return the arguments of all calls."""
    arguments: list[dict[str, Any]] = []

    def run_demo(**options: Any) -> demo.DemoResult:
        arguments.append(options)
        return result

    monkeypatch.setattr(demo, "run_demo", run_demo)
    return arguments


def test_demo_json_prints_one_object_and_writes_run(
    tiny: Path, calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["demo", "--json", "--out", str(tiny), "--batch-size", "3", "--rounds", "4", "--no-compile"]
    assert run(arguments) == 0
    (options,) = calls
    options.pop("progress")
    assert options == {
        "out_dir": tiny, "batch_size": 3, "rounds": 4, "compile_baselines": False, "cache": True
    }  # fmt: skip
    out = capsys.readouterr().out
    result = json.loads(out)
    assert out.count("\n") == 1
    assert {
        "speedup", "speedup_interval", "predictions_identical", "accuracy_before", "accuracy_after", "layers",
        "report",
    } <= set(result)  # fmt: skip
    assert result["predictions_identical"] is True and result["images"] == 6 and result["batch"] == 3
    assert Path(result["report"]).read_text().lower().startswith("<!doctype html>")
    assert len(result["layers"]) == 21
    run_folder = Path(result["run"])
    assert run_folder.parent == tiny
    assert {"run.json", "samples.parquet", "report.html"} <= {p.name for p in run_folder.iterdir()}


def test_demo_text_shows_layers_and_speedup(
    tiny: Path, calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--out", str(tiny), "--no-cache"]) == 0
    assert calls[0]["cache"] is False and calls[0]["compile_baselines"] is True
    out = capsys.readouterr().out.replace("\n", " ")
    for part in ("layer", "firing", "zero blocks", "backend", "conv1", "accuracy on 6 images", "end to end"):
        assert part in out
    assert "all predictions identical" in out and "report:" in out and "eager" in out


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
@pytest.mark.usefixtures("tiny")
def test_bad_usage_exits_with_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--out", str(tmp_path / "runs"), *arguments]) == 2
    assert "sparseflow: " in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_missing_extra_exits_with_2(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(**_: Any) -> Any:
        raise MissingExtraError("spikingjelly", "spiking")

    monkeypatch.setattr(demo, "run_demo", absent)
    assert run(["demo", "--json", "--out", str(tiny)]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["type"] == "MissingExtraError" and "sparseflow[spiking]" in err
