"""Devices of this machine: `info` describes and selects them, `ceilings` measures their peak rates."""

from __future__ import annotations

from sparseflow.core.device.info import (
    DeviceInfo,
    describe_cpu,
    describe_device,
    read_cpu_clock_mhz,
    select_device,
    select_gpu,
)

__all__ = [
    "DeviceInfo",
    "describe_cpu",
    "describe_device",
    "read_cpu_clock_mhz",
    "select_device",
    "select_gpu",
]
