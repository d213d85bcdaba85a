"""Idle latencies of rows beside other work, by provider and number of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.latency.measure.idle import compute_idle_ms, is_exact
from sparseflow.latency.measure.peaks import measure_idle_ms
from sparseflow.latency.measure.runner import Runner
from tests.latency.onnx_models import convnet, save


@pytest.mark.parametrize(
    ("provider", "threads", "expected_ms", "exact"),
    [
        ("CPUExecutionProvider", 1, 4.0, True),  # CPU time
        ("CPUExecutionProvider", 2, 3.0, False),  # the fastest sample
        ("OpenVINO", 1, 4.0, True),
        ("OpenVINO", 2, 9.0, False),  # its calling thread sleeps, so the median
        ("CUDAExecutionProvider", 1, 9.0, False),
    ],
)
def test_row_beside_other_work(provider: str, threads: int, expected_ms: float, exact: bool) -> None:
    row: dict[str, Any] = {
        "provider": provider, "threads": threads, "cpu_ratio": 0.4, "latency_ms": 10.0, "p50_ms": 9.0,
        "samples_ns": [3_000_000, 9_000_000, 18_000_000],
    }  # fmt: skip
    assert compute_idle_ms(row) == pytest.approx(expected_ms) and is_exact(row) == exact


@pytest.mark.parametrize("threads", [1, 2])
def test_runner_is_measured_with_any_number_of_threads(threads: int, tmp_path: Path) -> None:
    assert measure_idle_ms(Runner(save(convnet(), tmp_path), threads=threads), 0.01) > 0.0
