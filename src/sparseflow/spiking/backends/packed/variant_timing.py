"""Time launches against each other in CUDA graphs, and pick the fastest variant of a group.

The candidates are captured once and replayed in turn, so that a drifting clock hits all of them alike. What
was picked is for the caller to remember: `autotune` returns the variant's name, nothing is cached here.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparseflow.errors import InputError

_LOG = logging.getLogger(__name__)


def capture(fn: Callable[[], Any], calls: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `calls` calls of `fn`, which has been warmed up before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize(torch.cuda.current_device())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return graph


def time_graphs(
    graphs: Mapping[str, torch.cuda.CUDAGraph], *, calls: int, rounds: int
) -> dict[str, list[float]]:
    """Microseconds a call of every graph, `rounds` samples each, taken in turn.

    Args:
        graphs: Graphs of `calls` calls each.
        calls: What the time of a replay is divided by.
        rounds: Samples.
    """
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize(torch.cuda.current_device())
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for r in range(rounds):
        events = []
        for name in names[r % len(names) :] + names[: r % len(names)]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            events.append((name, begin, end))
        torch.cuda.synchronize(torch.cuda.current_device())
        for name, begin, end in events:
            samples[name].append(begin.elapsed_time(end) * 1000.0 / calls)
    return samples


def fastest(
    candidates: Mapping[str, Callable[[], Callable[[], Any]]], *, calls: int = 10, rounds: int = 9
) -> tuple[str, dict[str, float]]:
    """The fastest of several ways to do the same.

    Args:
        candidates: For every name a function that prepares, and returns what to time.
        calls: Calls a graph.
        rounds: Samples of each; their median counts.

    Returns:
        (name, median microseconds a call by name). A candidate that fails is logged and left out.

    Raises:
        InputError: None could be run.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    alive: list[Any] = []  # a graph does not keep the tensors that it works on
    for name, prepare in candidates.items():
        try:
            fn = prepare()
            graphs[name] = capture(fn, calls)
            alive.append(fn)
        except Exception as error:  # a candidate that does not compile must not stop the others
            _LOG.warning("%s cannot be timed: %s: %s", name, type(error).__name__, error)
    if not graphs:
        raise InputError(f"none of the candidates runs here: {list(candidates)}")
    samples = time_graphs(graphs, calls=calls, rounds=rounds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return min(medians, key=lambda name: medians[name]), medians
