"""Recorded work: the same results, and what cannot be recorded still runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from sparseflow.adaptive.engine import graphs as module
from sparseflow.adaptive.engine.graphs import GraphCache


class Played:
    """Stands in for a CUDA graph."""

    def __init__(self) -> None:
        self.count = 0

    def replay(self) -> None:
        self.count += 1


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> GraphCache:
    """Graphs on a GPU that is not there: recording runs the body twice more, and keeps a stand-in."""

    @contextmanager
    def skip_capture() -> Iterator[None]:
        yield

    def record(self: GraphCache, key: str, body: module.Callable[[], None]) -> None:
        body()
        body()
        self._graphs[key] = Played()

    monkeypatch.setattr(module, "_forbid_sync", skip_capture)
    monkeypatch.setattr(GraphCache, "_capture", record)
    graphs = GraphCache("cpu")
    graphs.enabled = True
    return graphs


def test_without_a_gpu_bodies_run() -> None:
    graphs, ran = GraphCache("cpu"), []
    assert not graphs.enabled
    for _ in range(3):
        graphs.run("a", lambda: ran.append(1))
    assert len(ran) == 3 and graphs.captured == () and not graphs.failures


def test_records_once_and_plays(pretended: GraphCache) -> None:
    ran: list[int] = []
    for _ in range(4):
        pretended.run("a", lambda: ran.append(1))
    assert len(ran) == 3 and pretended.captured == ("a",)
    assert pretended._graphs["a"].count == 3


def test_what_waits_runs_unrecorded(pretended: GraphCache, caplog: pytest.LogCaptureFixture) -> None:
    tries: list[int] = []

    def body() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")

    with caplog.at_level(logging.WARNING):
        pretended.run("a", body)
        pretended.run("a", body)
    assert len(tries) == 3 and pretended.captured == ()
    assert pretended.failures == {"a": "RuntimeError: called a synchronizing CUDA operation"}
    assert "a is not captured" in caplog.text


def test_work_that_fails_is_no_reason(pretended: GraphCache) -> None:
    def body() -> None:
        raise RuntimeError("shapes do not fit")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            pretended.run("a", body)
    assert not pretended.failures
    with pytest.raises(KeyError):
        pretended.run("b", lambda: {}["x"])


def test_a_recording_that_fails_is_told(pretended: GraphCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: GraphCache, key: str, body: module.Callable[[], None]) -> None:
        raise torch.OutOfMemoryError("no room for a graph")

    monkeypatch.setattr(GraphCache, "_capture", record)
    ran: list[int] = []
    pretended.run("a", lambda: ran.append(1))
    assert len(ran) == 1 and "no room" in pretended.failures["a"]


def test_no_memory_for_the_work_itself_is_raised(pretended: GraphCache) -> None:
    def body() -> None:
        raise torch.OutOfMemoryError("none")

    with pytest.raises(torch.OutOfMemoryError):
        pretended.run("a", body)
    assert not pretended.failures


@pytest.mark.gpu
def test_recorded_on_a_gpu() -> None:
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
def test_what_waits_on_a_gpu() -> None:
    graphs = GraphCache("cuda")
    values, output = torch.arange(4.0, device="cuda"), torch.zeros((), device="cuda")

    def body() -> None:
        output.fill_(float(values.sum()))

    for value in range(3):
        values.fill_(value)
        graphs.run("a", body)
        assert float(output) == 4.0 * value
    assert graphs.captured == () and "a" in graphs.failures

    # Nothing is left behind that would break the next recording.
    def other() -> None:
        output.copy_(values[0] + 1)

    graphs.run("b", other)
    assert graphs.captured == ("b",)
    assert torch.rand(2, device="cuda").shape == (2,)
