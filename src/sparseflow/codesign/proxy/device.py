"""What a device can do, as the proxy sees it: from a chip library, or from ceilings that were measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparseflow.codesign.chips import ChipType
from sparseflow.core.ceilings import Ceilings
from sparseflow.core.layers import PRECISIONS
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
