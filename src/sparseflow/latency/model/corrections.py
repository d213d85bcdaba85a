"""Corrections of a kernel regressor by a few measurements of another time or machine.

The ratio of measured to predicted latency is modelled on a logarithmic scale as a common part and one part
per class of kernels. A network is the mean of its classes, weighted by their share of its latency. All parts
are posterior means with a normal prior around no correction (ridge regression), so that a class with few or
contradictory measurements is corrected little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import PositiveFloat

from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.model.roofline import Roofline

LAUNCH, DEPTHWISE, ELEMENTWISE = "launch", "depthwise", "elementwise"

_MAX_LAUNCH_SHARE = 0.5
"""Share of the launch in a kernel's bound above which its class is `LAUNCH`, whatever its operator."""

_CLASS_OPERATORS: Mapping[str, tuple[str, ...]] = {
    "convolution": ("Conv",),
    "product": ("Gemm", "MatMul", "Attention", "MultiHeadAttention"),
    "pooling": ("MaxPool", "AveragePool", "Global", "Reduce", "Arg"),
    "normalization": ("Softmax", "LogSoftmax", "LayerNorm", "RMSNorm", "InstanceNorm", "GroupNorm", "Batch"),
    "movement": (
        "Transpose", "Concat", "Split", "Slice", "Gather", "Pad", "Expand", "Tile", "Cast", "Reorder",
        "Resize", "Where",
    ),
}  # fmt: skip
"""Class -> prefixes of its operators; other operators are `ELEMENTWISE`."""

_COMMON_DEVIATION, _CLASS_DEVIATION, _KERNEL_DEVIATION, _NETWORK_DEVIATION = 1.0, 0.3, 0.3, 0.1
"""Standard deviations of log ratios: of the common part, of a class around it, and of a kernel or network
around that.
"""


_MAX_DEVIATIONS = 3.0
"""Largest distance of a sample from its prediction that counts, in its standard deviations."""

_ITERATIONS = 10


@dataclass(frozen=True, kw_only=True)
class CorrectionSample:
    """One measured kernel or network.

    Attributes:
        class_ms: Class -> predicted latency of its kernels, without corrections.
        other_ms: Predicted latency that no correction changes.
        measured_ms: Measured latency.
        is_network: Whether it is a network.
    """

    class_ms: Mapping[str, float]
    other_ms: float = 0.0
    measured_ms: float
    is_network: bool

    def predict_ms(self, corrections: KernelCorrections) -> float:
        """Return the predicted latency with corrections."""
        return self.other_ms + sum(ms * corrections.get_factor(name) for name, ms in self.class_ms.items())


@dataclass(frozen=True, kw_only=True)
class KernelCorrections:
    """Factors of the latencies of kernels; create them with `KernelCorrections.fit`.

    Attributes:
        common: Factor of classes that were not measured.
        by_class: Class -> factor.
        samples: Number of measured kernels and networks.
    """

    common: PositiveFloat
    by_class: Mapping[str, PositiveFloat]
    samples: int

    @classmethod
    def fit(cls, samples: Sequence[CorrectionSample]) -> KernelCorrections:
        """Fit factors to measured kernels and networks; without any, there are no corrections."""
        import numpy as np

        names = sorted({name for sample in samples for name in sample.class_ms})
        corrections = NO_CORRECTIONS
        deviations = np.array([_NETWORK_DEVIATION if s.is_network else _KERNEL_DEVIATION for s in samples])
        prior = np.diag([_COMMON_DEVIATION**-2, *[_CLASS_DEVIATION**-2] * len(names)])
        # A network's latency is a sum, so that its logarithm is linear only near the solution.
        for iteration in range(_ITERATIONS if samples else 0):
            rows, residuals, offsets = [], [], []
            for sample in samples:
                predicted_ms = sample.predict_ms(corrections)
                shares = [
                    sample.class_ms.get(name, 0.0) * corrections.get_factor(name) / predicted_ms
                    for name in names
                ]
                logs = [math.log(corrections.get_factor(name)) for name in names]
                rows.append([sum(shares), *shares])
                residuals.append(math.log(sample.measured_ms / predicted_ms))
                offsets.append(sum(map(float.__mul__, shares, logs)))
            # A single outlier, such as a kernel with another algorithm, must not determine its class.
            limits = _MAX_DEVIATIONS * deviations if iteration else np.full(len(samples), np.inf)
            targets = np.clip(residuals, -limits, limits) + np.array(offsets)
            weighted = np.array(rows).T / deviations**2
            parts = np.linalg.solve(weighted @ np.array(rows) + prior, weighted @ targets).tolist()
            corrections = cls(
                common=math.exp(parts[0]),
                by_class={name: math.exp(parts[0] + p) for name, p in zip(names, parts[1:], strict=True)},
                samples=len(samples),
            )
        return corrections

    def get_factor(self, class_name: str) -> float:
        """Return the factor of a class."""
        return self.by_class.get(class_name, self.common)


NO_CORRECTIONS = KernelCorrections(common=1.0, by_class={}, samples=0)


def get_class(kernel: KernelSpec, roofline: Roofline) -> str:
    """Return the class of a kernel, whose latencies have a common ratio to a prediction."""
    if roofline.launch_ms > _MAX_LAUNCH_SHARE * roofline.compute_bound_ms(kernel):
        return LAUNCH
    if "Conv" in kernel.node_op and int(kernel.attributes.get("group", 1)) > 1:
        return DEPTHWISE
    operators = kernel.op.split("_")
    for name, prefixes in _CLASS_OPERATORS.items():
        if any(operator.startswith(prefixes) for operator in operators):
            return name
    return ELEMENTWISE
