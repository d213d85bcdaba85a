"""CUDA graphs by key, and the fallback to eager execution."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from sparseflow.adaptive.engine import graphs as module
from sparseflow.adaptive.engine.graphs import GraphCache


class FakeGraph:
    """Fake CUDA graph that counts replays."""

    def __init__(self) -> None:
        self.count = 0

    def replay(self) -> None:
        self.count += 1


@pytest.fixture
def fake_capture(monkeypatch: pytest.MonkeyPatch) -> GraphCache:
    """Cache that captures without a GPU: a capture runs the body twice and stores a fake graph."""

    @contextmanager
    def skip_capture() -> Iterator[None]:
        yield

    def record(self: GraphCache, key: str, body: module.Callable[[], None]) -> None:
        body()
        body()
        self._graphs[key] = FakeGraph()

    monkeypatch.setattr(module, "_forbid_sync", skip_capture)
    monkeypatch.setattr(GraphCache, "_capture", record)
    graphs = GraphCache("cpu")
    graphs.enabled = True
    return graphs


def test_run_on_cpu_runs_body() -> None:
    graphs, ran = GraphCache("cpu"), []
    assert not graphs.enabled
    for _ in range(3):
        graphs.run("a", lambda: ran.append(1))
    assert len(ran) == 3 and graphs.captured == () and not graphs.failures


def test_run_captures_once_and_replays(fake_capture: GraphCache) -> None:
    ran: list[int] = []
    for _ in range(4):
        fake_capture.run("a", lambda: ran.append(1))
    assert len(ran) == 3 and fake_capture.captured == ("a",)
    assert fake_capture._graphs["a"].count == 3


def test_run_synchronizing_body_is_not_captured(
    fake_capture: GraphCache, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []

    def body() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")

    with caplog.at_level(logging.WARNING):
        fake_capture.run("a", body)
        fake_capture.run("a", body)
    assert len(tries) == 3 and fake_capture.captured == ()
    assert fake_capture.failures == {"a": "RuntimeError: called a synchronizing CUDA operation"}
    assert "a is not captured" in caplog.text


def test_run_failing_body_raises(fake_capture: GraphCache) -> None:
    def body() -> None:
        raise RuntimeError("shapes do not fit")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            fake_capture.run("a", body)
    assert not fake_capture.failures
    with pytest.raises(KeyError):
        fake_capture.run("b", lambda: {}["x"])


def test_run_failed_capture_is_recorded(fake_capture: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: GraphCache, key: str, body: module.Callable[[], None]) -> None:
        raise torch.OutOfMemoryError("no room for a graph")

    monkeypatch.setattr(GraphCache, "_capture", record)
    ran: list[int] = []
    fake_capture.run("a", lambda: ran.append(1))
    assert len(ran) == 1 and "no room" in fake_capture.failures["a"]


def test_run_body_out_of_memory_raises(fake_capture: GraphCache) -> None:
    def body() -> None:
        raise torch.OutOfMemoryError("none")

    with pytest.raises(torch.OutOfMemoryError):
        fake_capture.run("a", body)
    assert not fake_capture.failures


@pytest.mark.gpu
def test_captured_body_on_gpu_replays_with_new_inputs() -> None:
    graphs = GraphCache("cuda")
    values, output = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    weight = torch.randn(4, 4, device="cuda")

    def body() -> None:
        output.copy_((weight @ values).exp())

    for value in range(5):
        values.fill_(value / 8)
        graphs.run("a", body)
        torch.testing.assert_close(output, (weight @ values).exp())
    assert graphs.captured == ("a",)
    assert torch.cuda.get_sync_debug_mode() == 0


@pytest.mark.gpu
def test_synchronizing_body_on_gpu_runs_eagerly() -> None:
    graphs = GraphCache("cuda")
    values, output = torch.arange(4.0, device="cuda"), torch.zeros((), device="cuda")

    def body() -> None:
        output.fill_(float(values.sum()))

    for value in range(3):
        values.fill_(value)
        graphs.run("a", body)
        assert float(output) == 4.0 * value
    assert graphs.captured == () and "a" in graphs.failures

    # The failed capture does not break the next one.
    def other() -> None:
        output.copy_(values[0] + 1)

    graphs.run("b", other)
    assert graphs.captured == ("b",)
    assert torch.rand(2, device="cuda").shape == (2,)
