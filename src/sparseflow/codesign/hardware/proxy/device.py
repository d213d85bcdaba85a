"""What a device can do, as the proxy sees it: from a chip library, or from ceilings that were measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.core.device import describe_device
from sparseflow.core.device.ceilings import Ceilings, measure_ceilings
from sparseflow.core.layers import PRECISIONS
from sparseflow.core.telemetry import nvml
from sparseflow.errors import FileFormatError, InputError


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """Specifications of a device.

    Attributes:
        name: What points that were measured on it, and proxies fitted to them, know it by.
        peak_flops: FLOP/s.
        peak_bw: Bytes/s of its memory.
        mem_gb: GB (1e9 bytes).
        tdp_w: Watts at full load.
        idle_w: Watts when it waits.
        cores: Multiprocessors of a GPU, cores of a CPU; None where unknown, and then nothing is said about
            how tiles fill them.
        rates: (precision, FLOP/s) where it is not `peak_flops`.

    Raises:
        InputError: A figure is out of range.
    """

    name: str
    peak_flops: float
    peak_bw: float
    mem_gb: float
    tdp_w: float
    idle_w: float = 0.0
    cores: int | None = None
    rates: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("a device needs a `name`")
        for name in ("peak_flops", "peak_bw", "mem_gb", "tdp_w"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0.0):
                raise InputError(f"`{name}` (={value}) of {self.name} must be finite and above 0")
        if not 0.0 <= self.idle_w <= self.tdp_w:
            raise InputError(f"`idle_w` (={self.idle_w}) of {self.name} must be from 0 to {self.tdp_w} W")
        if self.cores is not None and self.cores < 1:
            raise InputError(f"`cores` (={self.cores}) of {self.name} must be at least 1, or None")
        for precision, value in self.rates:
            if precision not in PRECISIONS or not (math.isfinite(value) and value > 0.0):
                raise InputError(
                    f"`rates` of {self.name} says {precision!r}: {value}; expected FLOP/s above 0 for one of "
                    f"{', '.join(PRECISIONS)}"
                )

    def rate(self, precision: str) -> float:
        """FLOP/s in a precision."""
        return dict(self.rates).get(precision, self.peak_flops)

    @classmethod
    def of(cls, chip: ChipType | DeviceSpec, *, cores: int | None = None) -> DeviceSpec:
        """A chip of a library; a `DeviceSpec` stays what it is."""
        if isinstance(chip, DeviceSpec):
            return chip
        return cls(
            name=chip.name, peak_flops=chip.peak_flops, peak_bw=chip.peak_bw, mem_gb=chip.mem_gb,
            tdp_w=chip.tdp_w, idle_w=chip.idle_w, cores=cores,
        )  # fmt: skip

    @classmethod
    def measured(
        cls,
        ceilings: Ceilings,
        *,
        name: str,
        mem_gb: float,
        tdp_w: float,
        idle_w: float = 0.0,
        cores: int | None = None,
    ) -> DeviceSpec:
        """A device by what it reached on work that is as easy as work gets; see `here.device_here`."""
        rates = tuple(
            (each, ceilings.flops_per_s[each]) for each in PRECISIONS if each in ceilings.flops_per_s
        )
        return cls(
            name=name, peak_flops=max(rate for _, rate in rates), peak_bw=ceilings.bytes_per_s,
            mem_gb=mem_gb, tdp_w=tdp_w, idle_w=idle_w, cores=cores, rates=rates,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {
            "name": self.name, "peak_flops": self.peak_flops, "peak_bw": self.peak_bw, "mem_gb": self.mem_gb,
            "tdp_w": self.tdp_w, "idle_w": self.idle_w, "cores": self.cores, "rates": dict(self.rates),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> DeviceSpec:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            return cls(**{**record, "rates": tuple((str(k), float(v)) for k, v in record["rates"].items())})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"a device cannot be read: {error}") from error


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
