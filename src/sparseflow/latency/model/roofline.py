"""Roofline model: a lower bound on kernel latency, fitted to measured kernels.

The bound is the launch overhead plus the longer of compute time and memory time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import PositiveFloat

from sparseflow.core.metrics import quantile
from sparseflow.errors import InputError
from sparseflow.latency.graph.kernels import KernelSpec

_PEAK_QUANTILE = 0.995
"""Quantile used as the peak rate; the maximum may be a measurement error."""

_MIN_LAUNCHES = 4.0
"""Minimum latency, in launch overheads, of kernels that determine rates; launches dominate shorter ones."""

UNMEASURED_LOW, UNMEASURED_HIGH = 0.1, 100.0
"""Interval of the latency over its estimate for an operator that was never measured.

On a CPU 52 of 55 operators of ONNX were inside, and the largest ratios were 169 to 765.
"""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Roofline of a device.

    Attributes:
        launch_ms: Latency of a kernel without work, including the session's overhead.
        flops_per_s: Peak rate of floating-point operations.
        integer_ops_per_s: Peak rate of operations of kernels with tensors of 8 bits.
        bytes_per_s: Peak rate of bytes read and written.
        typical: Median ratio of latency without launch to the bound without launch.
        low: 5th percentile of that ratio.
        high: 95th percentile of that ratio.
    """

    launch_ms: PositiveFloat
    flops_per_s: PositiveFloat
    integer_ops_per_s: PositiveFloat
    bytes_per_s: PositiveFloat
    typical: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat

    @classmethod
    def fit(cls, kernels: Sequence[KernelSpec], latency_ms: Sequence[float]) -> Roofline:
        """Fit the roofline to kernels and their idle latencies.

        Raises:
            InputError: There are no kernels.
        """
        if not kernels or len(kernels) != len(latency_ms):
            raise InputError(
                f"{len(kernels)} kernels and {len(latency_ms)} latencies: some of both are needed"
            )
        launch = quantile(list(latency_ms), 0.01)
        seconds = [max(value - launch, 1e-3 * launch) / 1e3 for value in latency_ms]
        clear = [n for n, value in enumerate(latency_ms) if value > _MIN_LAUNCHES * launch]
        clear = clear or list(range(len(kernels)))
        integer = [n for n, kernel in enumerate(kernels) if is_integer(kernel)]
        floating = [n for n, kernel in enumerate(kernels) if not is_integer(kernel)]

        def fit_rate(work: Sequence[float], indices: Sequence[int]) -> float:
            # Shorter kernels, with the launch counted as work, give a lower bound on the rate.
            short = [1e3 * work[n] / latency_ms[n] for n in indices]
            rates = [work[n] / seconds[n] for n in clear if n in set(indices)]
            return max(1.0, quantile(short, _PEAK_QUANTILE), quantile(rates or [0.0], _PEAK_QUANTILE))

        flops = [kernel.flops for kernel in kernels]
        moved = [kernel.bytes_moved for kernel in kernels]
        bound = cls(
            launch_ms=launch,
            flops_per_s=fit_rate(flops, floating or integer),
            integer_ops_per_s=fit_rate(flops, integer or floating),
            bytes_per_s=fit_rate(moved, range(len(kernels))),
            typical=1.0,
            low=1.0,
            high=1.0,
        )
        work_ms = {n: bound.compute_work_ms(kernels[n]) for n in clear}
        ratios = [1e3 * seconds[n] / ms for n, ms in work_ms.items() if ms]
        if not ratios:
            return bound
        low, typical, high = (quantile(ratios, q) for q in (0.05, 0.5, 0.95))
        return replace(bound, typical=typical, low=low, high=high)

    def compute_work_ms(self, kernel: KernelSpec) -> float:
        return 1e3 * max(self._compute_arithmetic_s(kernel), kernel.bytes_moved / self.bytes_per_s)

    def compute_bound_ms(self, kernel: KernelSpec) -> float:
        """Return the lower bound on a kernel's latency."""
        return self.launch_ms + self.compute_work_ms(kernel)

    def estimate_ms(self, kernel: KernelSpec) -> tuple[float, float, float]:
        """Return typical latency, low and high end of a kernel whose operator was never measured.

        If its work is known, its latency is within `UNMEASURED_LOW` and `UNMEASURED_HIGH` times the typical
        one. Otherwise nothing bounds it: the ends are 0 and infinity.
        """
        work = self.compute_work_ms(kernel)
        low, typical, high = (self.launch_ms + work * r for r in (self.low, self.typical, self.high))
        if not kernel.flops_known:
            return typical, 0.0, math.inf
        return typical, min(low, typical * UNMEASURED_LOW), max(high, typical * UNMEASURED_HIGH)

    def compute_bottleneck_shares(self, kernel: KernelSpec, latency_ms: float) -> tuple[float, float, float]:
        """Return the shares of arithmetic, memory and launch in a kernel's latency; they sum to 1."""
        launch = min(self.launch_ms / latency_ms, 1.0) if latency_ms > 0.0 else 1.0
        compute, moved = self._compute_arithmetic_s(kernel), kernel.bytes_moved / self.bytes_per_s
        memory = (1.0 - launch) * (moved / (compute + moved) if compute + moved else 1.0)
        return 1.0 - launch - memory, memory, launch

    def _compute_arithmetic_s(self, kernel: KernelSpec) -> float:
        return kernel.flops / (self.integer_ops_per_s if is_integer(kernel) else self.flops_per_s)


def is_integer(kernel: KernelSpec) -> bool:
    """Return whether a kernel reads tensors of 8 bits; scales and zero points do not count."""
    return any(t.dtype in ("int8", "uint8") and len(t.shape) > 1 for t in kernel.inputs)
