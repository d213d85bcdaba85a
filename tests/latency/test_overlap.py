"""Overlap: what intervals show, and that onnxruntime's sequential executor shows none."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from sparseflow.errors import DeviceError, InputError, RunError
from sparseflow.latency.overlap import CRITICAL_PATH, SUM, analyze, of_events
from tests.latency.onnx_models import convnet, save


def test_what_runs_one_after_the_other_adds_up() -> None:
    found = of_events([(5.0, 7.0), (0.0, 2.0), (2.0, 5.0)])
    assert found.to_dict() == {"nodes": 3, "busy_ms": 7.0, "span_ms": 7.0, "share": 0.0, "mode": SUM}


def test_pauses_are_no_overlap() -> None:
    found = of_events([(10.0, 11.0), (90.0, 92.0)])
    assert (found.busy_ms, found.span_ms, found.share, found.mode) == (3.0, 3.0, 0.0, SUM)


def test_what_runs_together_is_told_and_makes_the_path_count() -> None:
    found = of_events([(0.0, 4.0), (1.0, 3.0), (2.0, 6.0)])
    assert (found.busy_ms, found.span_ms, found.mode) == (10.0, 6.0, CRITICAL_PATH)
    assert found.share == pytest.approx(0.4)


def test_a_little_overlap_is_rounding() -> None:
    assert of_events([(0.0, 1.01), (1.0, 2.0)]).mode == SUM
    assert of_events([(0.0, 1.1), (1.0, 2.0)]).mode == CRITICAL_PATH


def test_executions_too_short_for_the_clock_are_no_overlap() -> None:
    assert of_events([(1.0, 1.0), (1.0, 1.0)]).mode == SUM


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_span_is_the_time_in_which_anything_runs(given: list[tuple[int, int]]) -> None:
    events = [(float(begin), float(begin + length)) for begin, length in given]
    found = of_events(events)
    covered = {tick for begin, length in given for tick in range(begin, begin + length)}
    assert found.span_ms == len(covered) and found.busy_ms == sum(length for _, length in given)
    assert 0.0 <= found.share < 1.0


def test_no_execution_is_an_error() -> None:
    with pytest.raises(RunError, match="no node"):
        of_events([])


def test_a_model_on_the_cpu_runs_its_nodes_one_after_the_other(tmp_path: Path) -> None:
    # Large enough that the profile's microseconds are small beside it.
    path = save(convnet(batch="n", size=48, width=16), tmp_path)
    found = analyze(path, "cpu", threads=1, shapes={"x": (2, 3, 48, 48)}, runs=3)
    assert found.mode == SUM
    again = analyze(path, "cpu", threads=1, shapes={"x": (2, 3, 48, 48)}, runs=6)
    assert again.nodes == 2 * found.nodes and found.nodes % 3 == 0
    assert found.nodes >= 3 * 4 and 0.0 <= found.span_ms <= found.busy_ms
    assert list(tmp_path.iterdir()) == [path]


def test_the_parallel_executor_can_be_looked_at(tmp_path: Path) -> None:
    found = analyze(save(convnet(), tmp_path), parallel=True, threads=1, runs=2)
    assert found.nodes >= 2 * 4 and found.mode in (SUM, CRITICAL_PATH)


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="x"):
        analyze(save(convnet(batch="n"), tmp_path))
    with pytest.raises(InputError, match="gone"):
        analyze(tmp_path / "gone.onnx")
    with pytest.raises(InputError, match="provider"):
        analyze(save(convnet(), tmp_path), "tpu")


def test_a_provider_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(DeviceError, match="CUDAExecutionProvider"):
        analyze(save(convnet(), tmp_path), "cuda")
