"""The device at hand: its specifications, measured, and the power that it draws."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sparseflow.codesign.proxy.device import DeviceSpec
from sparseflow.core.ceilings import measure_ceilings
from sparseflow.core.device import describe_device
from sparseflow.core.telemetry import nvml
from sparseflow.errors import InputError

_IDLE_S = 1.0
_REST_S = 0.02


def device_here(
    device: torch.device | str = "cpu", *, tdp_w: float | None = None, idle_w: float | None = None
) -> DeviceSpec:
    """A device of this machine by its measured ceilings; takes some seconds.

    Args:
        device: Which.
        tdp_w: Watts at full load; on a GPU its power limit by default.
        idle_w: Watts when it waits; on a GPU measured by default, 0 on a CPU.

    Raises:
        InputError: Nothing tells `tdp_w`, as on a CPU.
        DeviceError: The device is not there.
    """
    info = describe_device(device)
    tdp_w = _limit_w(device) if tdp_w is None else tdp_w
    if tdp_w is None:
        raise InputError(f"nothing tells the power of {info.name}: give `tdp_w`, watts at full load")
    if idle_w is None:
        idle_w = min(mean_power_w(lambda: time.sleep(_REST_S), device, _IDLE_S) or 0.0, tdp_w)
    return DeviceSpec.measured(
        measure_ceilings(device), name=info.name, mem_gb=info.memory_bytes / 1e9, tdp_w=tdp_w, idle_w=idle_w,
        cores=info.cores,
    )  # fmt: skip


def _limit_w(device: torch.device | str) -> float | None:
    """The power limit of a GPU; None where nothing tells it."""
    gpu = nvml.get_handle(device)
    if gpu is None:
        return None
    import pynvml

    try:
        return pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
    except pynvml.NVMLError:
        return None


def mean_power_w(chunk: Callable[[], object], device: torch.device | str, seconds: float) -> float | None:
    """Mean watts while `chunk` is called over and over, between the counter's first step and its last.

    None where nothing counts energy, or it did not move twice.
    """
    if nvml.read_energy_j(device) is None:
        return None
    steps: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        chunk()
        now, energy = time.monotonic(), nvml.read_energy_j(device)
        if energy is not None and (not steps or energy != steps[-1][1]):
            steps.append((now, energy))
    # What is seen first was counted before the work began.
    steps = steps[1:]
    if len(steps) < 2:
        return None
    return (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])
