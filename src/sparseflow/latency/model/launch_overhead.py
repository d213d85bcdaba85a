"""Host time to issue a kernel: measured, or learned from measured kernels."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import PositiveFloat

from sparseflow.core.costmodel.trees import FOREST
from sparseflow.errors import InputError
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.model.kernel_regressor import KernelRegressor

MIN_MS = 1e-4
"""Lower bound for one launch."""


@dataclass(frozen=True, kw_only=True)
class LaunchOverheadModel:
    """Host times in milliseconds; create one with `LaunchOverheadModel.fit`.

    Attributes:
        measured_ms: Kernel id -> measured host time.
        regressor: Random forest over kernels.
        default_ms: Median over operators, for an operator that was not measured.
    """

    measured_ms: Mapping[str, PositiveFloat]
    regressor: KernelRegressor
    default_ms: PositiveFloat

    @classmethod
    def fit(
        cls, kernels: Sequence[KernelSpec], host_ms: Sequence[float], *, seed: int = 0
    ) -> LaunchOverheadModel:
        """Fit to kernels that were measured in a stream.

        Args:
            kernels: Measured kernels.
            host_ms: Host time to issue each kernel.
            seed: Random seed of the trees.

        Raises:
            InputError: There are no kernels.
            MissingExtraError: XGBoost is missing.
        """
        if not kernels or len(kernels) != len(host_ms):
            raise InputError(
                f"expected at least one kernel and one time per kernel, got {len(kernels)} kernels and "
                f"{len(host_ms)} times"
            )
        clipped_ms = [max(ms, MIN_MS) for ms in host_ms]
        by_operator: dict[str, list[float]] = {}
        for kernel, ms in zip(kernels, clipped_ms, strict=True):
            by_operator.setdefault(kernel.node_op, []).append(ms)
        return cls(
            measured_ms={kernel.id: ms for kernel, ms in zip(kernels, clipped_ms, strict=True)},
            regressor=KernelRegressor.fit(kernels, clipped_ms, FOREST, seed=seed),
            default_ms=statistics.median(map(statistics.median, by_operator.values())),
        )

    def predict(self, kernels: Iterable[KernelSpec]) -> dict[str, float]:
        """Return kernel id -> host time in milliseconds."""
        listed = list(kernels)
        overheads_ms = {k.id: self.measured_ms.get(k.id, self.default_ms) for k in listed}
        learned = [k for k in listed if k.id not in self.measured_ms and self.regressor.supports(k)]
        predicted = self.regressor.predict(learned)
        return overheads_ms | {k.id: ms for k, ms in zip(learned, predicted, strict=True)}
