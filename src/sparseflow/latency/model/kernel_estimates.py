"""Isolated idle latency of any kernel, with an interval and its source.

The latency is measured, learned for the operator, learned for a related operator, or a guess by roofline. The
latency of If, Loop and Scan is the sum over their subgraphs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sparseflow.core.config import StrictModel
from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.latency.graph.kernels import Body, KernelSpec
from sparseflow.latency.model.composition import MIN_SHARE, VIEW_OPS
from sparseflow.latency.model.kernel_regressor import LEARNED, MEASURED, RELATED, ROOFLINE, KernelRegressor

COMPOSED = "composed"
"""Source of the latency of If, Loop and Scan: their subgraphs."""

MIN_FREQUENT_KERNELS, MIN_RARE_KERNELS = 20, 4
"""Numbers of learned kernels of an operator from which its errors are those of frequent and of rare ones."""

WIDENING = 3.0
"""Factor by which the interval of rare operators widens for still rarer ones, and for related operators."""

COMPOSED_FACTOR = 2.0
"""Factor by which the interval of subgraphs widens."""

TRIP_LAUNCHES = 0.3
"""Time of one run of a subgraph without its kernels, over the launch of an isolated kernel.

Inferred from the latency of a Scan of a trivial kernel on a CPU; contains the views of the subgraph.
"""


class KernelIntervals(StrictModel):
    """Intervals of learned kernels.

    Attributes:
        frequent: Interval for operators of which at least `MIN_FREQUENT_KERNELS` kernels were measured.
        rare: Interval for the others.
    """

    frequent: ConformalInterval
    rare: ConformalInterval

    def compute_bounds(self, ms: float, num_kernels: int) -> tuple[float, float]:
        """Return both ends of the interval of a latency, whose operator has a number of measured kernels."""
        if num_kernels >= MIN_FREQUENT_KERNELS:
            return self.frequent.bounds(ms)
        low_ms, high_ms = self.rare.bounds(ms)
        factor = 1.0 if num_kernels >= MIN_RARE_KERNELS else WIDENING
        return low_ms / factor, high_ms * factor


@dataclass(frozen=True, kw_only=True)
class KernelEstimate:
    """Isolated idle latency of a kernel.

    Attributes:
        ms: Latency, milliseconds.
        low_ms: Lower end of the interval.
        high_ms: Upper end of the interval; infinite if the work of an operator is unknown.
        source: `"measured"`, `"learned"`, `"related"`, `"roofline"` or `"composed"`.
        guess_share: Share of `ms` by roofline.
        guessed_ops: Canonical names of the kernels by roofline, those of subgraphs included.
        unbounded_ops: Those of them whose work is unknown.
    """

    ms: float
    low_ms: float
    high_ms: float
    source: str
    guess_share: float = 0.0
    guessed_ops: frozenset[str] = frozenset()
    unbounded_ops: frozenset[str] = frozenset()


def estimate_kernels(
    kernels: Iterable[KernelSpec],
    measured_ms: Mapping[str, float],
    regressor: KernelRegressor,
    intervals: KernelIntervals,
) -> dict[str, KernelEstimate]:
    """Return kernel id -> estimate.

    Args:
        kernels: Kernels of a graph.
        measured_ms: Kernel id -> measured latency.
        regressor: Regressor of kernels.
        intervals: Intervals of learned kernels.
    """
    all_kernels = {kernel.id: kernel for kernel in _iter_nested(kernels)}
    isolated_ms = regressor.estimate_idle_ms(all_kernels.values(), measured_ms)
    estimates: dict[str, KernelEstimate] = {}
    # Kernels of subgraphs come first.
    for kernel in all_kernels.values():
        source = regressor.get_source(kernel, measured_ms)
        if kernel.bodies and source != MEASURED:
            estimates[kernel.id] = _compose(kernel, estimates, regressor.roofline.launch_ms)
            continue
        ms = isolated_ms[kernel.id]
        low_ms = high_ms = ms
        if source in (LEARNED, RELATED):
            num_kernels = regressor.count_similar(kernel) if source == LEARNED else 0
            low_ms, high_ms = intervals.compute_bounds(ms, num_kernels)
        elif source == ROOFLINE:
            _, low_ms, high_ms = regressor.roofline.estimate_ms(kernel)
        estimates[kernel.id] = KernelEstimate(
            ms=ms,
            low_ms=low_ms,
            high_ms=high_ms,
            source=source,
            guess_share=float(source == ROOFLINE),
            guessed_ops=frozenset({kernel.op} if source == ROOFLINE else ()),
            unbounded_ops=frozenset({kernel.op} if source == ROOFLINE and not kernel.flops_known else ()),
        )
    return estimates


def _iter_nested(kernels: Iterable[KernelSpec]) -> Iterable[KernelSpec]:
    """Yield the kernels and those of their subgraphs, which come first."""
    for kernel in kernels:
        for body in kernel.bodies:
            yield from _iter_nested(body.kernels)
        yield kernel


def _compose(
    kernel: KernelSpec,
    estimates: Mapping[str, KernelEstimate],
    launch_ms: float,
) -> KernelEstimate:
    """Compose the latency of If, Loop or Scan from the kernels of its subgraphs."""
    totals = {body.name: _sum_body(body, estimates, launch_ms) for body in kernel.bodies}
    ms = launch_ms + sum(body.trips * totals[body.name][0] for body in kernel.bodies)
    guess_ms = sum(body.trips * totals[body.name][3] for body in kernel.bodies)
    if kernel.node_op == "If" and 0 not in kernel.constants:
        # Either branch can run.
        low_ms = min(low for _, low, _, _ in totals.values())
        high_ms = max(high for _, _, high, _ in totals.values())
    else:
        low_ms = sum(body.trips * totals[body.name][1] for body in kernel.bodies)
        # The product of zero trips and infinity is not a number.
        high_ms = sum(body.trips * totals[body.name][2] for body in kernel.bodies if body.trips)
    inner = [estimates[k.id] for b in kernel.bodies for k in b.kernels if k.node_op not in VIEW_OPS]
    return KernelEstimate(
        ms=ms,
        low_ms=(launch_ms + low_ms) / COMPOSED_FACTOR,
        high_ms=(launch_ms + high_ms) * COMPOSED_FACTOR,
        source=COMPOSED,
        guess_share=guess_ms / ms,
        guessed_ops=frozenset().union(*(estimate.guessed_ops for estimate in inner)),
        unbounded_ops=frozenset().union(*(estimate.unbounded_ops for estimate in inner)),
    )


def _sum_body(
    body: Body, estimates: Mapping[str, KernelEstimate], launch_ms: float
) -> tuple[float, float, float, float]:
    """Return latency, both ends of its interval and the part by roofline of one run of a subgraph."""
    total_ms = low_ms = high_ms = TRIP_LAUNCHES * launch_ms
    guess_ms = 0.0
    for kernel in body.kernels:
        if kernel.node_op in VIEW_OPS:
            continue
        estimate = estimates[kernel.id]
        # Kernels of a subgraph need no call of their own.
        ms = max(estimate.ms - launch_ms, MIN_SHARE * estimate.ms)
        ratio = ms / estimate.ms if estimate.ms else 1.0
        total_ms += ms
        low_ms += estimate.low_ms * ratio
        high_ms += estimate.high_ms * ratio
        guess_ms += estimate.guess_share * ms
    return total_ms, low_ms, high_ms, guess_ms
