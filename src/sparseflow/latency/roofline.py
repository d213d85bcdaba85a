"""A bound that no kernel of a device beats, from the best that was seen there.

A kernel takes at least its launch, and beside it the longer of its operations at the highest rate and its
bytes at the highest rate that any kernel reached. Caches count: the bytes' rate is that of whatever held
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.runner import quantile

_BEST = 0.995
"""The quantile that stands for the best: the very best may be an error of measurement."""

_CLEAR_OF_LAUNCH = 4.0
"""A rate is read only from kernels that take this many launches: elsewhere the launch would hide it."""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The bound of a device.

    Attributes:
        launch_ms: What a kernel without work takes, its session's overhead included, milliseconds.
        flops_per_s: Highest rate of floating-point operations.
        bytes_per_s: Highest rate of bytes read and written.
        typical: What a kernel takes beside its launch over what the bound says, the median.
        low: The 5th percentile of that.
        high: The 95th percentile of that.
    """

    launch_ms: float
    flops_per_s: float
    bytes_per_s: float
    typical: float
    low: float
    high: float

    @classmethod
    def fit(cls, kernels: Sequence[Kernel], latency_ms: Sequence[float]) -> Roofline:
        """From kernels and what they took at rest.

        Raises:
            InputError: There are none.
        """
        if not kernels or len(kernels) != len(latency_ms):
            raise InputError(
                f"{len(kernels)} kernels and {len(latency_ms)} latencies: some of both are needed"
            )
        pairs = list(zip(kernels, latency_ms, strict=True))
        launch = quantile(list(latency_ms), 0.01)
        seconds = [max(value - launch, 1e-3 * launch) / 1e3 for value in latency_ms]
        clear = [n for n, value in enumerate(latency_ms) if value > _CLEAR_OF_LAUNCH * launch]
        clear = clear or list(range(len(kernels)))
        flops = quantile([kernels[n].flops / seconds[n] for n in clear], _BEST)
        moved = quantile([kernels[n].bytes_moved / seconds[n] for n in clear], _BEST)
        # The others show, with their launch counted as work, what is reached at least.
        flops = max(flops, quantile([1e3 * k.flops / ms for k, ms in pairs], _BEST))
        moved = max(moved, quantile([1e3 * k.bytes_moved / ms for k, ms in pairs], _BEST))
        bound = cls(
            launch_ms=launch,
            flops_per_s=max(flops, 1.0),
            bytes_per_s=max(moved, 1.0),
            typical=1.0,
            low=1.0,
            high=1.0,
        )
        ratios = [1e3 * seconds[n] / bound.work_ms(kernels[n]) for n in clear if bound.work_ms(kernels[n])]
        if not ratios:
            return bound
        return cls(
            **asdict(bound)
            | {name: quantile(ratios, q) for name, q in (("typical", 0.5), ("low", 0.05), ("high", 0.95))}
        )

    def work_ms(self, kernel: Kernel) -> float:
        """The bound without the launch, milliseconds."""
        return 1e3 * max(kernel.flops / self.flops_per_s, kernel.bytes_moved / self.bytes_per_s)

    def floor_ms(self, kernel: Kernel) -> float:
        """The least that the kernel can take, milliseconds."""
        return self.launch_ms + self.work_ms(kernel)

    def guess_ms(self, kernel: Kernel) -> tuple[float, float, float]:
        """A kernel that nothing was learned about: what to expect, and between what, milliseconds."""
        work = self.work_ms(kernel)
        low, typical, high = (self.launch_ms + work * r for r in (self.low, self.typical, self.high))
        return typical, low, high

    def waits(self, kernel: Kernel, latency_ms: float) -> tuple[float, float, float]:
        """What a kernel waits for: shares of arithmetic, memory and its launch, which add up to 1."""
        launch = min(self.launch_ms / latency_ms, 1.0) if latency_ms > 0.0 else 1.0
        compute, moved = kernel.flops / self.flops_per_s, kernel.bytes_moved / self.bytes_per_s
        memory = (1.0 - launch) * (moved / (compute + moved) if compute + moved else 1.0)
        return 1.0 - launch - memory, memory, launch

    def to_dict(self) -> dict[str, Any]:
        """The bound in JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Roofline:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            found = cls(**{name: float(value) for name, value in record.items()})
        except (TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"a roofline cannot be read: {error!r}") from error
        if not all(math.isfinite(value) and value > 0.0 for value in asdict(found).values()):
            raise FileFormatError("a roofline cannot be read: every number of it must be above 0")
        return found
