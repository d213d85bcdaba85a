"""Peak memory of a network on a CPU, optimized and not."""

from __future__ import annotations

import statistics

import torch
from torch import nn

from sparseflow.core.telemetry.process_memory import (
    measure_peak_bytes,
    read_resident_bytes,
    release_free_memory,
)
from sparseflow.spiking.accelerated import get_accelerated_forward
from sparseflow.spiking.graph.module_state import reset_neurons
from sparseflow.spiking.profile.baselines import make_stateless

_NUM_CALLS = 3
_MB = 1e6


def measure_memory_mb(
    reference: nn.Module, optimized: nn.Module, inputs: tuple[torch.Tensor, ...]
) -> tuple[float, float] | None:
    """Measure the peak memory of the network's own code and of the optimized network.

    The peak is the sum of the network's parameters and buffers, of the prepared weights and buffers of the
    optimized network, and of the memory that a call from rest adds for a moment. Code and packages, which a
    process loads once, do not count, nor do offloaded weights.

    Args:
        reference: The network, not optimized.
        optimized: The same network, optimized; its neurons are reset.
        inputs: Inputs of a call.

    Returns:
        Both peaks in MB (10^6 bytes); None on a GPU, and where the system does not count memory.
    """
    if inputs[0].device.type != "cpu":
        return None
    try:
        weights = sum(t.nbytes for t in (*reference.parameters(), *reference.buffers()))
        own_bytes = weights + _measure_call(reference, inputs)
        prepared = _measure_prepared(optimized, inputs)
        weights -= get_accelerated_forward(optimized).offloaded_bytes
        return own_bytes / _MB, (weights + prepared + _measure_call(optimized, inputs)) / _MB
    except OSError:
        return None


def _measure_call(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> float:
    """Return the median over calls from rest of the bytes that a call adds."""
    run = make_stateless(model)
    run(*inputs)
    peaks: list[int] = []
    for _ in range(_NUM_CALLS):
        reset_neurons(model)
        peaks.append(measure_peak_bytes(lambda: run(*inputs)))
    return statistics.median(peaks)


def _measure_prepared(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Return the bytes that become free when the optimized network drops what it has prepared."""
    make_stateless(model)(*inputs)
    reset_neurons(model)
    release_free_memory()
    before = read_resident_bytes()
    compiled_bytes = get_accelerated_forward(model).release_prepared()
    release_free_memory()
    return max(0, before - read_resident_bytes()) + compiled_bytes
