"""Instruments of this machine, at low loads because other processes may run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.errors import InputError
from sparseflow.latency.measure import instruments
from sparseflow.latency.measure.collection import collect, read_rows
from sparseflow.latency.measure.config import CollectionConfig, TelemetryConfig
from sparseflow.latency.measure.instruments import LocalInstruments
from sparseflow.latency.measure.plan import make_plan
from tests.latency.onnx_models import convnet, save


def test_collect_on_local_machine(tmp_path: Path) -> None:
    cpus = os.sched_getaffinity(0)
    save(convnet(), tmp_path / "models", "net.onnx")
    config = CollectionConfig(
        models=tmp_path / "models",  # type: ignore[arg-type]
        cpus=[min(cpus)], levels=[0.0, 0.1], rounds=1, min_time_s=0.12, loops=3, reference_every=50,
        steady_timeout_s=60.0,
    )  # fmt: skip
    summary = collect(config, tmp_path / "out")
    assert os.sched_getaffinity(0) == cpus
    rows = read_rows(tmp_path / "out")
    assert summary.rows == len(rows) == 6 and summary.failed == 0
    for row in rows:
        assert (
            row["latency_ms"] > 0
            and len(row["samples_ns"]) == row["loops"] >= 3
            and row["calls_per_sample"] >= 1
        )
        assert row["end_s"] - row["start_s"] >= 0.1
        # Other work counts to the level.
        assert 0.0 <= row["stress_alone"] <= row["level"] + 0.05 and 0.0 <= row["stress_achieved"] <= 1.0
        assert 0.0 <= row["before_busy"] <= 1.0 and 0.0 < row["load_busy"] <= 1.0
        assert row["provider"] == "CPUExecutionProvider" and row["graph_level"] == "all"
        assert row["stressor"] == (None if row["level"] == 0.0 else "cpu-fma")


def test_measure_failing_target_gives_error(tmp_path: Path) -> None:
    path = save(convnet(), tmp_path, "net.onnx")
    config = CollectionConfig(models=path, levels=[0.0])  # type: ignore[arg-type]
    (item,) = make_plan(config, {}).targets
    path.write_bytes(path.read_bytes()[:200])
    with LocalInstruments(config) as bench, bench.block(0.0) as facts:
        assert facts["stress_alone"] == 0.0
        row = bench.measure(item)
    assert row["error"].startswith("FileFormatError") and "latency_ms" not in row


def test_unusable_cpus_raise(tmp_path: Path) -> None:
    save(convnet(), tmp_path, "net.onnx")
    for cpus in ([], [9999]):
        with pytest.raises(InputError):
            LocalInstruments(CollectionConfig(models=tmp_path, cpus=cpus))  # type: ignore[arg-type]


def test_config_gpu_defaults(tmp_path: Path) -> None:
    for provider in ("cuda", "CUDAExecutionProvider"):
        config = CollectionConfig(models=[tmp_path], provider=provider)
        assert (config.copies, config.stressor, config.telemetry.source) == (48, "gpu-matmul", "gpm")
    config = CollectionConfig(
        models=[tmp_path],
        provider="cuda",
        copies=0,
        stressor="gpu-copy",
        telemetry=TelemetryConfig(source="host"),
    )
    assert (config.copies, config.stressor, config.telemetry.source) == (0, "gpu-copy", "host")
    part = CollectionConfig.model_validate(
        {"models": [tmp_path], "provider": "cuda", "telemetry": {"max_age_s": 5.0}}
    )
    assert (part.telemetry.source, part.telemetry.max_age_s) == ("gpm", 5.0)
    config = CollectionConfig(models=[tmp_path])
    assert (config.copies, config.stressor, config.telemetry.source) == (0, "cpu-fma", "host")


def test_telemetry_reads_measured_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    monkeypatch.setattr(instruments, "open_reader", lambda source, device, **_: devices.append(device))
    for gpu in (0, 3):
        with LocalInstruments(CollectionConfig(models=[tmp_path], provider="cuda", gpu=gpu)):
            pass
    assert devices == ["cuda:0", "cuda:3"]
