"""Measured roofline ceilings of a device: its peak matrix-product and copy rates.

Kernel benchmarks compare against these, because a machine does not reach the numbers of its data sheet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparseflow.core.device.info import describe_device
from sparseflow.core.timing import measure

if TYPE_CHECKING:
    import torch


_SIDES = {"cpu": 1024, "cuda": 8192}
"""Rows and columns of the multiplied matrices."""

_COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
"""Much larger than a last-level cache, so that the copy measures the memory."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Peak rates of a device.

    Attributes:
        flops_per_s: Data type (`"float32"`, `"tf32"`, `"float16"`, `"bfloat16"`) -> floating-point operations
            per second of a large matrix product; a multiply-add counts as two.
        bytes_per_s: Bytes read plus bytes written per second by a large copy.
    """

    flops_per_s: Mapping[str, float]
    bytes_per_s: float


def measure_ceilings(device: str | torch.device = "cpu") -> Ceilings:
    """Measure the peak rates of a device; takes about a second.

    `"float32"` is true float32; on a GPU, TF32 is a separate entry.

    Raises:
        DeviceError: The device does not exist.
    """
    import torch

    info = describe_device(device)
    target = torch.device("cpu") if info.index is None else torch.device(info.kind, info.index)
    side = _SIDES[info.kind]
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if info.kind == "cuda":
        dtypes |= {"tf32": torch.float32, "float16": torch.float16}
    flops_per_s: dict[str, float] = {}
    precision = torch.get_float32_matmul_precision()
    try:
        for name, dtype in dtypes.items():
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            a = torch.ones(side, side, dtype=dtype, device=target)
            b, out = torch.ones_like(a), torch.empty_like(a)
            min_ms = _measure_min_ms(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), target)
            flops_per_s[name] = 2.0 * side**3 / (min_ms / 1e3)
    finally:
        torch.set_float32_matmul_precision(precision)
    size = _COPY_BYTES[info.kind]
    source = torch.zeros(size, dtype=torch.uint8, device=target)
    target_buffer = torch.empty_like(source)
    bytes_per_s = 2.0 * size / (_measure_min_ms(lambda: target_buffer.copy_(source), target) / 1e3)
    return Ceilings(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)


def _measure_min_ms(fn: Callable[[], object], device: torch.device) -> float:
    return measure(fn, warmup=2, repeats=5, min_time_s=0.1, device=device).min_ms
