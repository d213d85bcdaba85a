"""Isolated idle latency of any kernel, with an interval and its source.

The latency is measured, learned for the operator, learned for a related operator, or a guess by roofline. The
latency of If, Loop and Scan is the sum over their subgraphs, whose kernels have the costs of a graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sparseflow.core.costmodel.intervals import ConformalInterval
from sparseflow.latency.graph.kernels import Body, KernelSpec
from sparseflow.latency.model.composition import VIEW_OPS, CompositionModel
from sparseflow.latency.model.kernel_regressor import LEARNED, MEASURED, RELATED, ROOFLINE, KernelRegressor

COMPOSED = "composed"
"""Source of the latency of If, Loop and Scan: their subgraphs."""

RELATED_FACTOR = 3.0
"""Factor by which the interval of a learned kernel widens if only a related operator was measured."""

COMPOSED_FACTOR = 2.0
"""Factor by which the interval of subgraphs widens, since their costs are those of a graph."""

TRIP_LAUNCHES = 0.3
"""Time of one run of a subgraph without its kernels, over the launch of an isolated kernel.

Measured on a CPU with subgraphs of one trivial kernel; contains the views of the subgraph.
"""


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
    interval: ConformalInterval,
    composition: CompositionModel,
) -> dict[str, KernelEstimate]:
    """Return kernel id -> estimate.

    Args:
        kernels: Kernels of a graph.
        measured_ms: Kernel id -> measured latency.
        regressor: Regressor of kernels.
        interval: Interval of a learned kernel.
        composition: Costs of kernels inside a graph.
    """
    all_kernels = {kernel.id: kernel for kernel in _iter_nested(kernels)}
    isolated_ms = regressor.estimate_idle_ms(all_kernels.values(), measured_ms)
    estimates: dict[str, KernelEstimate] = {}
    # Kernels of subgraphs come first.
    for kernel in all_kernels.values():
        source = regressor.get_source(kernel, measured_ms)
        if kernel.bodies and source != MEASURED:
            estimates[kernel.id] = _compose(kernel, estimates, regressor.roofline.launch_ms, composition)
            continue
        ms = isolated_ms[kernel.id]
        low_ms = high_ms = ms
        if source in (LEARNED, RELATED):
            factor = RELATED_FACTOR if source == RELATED else 1.0
            low_ms, high_ms = interval.bounds(ms)
            low_ms, high_ms = low_ms / factor, high_ms * factor
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
    composition: CompositionModel,
) -> KernelEstimate:
    """Compose the latency of If, Loop or Scan from the kernels of its subgraphs."""
    totals = {body.name: _sum_body(body, estimates, launch_ms, composition) for body in kernel.bodies}
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
    inner = [estimates[k.id] for body in kernel.bodies for k in body.kernels]
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
    body: Body, estimates: Mapping[str, KernelEstimate], launch_ms: float, composition: CompositionModel
) -> tuple[float, float, float, float]:
    """Return latency, both ends of its interval and the part by roofline of one run of a subgraph."""
    total_ms = low_ms = high_ms = TRIP_LAUNCHES * launch_ms
    guess_ms = 0.0
    for kernel in body.kernels:
        if kernel.node_op in VIEW_OPS:
            continue
        estimate = estimates[kernel.id]
        ms = composition.predict_kernel_ms(kernel, estimate.ms)
        ratio = ms / estimate.ms if estimate.ms else 1.0
        total_ms += ms
        low_ms += estimate.low_ms * ratio
        high_ms += estimate.high_ms * ratio
        guess_ms += estimate.guess_share * ms
    return total_ms, low_ms, high_ms, guess_ms
