"""Timing of kernel variants against each other in CUDA graphs; results are not cached."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparseflow.core import timing
from sparseflow.errors import InputError

_LOG = logging.getLogger(__name__)
_WARMUP_CALLS = 3


def capture_graph(work: Callable[[], Any], *, calls: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture `calls` calls of `work` into a CUDA graph, after a warm-up.

    Other threads may use the GPU meanwhile.

    Returns:
        The graph, and the result of the last captured call.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUP_CALLS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    result = None
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            result = work()
    return graph, result


def find_fastest(
    candidates: Mapping[str, Callable[[], Callable[[], Any]]], *, calls: int = 10, rounds: int = 9
) -> str:
    """Find the name of the fastest of several equivalent candidates on the current GPU.

    Args:
        candidates: Name -> function that prepares and returns the call to time. A candidate that fails is
            logged and left out.
        calls: Calls per graph.
        rounds: Samples per candidate; their median counts.

    Raises:
        InputError: No candidate can run.
    """
    replays: dict[str, Callable[[], None]] = {}
    alive: list[Any] = []  # a graph does not keep the tensors that it works on
    for name, prepare in candidates.items():
        try:
            work = prepare()
            replays[name] = capture_graph(work, calls=calls)[0].replay
            alive.append(work)
        except Exception as error:  # a candidate that does not compile is skipped
            _LOG.warning("%s cannot be timed: %s: %s", name, type(error).__name__, error)
    if not replays:
        raise InputError(f"no candidate can run: {list(candidates)}")
    return timing.compare(
        replays, rounds=rounds, baseline=next(iter(replays)), warmup=1, device="cuda"
    ).fastest()
