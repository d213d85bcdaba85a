"""The real instruments, for a moment. Levels are low: other work on the machine must not fail a test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.errors import InputError
from sparseflow.latency import instruments
from sparseflow.latency.campaign import Config, Telemetry, make_plan
from sparseflow.latency.collect import collect, read
from sparseflow.latency.instruments import Bench
from tests.latency.onnx_models import convnet, save


def test_a_collection_on_this_machine(tmp_path: Path) -> None:
    cpus = os.sched_getaffinity(0)
    save(convnet(), tmp_path / "models", "net.onnx")
    config = Config(
        models=tmp_path / "models",  # type: ignore[arg-type]
        cpus=[min(cpus)], levels=[0.0, 0.1], rounds=1, min_time_s=0.12, loops=3, reference_every=50,
        steady_timeout_s=60.0,
    )  # fmt: skip
    found = collect(config, tmp_path / "out")
    assert os.sched_getaffinity(0) == cpus
    rows = read(tmp_path / "out")
    assert found.rows == len(rows) == 6 and found.failed == 0
    for row in rows:
        assert (
            row["latency_ms"] > 0
            and len(row["samples_ns"]) == row["loops"] >= 3
            and row["calls_per_sample"] >= 1
        )
        assert row["end_s"] - row["start_s"] >= 0.1
        assert abs(row["stress_alone"] - row["level"]) <= 0.05 and 0.0 <= row["stress_achieved"] <= 1.0
        assert 0.0 <= row["before_busy"] <= 1.0 and 0.0 < row["load_busy"] <= 1.0
        assert row["provider"] == "CPUExecutionProvider" and row["graph_level"] == "all"
        assert row["stressor"] == (None if row["level"] == 0.0 else "cpu-fma")


def test_an_item_that_fails_is_told_and_not_raised(tmp_path: Path) -> None:
    path = save(convnet(), tmp_path, "net.onnx")
    config = Config(models=path, levels=[0.0])  # type: ignore[arg-type]
    (item,) = make_plan(config, {}).items
    path.write_bytes(path.read_bytes()[:200])
    with Bench(config) as bench, bench.block(0.0) as facts:
        assert facts["stress_alone"] == 0.0
        row = bench.measure(item)
    assert row["error"].startswith("FileFormatError") and "latency_ms" not in row


def test_cpus_that_may_not_be_used_are_refused(tmp_path: Path) -> None:
    save(convnet(), tmp_path, "net.onnx")
    for cpus in ([], [9999]):
        with pytest.raises(InputError, match="cpus"):
            Bench(Config(models=tmp_path, cpus=cpus))  # type: ignore[arg-type]


def test_on_a_gpu_settings_that_are_not_told_are_those_of_a_gpu(tmp_path: Path) -> None:
    for provider in ("cuda", "CUDAExecutionProvider"):
        config = Config(models=[tmp_path], provider=provider)
        assert (config.copies, config.stressor, config.telemetry.source) == (48, "gpu-matmul", "gpm")
    told = Config(
        models=[tmp_path], provider="cuda", copies=0, stressor="gpu-copy", telemetry=Telemetry(source="host")
    )
    assert (told.copies, told.stressor, told.telemetry.source) == (0, "gpu-copy", "host")
    part = Config.model_validate({"models": [tmp_path], "provider": "cuda", "telemetry": {"max_age_s": 5.0}})
    assert (part.telemetry.source, part.telemetry.max_age_s) == ("gpm", 5.0)
    config = Config(models=[tmp_path])
    assert (config.copies, config.stressor, config.telemetry.source) == (0, "cpu-fma", "host")


def test_load_is_read_from_the_gpu_that_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(instruments, "open_reader", lambda source, device, **_: asked.append(device))
    for gpu in (0, 3):
        with Bench(Config(models=[tmp_path], provider="cuda", gpu=gpu)):
            pass
    assert asked == ["cuda:0", "cuda:3"]
