"""What a device can do at best: the rate of a large matrix product and of a large copy.

Every kernel's benchmark is set against these, since a data sheet's figure is not what this machine reaches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparseflow.core.device import describe_device
from sparseflow.core.timing import measure

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device reached on work that is as easy as work gets.

    Attributes:
        flops_per_s: Data type (`"float32"`, `"tf32"`, `"float16"`, `"bfloat16"`) -> floating-point operations
            a second of a large matrix product, a multiply-add counted as two.
        bytes_per_s: Bytes read plus bytes written a second by a large copy.
    """

    flops_per_s: Mapping[str, float]
    bytes_per_s: float


def measure_ceilings(device: str | torch.device = "cpu") -> Ceilings:
    """Measure what the device can do at best; about a second.

    Float32 is true float32: TF32 has an entry of its own on a GPU.

    Raises:
        DeviceError: The device is not there.
    """
    import torch

    info = describe_device(device)
    target = torch.device("cpu") if info.index is None else torch.device(info.kind, info.index)
    side = 8192 if info.kind == "cuda" else 1024
    variants = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if info.kind == "cuda":
        variants |= {"tf32": torch.float32, "float16": torch.float16}
    flops: dict[str, float] = {}
    precision = torch.get_float32_matmul_precision()
    try:
        for name, dtype in variants.items():
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            a = torch.ones(side, side, dtype=dtype, device=target)
            b, out = torch.ones_like(a), torch.empty_like(a)
            best_ms = _best_ms(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), target)
            flops[name] = 2.0 * side**3 / (best_ms / 1e3)
    finally:
        torch.set_float32_matmul_precision(precision)
    # Far larger than any last-level cache, so that the copy meets the memory and not the cache.
    size = (2 << 30) if info.kind == "cuda" else (256 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=target)
    copy = torch.empty_like(source)
    bytes_per_s = 2.0 * size / (_best_ms(lambda: copy.copy_(source), target) / 1e3)
    return Ceilings(flops_per_s=flops, bytes_per_s=bytes_per_s)


def _best_ms(fn: Callable[[], object], device: torch.device) -> float:
    return measure(fn, warmup=2, repeats=5, min_time_s=0.1, device=device).min_ms
