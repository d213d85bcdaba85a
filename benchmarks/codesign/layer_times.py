"""Times of the layers of a model within passes over the full model.

A layer that is measured alone (`hardware/proxy/profiling.py`) finds its input where its last call left it. In
a pass it finds the output of the previous layer, in a cache that is large enough for it, and the launch delay
of its kernels depends on how far the host is ahead. A plan for an existing model is therefore better made
from passes: passes of one batch for the latency, and passes of consecutive batches, in which launches overlap
with computation, for the period of a pipeline.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sparseflow.core.layers import LayeredModel
from sparseflow.errors import InputError


def layer_times(
    model: LayeredModel,
    samples: Tensor,
    *,
    device: torch.device | str = "cpu",
    passes: int = 20,
    warmup: int = 5,
    behind: bool = False,
) -> list[list[float]]:
    """Measure the time of every layer in several passes.

    Args:
        model: In evaluation mode, on the device.
        samples: A batch, on the device.
        device: Where they are.
        passes: How many are timed.
        warmup: How many run before them.
        behind: Start each pass right behind the one before, instead of on an idle device. On a CPU these are
            the same.

    Returns:
        Milliseconds, [passes][layers].

    Raises:
        InputError: A count is too small.
    """
    if passes < 1 or warmup < 0:
        raise InputError(f"`passes` (={passes}) must be at least 1, `warmup` (={warmup}) 0")
    target, count = torch.device(device), len(model.describe_layers(len(samples)))
    wait: Callable[[], None] = (
        (lambda: torch.cuda.synchronize(target)) if target.type == "cuda" else (lambda: None)
    )
    result: list[list[Any]] = []
    with torch.no_grad():
        for item in range(warmup + passes):
            if not behind or item == 0:
                wait()
            state = model.initial_state(samples)
            points = [_record_time(target)]
            for layer in range(count):
                state = model.run_layer(layer, state)
                points.append(_record_time(target))
            result.append(points)
    wait()
    return [[_between_ms(*pair) for pair in pairwise(points)] for points in result[warmup:]]


def _between_ms(before: Any, after: Any) -> float:
    return 1e3 * (after - before) if isinstance(after, float) else before.elapsed_time(after)


def _record_time(device: torch.device) -> torch.cuda.Event | float:
    """Record a point in time; on a GPU, the end of all work so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
