"""Overlap of nodes in onnxruntime's profile."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.errors import DeviceError, InputError, RunError
from sparseflow.latency.measure.overlap import CRITICAL_PATH, SUM, compute_overlap, measure_overlap
from tests.latency.onnx_models import convnet, save


def test_overlap_sequential_is_sum() -> None:
    overlap = compute_overlap([(5.0, 7.0), (0.0, 2.0), (2.0, 5.0)])
    assert overlap.to_dict() == {"nodes": 3, "busy_ms": 7.0, "span_ms": 7.0, "share": 0.0, "mode": SUM}


def test_overlap_ignores_pauses() -> None:
    overlap = compute_overlap([(10.0, 11.0), (90.0, 92.0)])
    assert (overlap.busy_ms, overlap.span_ms, overlap.share, overlap.mode) == (3.0, 3.0, 0.0, SUM)


def test_overlap_concurrent_is_critical_path() -> None:
    overlap = compute_overlap([(0.0, 4.0), (1.0, 3.0), (2.0, 6.0)])
    assert (overlap.busy_ms, overlap.span_ms, overlap.mode) == (10.0, 6.0, CRITICAL_PATH)
    assert overlap.share == pytest.approx(0.4)


def test_overlap_small_share_is_rounding() -> None:
    assert compute_overlap([(0.0, 1.01), (1.0, 2.0)]).mode == SUM
    assert compute_overlap([(0.0, 1.1), (1.0, 2.0)]).mode == CRITICAL_PATH


def test_overlap_zero_durations() -> None:
    assert compute_overlap([(1.0, 1.0), (1.0, 1.0)]).mode == SUM


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=12))
def test_overlap_span_is_union(executions: list[tuple[int, int]]) -> None:
    events = [(float(start), float(start + length)) for start, length in executions]
    overlap = compute_overlap(events)
    covered = {tick for start, length in executions for tick in range(start, start + length)}
    assert overlap.span_ms == len(covered) and overlap.busy_ms == sum(length for _, length in executions)
    assert 0.0 <= overlap.share < 1.0


def test_overlap_without_executions_raises() -> None:
    with pytest.raises(RunError):
        compute_overlap([])


def test_measure_overlap_cpu_is_sequential(tmp_path: Path) -> None:
    # Large enough for the microsecond resolution of the profile.
    path = save(convnet(batch="n", size=48, width=16), tmp_path)
    overlap = measure_overlap(path, "cpu", threads=1, shapes={"x": (2, 3, 48, 48)}, num_runs=3)
    assert overlap.mode == SUM
    repeated = measure_overlap(path, "cpu", threads=1, shapes={"x": (2, 3, 48, 48)}, num_runs=6)
    assert repeated.nodes == 2 * overlap.nodes and overlap.nodes % 3 == 0
    assert overlap.nodes >= 3 * 4 and 0.0 <= overlap.span_ms <= overlap.busy_ms
    assert list(tmp_path.iterdir()) == [path]


def test_measure_overlap_parallel_executor(tmp_path: Path) -> None:
    overlap = measure_overlap(save(convnet(), tmp_path), parallel=True, threads=1, num_runs=2)
    assert overlap.nodes >= 2 * 4 and overlap.mode in (SUM, CRITICAL_PATH)


def test_measure_overlap_invalid_model_raises(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        measure_overlap(save(convnet(batch="n"), tmp_path))
    with pytest.raises(InputError):
        measure_overlap(tmp_path / "gone.onnx")
    with pytest.raises(InputError):
        measure_overlap(save(convnet(), tmp_path), "tpu")


def test_measure_overlap_missing_provider_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(DeviceError, match="CUDAExecutionProvider"):
        measure_overlap(save(convnet(), tmp_path), "cuda")
