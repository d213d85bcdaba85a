"""Device specifications, from a chip library or measured on the local device."""

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
        name: Name that measurements and fitted proxies refer to.
        peak_flops: FLOP/s.
        peak_bw: Memory bandwidth, bytes/s.
        mem_gb: Memory, GB (1e9 bytes).
        tdp_w: Power at full load, W.
        idle_w: Idle power, W.
        cores: Multiprocessors of a GPU, cores of a CPU; None if unknown, which disables the tile features.
        rates: Pairs (precision, FLOP/s) for precisions whose rate is not `peak_flops`.

    Raises:
        InputError: A value is out of range.
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
            raise InputError("`name` of a device must not be empty")
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
                    f"`rates` of {self.name} contains {precision!r}: {value}; expected FLOP/s above 0 for "
                    f"one of {', '.join(PRECISIONS)}"
                )

    def rate(self, precision: str) -> float:
        """FLOP/s at a precision."""
        return dict(self.rates).get(precision, self.peak_flops)

    @classmethod
    def from_chip(cls, chip: ChipType | DeviceSpec, *, cores: int | None = None) -> DeviceSpec:
        """Convert a chip type; a `DeviceSpec` is returned unchanged."""
        if isinstance(chip, DeviceSpec):
            return chip
        return cls(
            name=chip.name, peak_flops=chip.peak_flops, peak_bw=chip.peak_bw, mem_gb=chip.mem_gb,
            tdp_w=chip.tdp_w, idle_w=chip.idle_w, cores=cores,
        )  # fmt: skip

    @classmethod
    def from_ceilings(
        cls,
        ceilings: Ceilings,
        *,
        name: str,
        mem_gb: float,
        tdp_w: float,
        idle_w: float = 0.0,
        cores: int | None = None,
    ) -> DeviceSpec:
        """Build the specification from measured ceilings; see `measure_device`."""
        rates = tuple(
            (precision, ceilings.flops_per_s[precision])
            for precision in PRECISIONS
            if precision in ceilings.flops_per_s
        )
        return cls(
            name=name, peak_flops=max(rate for _, rate in rates), peak_bw=ceilings.bytes_per_s,
            mem_gb=mem_gb, tdp_w=tdp_w, idle_w=idle_w, cores=cores, rates=rates,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON types; `from_dict` reads them."""
        return {
            "name": self.name, "peak_flops": self.peak_flops, "peak_bw": self.peak_bw, "mem_gb": self.mem_gb,
            "tdp_w": self.tdp_w, "idle_w": self.idle_w, "cores": self.cores, "rates": dict(self.rates),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> DeviceSpec:
        """Read what `to_dict` returned. Raises FileFormatError if the record is invalid."""
        try:
            return cls(**{**record, "rates": tuple((str(k), float(v)) for k, v in record["rates"].items())})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"invalid device: {error}") from error


_IDLE_DURATION_S = 1.0
_SLEEP_S = 0.02


def measure_device(
    device: torch.device | str = "cpu", *, tdp_w: float | None = None, idle_w: float | None = None
) -> DeviceSpec:
    """Measure the ceilings of a local device; takes a few seconds.

    Args:
        device: The device.
        tdp_w: Power at full load, W; by default the power limit of a GPU.
        idle_w: Idle power, W; by default measured on a GPU, and 0 on a CPU.

    Raises:
        InputError: `tdp_w` is not given and cannot be read, as on a CPU.
        DeviceError: The device does not exist.
    """
    info = describe_device(device)
    tdp_w = _read_power_limit_w(device) if tdp_w is None else tdp_w
    if tdp_w is None:
        raise InputError(f"the power limit of {info.name} is unknown; pass `tdp_w`, W at full load")
    if idle_w is None:
        idle_w = min(measure_power_w(lambda: time.sleep(_SLEEP_S), device, _IDLE_DURATION_S) or 0.0, tdp_w)
    return DeviceSpec.from_ceilings(
        measure_ceilings(device), name=info.name, mem_gb=info.memory_bytes / 1e9, tdp_w=tdp_w, idle_w=idle_w,
        cores=info.cores,
    )  # fmt: skip


def _read_power_limit_w(device: torch.device | str) -> float | None:
    """Read the power limit of a GPU, W; None if it is not available."""
    gpu = nvml.get_handle(device)
    if gpu is None:
        return None
    import pynvml

    try:
        return pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
    except pynvml.NVMLError:
        return None


def measure_power_w(
    run_chunk: Callable[[], object], device: torch.device | str, duration_s: float
) -> float | None:
    """Measure the mean power while calling `run_chunk` repeatedly, W.

    The mean is taken from the first to the last change of the energy counter. None without an energy counter,
    or if it changed fewer than two times.
    """
    if nvml.read_energy_j(device) is None:
        return None
    readings: list[tuple[float, float]] = []
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        run_chunk()
        time_s, energy = time.monotonic(), nvml.read_energy_j(device)
        if energy is not None and (not readings or energy != readings[-1][1]):
            readings.append((time_s, energy))
    # The first reading includes energy from before the work.
    readings = readings[1:]
    if len(readings) < 2:
        return None
    return (readings[-1][1] - readings[0][1]) / (readings[-1][0] - readings[0][0])
