"""Device specifications, from a chip library or measured on the local device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from pydantic import with_config

from sparseflow.codesign.hardware.chips import ChipType
from sparseflow.core.checks import check_at_least, check_between, check_one_of, check_positive
from sparseflow.core.config import StrictModel
from sparseflow.core.device import describe_device
from sparseflow.core.device.ceilings import measure_ceilings
from sparseflow.core.layers import PRECISIONS
from sparseflow.core.telemetry import nvml
from sparseflow.errors import InputError


@with_config(StrictModel.model_config)
@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """Specifications of a device.

    Attributes:
        name: Name that measurements and fitted proxies refer to.
        peak_flops: FLOP/s at the fastest precision.
        peak_bw: Memory bandwidth, bytes/s.
        mem_gb: Memory, GB (1e9 bytes).
        tdp_w: Power at full load, W.
        rates: Pairs (precision, FLOP/s); the device cannot run layers of other precisions.
        idle_w: Idle power, W.
        cores: Multiprocessors of a GPU, cores of a CPU; None if unknown, which disables the tile features.

    Raises:
        InputError: A value is out of range, or there are no rates.
    """

    name: str
    peak_flops: float
    peak_bw: float
    mem_gb: float
    tdp_w: float
    rates: tuple[tuple[str, float], ...]
    idle_w: float = 0.0
    cores: int | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("`name` of a device must not be empty")
        check_at_least(1, num_rates=len(self.rates))
        rates = {f"rates[{precision!r}]": rate for precision, rate in self.rates}
        check_positive(
            peak_flops=self.peak_flops, peak_bw=self.peak_bw, mem_gb=self.mem_gb, tdp_w=self.tdp_w, **rates
        )
        check_between(0.0, self.tdp_w, idle_w=self.idle_w)
        check_at_least(1, cores=1 if self.cores is None else self.cores)
        for precision, _ in self.rates:
            check_one_of(PRECISIONS, rates=precision)

    def rate(self, precision: str) -> float:
        """FLOP/s at a precision.

        Raises:
            InputError: The rate is unknown.
        """
        rates = dict(self.rates)
        if precision not in rates:
            raise InputError(
                f"{self.name} has no FLOP/s for {precision}, only for {', '.join(rates)}; add it to "
                "`peak_flops` of the chip, or use another chip or precision"
            )
        return rates[precision]

    @classmethod
    def from_chip(cls, chip: ChipType | DeviceSpec, *, cores: int | None = None) -> DeviceSpec:
        """Convert a chip type; a `DeviceSpec` is returned unchanged."""
        if isinstance(chip, DeviceSpec):
            return chip
        return cls(
            name=chip.name, peak_flops=max(chip.peak_flops.values()), peak_bw=chip.peak_bw,
            mem_gb=chip.mem_gb, tdp_w=chip.tdp_w, rates=tuple(chip.peak_flops.items()), idle_w=chip.idle_w,
            cores=cores,
        )  # fmt: skip


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
    ceilings = measure_ceilings(device)
    rates = {name: rate for name, rate in ceilings.flops_per_s.items() if name in PRECISIONS}
    return DeviceSpec(
        name=info.name, peak_flops=max(rates.values()), peak_bw=ceilings.bytes_per_s,
        mem_gb=info.memory_bytes / 1e9, tdp_w=tdp_w, idle_w=idle_w, cores=info.cores,
        rates=tuple(rates.items()),
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
