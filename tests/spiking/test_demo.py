"""Tests of the demo: measured results, the run on disk and the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from torch import nn

pytest.importorskip("spikingjelly")
pytest.importorskip("numba")

from sparseflow.core.run import Run
from sparseflow.core.timing import bootstrap_median
from sparseflow.spiking.demo import DemoResult, run_demo
from sparseflow.spiking.models import pretrained
from sparseflow.spiking.models.model_zoo import NetworkConfig, build_network
from sparseflow.spiking.profile import bench
from tests.spiking.nets import from_rest

IMAGES, BATCH, ROUNDS = 14, 4, 4
FORMS = {"eager", "channels_last", "folded", "folded, channels_last", "optimised"}


def tiny() -> nn.Module:
    return build_network("sew_resnet18", NetworkConfig(width=8, image_size=16, time_steps=2))


def small_images() -> tuple[np.ndarray, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (IMAGES, 3, 16, 16), dtype=np.uint8)
    return pixels, np.arange(IMAGES, dtype=np.int64) % 10


@pytest.fixture(scope="module")
def reports() -> list[tuple[str, float]]:
    return []


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, reports: list[tuple[str, float]]) -> DemoResult:
    """Run the demo of a tiny network once."""
    card = {
        "network": {"residual": "SEW", "depth": 18},
        "normalization": {"mean": [0.5] * 3, "std": [0.5] * 3},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEFLOW_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(pretrained, "load_network", lambda name: tiny())
        patch.setattr(pretrained, "load_images", small_images)
        patch.setattr(pretrained, "load_card", lambda name: card)
        return run_demo(
            out_dir=tmp_path_factory.mktemp("runs"),
            batch_size=BATCH,
            rounds=ROUNDS,
            compile_baselines=False,
            progress=lambda message, fraction: reports.append((message, fraction)),
        )


def test_demo_counts_every_image(result: DemoResult) -> None:
    """The last, partial batch counts too."""
    pixels, labels = small_images()
    x = (torch.from_numpy(pixels).float() / 255 - 0.5) / 0.5
    net = tiny()
    classes = torch.cat([from_rest(net, part).argmax(-1) for part in x.split(BATCH)])
    accuracy = (classes == torch.from_numpy(labels)).float().mean().item()
    assert (
        result.num_images == IMAGES
        and result.batch_size == BATCH
        and result.num_threads == torch.get_num_threads()
    )
    assert result.accuracy_before == pytest.approx(accuracy) == result.accuracy_after
    assert result.predictions_identical


def test_demo_baseline_is_the_fastest_dense_setting(result: DemoResult) -> None:
    assert set(result.latency_ms) == FORMS and all(ms > 0 for ms in result.latency_ms.values())
    dense = {name: ms for name, ms in result.latency_ms.items() if name != "optimised"}
    assert result.baseline == min(dense, key=dense.__getitem__)
    assert result.speedup.low <= result.speedup.median <= result.speedup.high


def test_demo_samples_match_the_result(result: DemoResult) -> None:
    rows = pyarrow.parquet.read_table(result.run_dir / "samples.parquet").to_pylist()
    assert len(rows) == ROUNDS * len(FORMS) and {row["batch"] for row in rows} == {BATCH}
    times = {(row["candidate"], row["round"]): row["latency_ms"] for row in rows}
    for name, ms in result.latency_ms.items():
        assert ms == pytest.approx(float(np.median([times[name, r] for r in range(ROUNDS)])))
    ratios = [times[result.baseline, r] / times["optimised", r] for r in range(ROUNDS)]
    assert result.speedup == bootstrap_median(ratios, seed=0)


def test_run_directory_matches_result(result: DemoResult) -> None:
    run = Run.open(result.run_dir)
    assert run.info["status"] == "finished" and run.info["command"] == "sparseflow demo"
    assert run.info["config"] == {
        "network": pretrained.DEFAULT_NETWORK, "batch": BATCH, "rounds": ROUNDS, "compiled": False
    }  # fmt: skip
    plain = result.to_dict()
    assert run.info["results"] == json.loads(
        json.dumps({key: value for key, value in plain.items() if key not in ("run", "report")})
    )
    assert {
        "speedup", "speedup_interval", "predictions_identical", "accuracy_before", "accuracy_after", "layers",
        "report",
    } <= set(plain)  # fmt: skip
    assert plain["speedup"] == result.speedup.median and len(plain["speedup_interval"]) == 2
    assert Path(plain["report"]) == result.report == result.run_dir / "report.html"


def test_demo_explains_every_layer(result: DemoResult) -> None:
    layers = [name for name, m in tiny().named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert [layer.name for layer in result.explanation.layers] == layers
    assert all(layer.reason for layer in result.explanation.layers)


def test_demo_report_shows_the_result(result: DemoResult) -> None:
    page = result.report.read_text()
    for part in (
        f"{result.speedup.median:.2f}×",
        f"{result.speedup.low:.2f}–{result.speedup.high:.2f}",
        f"{100 * result.accuracy_after:.2f} %",
        f"{result.latency_ms[result.baseline]:.1f} → {result.latency_ms['optimised']:.1f} ms",
        "SEW ResNet-18",
        "sparseflow demo",
        *(layer.name for layer in result.explanation.layers),
        *FORMS,
    ):
        assert part in page, part


def test_progress_runs_to_the_end(result: DemoResult, reports: list[tuple[str, float]]) -> None:
    fractions = [fraction for _, fraction in reports]
    assert fractions == sorted(fractions) and fractions[0] == 0.0 and fractions[-1] == 1.0
    words = " ".join(message for message, _ in reports)
    for part in ("accuracy", "preparing dense: folded", "measuring conv1", "whole network", "report"):
        assert part in words


@pytest.fixture
def tiny_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"network": {"depth": 18}, "normalization": {"mean": [0.5] * 3, "std": [0.5] * 3}}
    monkeypatch.setattr(pretrained, "load_network", lambda name: tiny())
    monkeypatch.setattr(pretrained, "load_images", small_images)
    monkeypatch.setattr(pretrained, "load_card", lambda name: card)


def test_different_predictions_are_reported(
    tiny_zoo: None, tmp_path: Path, prefer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer("sparse", "dense", optimised=1.0)
    original = bench.optimize

    def spoiled(model: Any, *args: Any, **kwargs: Any) -> nn.Module:
        original(model, *args, **kwargs)
        with torch.no_grad():
            model.fc.weight.neg_()
        return model

    monkeypatch.setattr(bench, "optimize", spoiled)
    result = run_demo(out_dir=tmp_path, batch_size=8, rounds=4, compile_baselines=False, cache=False)
    assert not result.predictions_identical
    assert "predictions differ" in result.report.read_text()


def test_demo_failing_baseline_is_skipped_with_warning(
    tiny_zoo: None, tmp_path: Path, prefer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer("sparse", "dense", optimised=1.0)

    def no_compiler(*args: Any, **kwargs: Any) -> Any:
        def fail(*inner: Any) -> Any:
            raise RuntimeError("no C++ compiler\nlong story")

        return _Failing(fail)

    class _Failing(nn.Module):
        def __init__(self, fail: Any) -> None:
            super().__init__()
            self.fail = fail

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fail(x)

    monkeypatch.setattr(torch, "compile", no_compiler)
    with pytest.warns(UserWarning, match=r"compiled.*no C\+\+ compiler$"):
        result = run_demo(out_dir=tmp_path, batch_size=256, rounds=4, compile_baselines=True, cache=False)
    assert set(result.latency_ms) == FORMS
    assert result.num_images == result.batch_size == IMAGES, "there are fewer images than a batch"


def test_demo_failure_is_recorded(tiny_zoo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(bench, "optimize", fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        run_demo(out_dir=tmp_path, batch_size=8, rounds=4, compile_baselines=False)
    (path,) = tmp_path.iterdir()
    assert json.loads((path / "run.json").read_text())["status"] == "failed"


def test_pretrained_network_on_few_images(
    tmp_path: Path, prefer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the shipped network on four images."""
    if pretrained.DEFAULT_NETWORK not in pretrained.list_names():
        pytest.skip("no network is shipped in this tree")
    pixels, labels = pretrained.load_images()
    monkeypatch.setattr(pretrained, "load_images", lambda: (pixels[:4], labels[:4]))
    prefer("sparse", "dense", optimised=1.0)
    result = run_demo(out_dir=tmp_path, batch_size=2, rounds=4, compile_baselines=False, cache=False)
    assert result.predictions_identical and result.accuracy_before == result.accuracy_after >= 0.5
    assert sum(layer.backend == "events" for layer in result.explanation.layers) >= 15
