"""Timing of kernel variants against each other in CUDA graphs.

The candidates are captured once and replayed in rotating order, so that clock drift affects them equally.
Results are not cached.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparseflow.errors import InputError

_LOG = logging.getLogger(__name__)


def capture_calls(fn: Callable[[], Any], calls: int = 1) -> torch.cuda.CUDAGraph:
    """Capture `calls` calls of `fn` into a CUDA graph, after a warm-up."""
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
    """Time each graph `rounds` times in rotating order; microseconds per call.

    Args:
        graphs: Graphs of `calls` calls each.
        calls: Divisor of a replay's time.
        rounds: Samples per graph.
    """
    for graph in graphs.values():
        graph.replay()
    torch.cuda.synchronize(torch.cuda.current_device())
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for r in range(rounds):
        events = []
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize(torch.cuda.current_device())
        for name, start, end in events:
            samples[name].append(start.elapsed_time(end) * 1000.0 / calls)
    return samples


def find_fastest(
    candidates: Mapping[str, Callable[[], Callable[[], Any]]], *, calls: int = 10, rounds: int = 9
) -> tuple[str, dict[str, float]]:
    """Find the fastest of several equivalent candidates.

    Args:
        candidates: Name -> function that prepares and returns the call to time.
        calls: Calls per graph.
        rounds: Samples per candidate; their median counts.

    Returns:
        (name, median microseconds per call by name). A candidate that fails is logged and left out.

    Raises:
        InputError: No candidate can run.
    """
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    alive: list[Any] = []  # a graph does not keep the tensors that it works on
    for name, prepare in candidates.items():
        try:
            fn = prepare()
            graphs[name] = capture_calls(fn, calls)
            alive.append(fn)
        except Exception as error:  # a candidate that does not compile is skipped
            _LOG.warning("%s cannot be timed: %s: %s", name, type(error).__name__, error)
    if not graphs:
        raise InputError(f"no candidate can run: {list(candidates)}")
    samples = time_graphs(graphs, calls=calls, rounds=rounds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    return min(medians, key=lambda name: medians[name]), medians
