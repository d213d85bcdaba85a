"""Regression of the idle latency of kernels.

Three regressors share the features; each is a tree ensemble on a logarithm, so that errors are relative.
`ratio` learns the ratio of a kernel's latency to the device's roofline and never predicts below it; `xgboost`
and `random_forest` learn the latency itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from sparseflow.core.artifact import DictField
from sparseflow.core.checks import check_one_of
from sparseflow.core.costmodel.trees import BOOSTED, FOREST, TreeEnsemble
from sparseflow.errors import InputError
from sparseflow.latency.graph.kernels import KernelSpec
from sparseflow.latency.model.features import FeatureEncoder, make_features
from sparseflow.latency.model.roofline import Roofline

MEASURED, LEARNED, ROOFLINE = "measured", "learned", "roofline"
"""Source of an idle latency: the kernel was measured, its operator was measured, or neither."""

RATIO = "ratio"
KINDS = (RATIO, BOOSTED, FOREST)


@dataclass(frozen=True, kw_only=True)
class KernelRegressor:
    """A fitted regressor; create one with `KernelRegressor.fit`.

    Attributes:
        kind: One of `KINDS`.
        roofline: Roofline of the device.
        encoder: Encoder of the features.
        trees: Tree ensemble.
        free_ops: Operators without device work, which are not learned.
    """

    kind: str
    roofline: Roofline
    encoder: FeatureEncoder
    trees: Annotated[TreeEnsemble, DictField()]
    free_ops: tuple[str, ...]

    def __post_init__(self) -> None:
        check_one_of(KINDS, kind=self.kind)
        if self.trees.columns != len(self.encoder.columns):
            raise InputError(
                f"the trees read {self.trees.columns} features, the encoder writes "
                f"{len(self.encoder.columns)}"
            )

    @classmethod
    def fit(
        cls,
        kernels: Sequence[KernelSpec],
        latency_ms: Sequence[float],
        kind: str = RATIO,
        *,
        roofline: Roofline | None = None,
        free_ops: Collection[str] = (),
        seed: int = 0,
    ) -> KernelRegressor:
        """Fit a regressor to kernels and their idle latencies.

        Args:
            kernels: Measured kernels.
            latency_ms: Latency of each kernel.
            kind: One of `KINDS`.
            roofline: Roofline of the device; by default fitted to these kernels.
            free_ops: Operators without device work; their kernels are omitted.
            seed: Random seed of the trees.

        Raises:
            InputError: There are no kernels, or the kind is unknown.
            MissingExtraError: XGBoost is missing.
        """
        import numpy as np

        check_one_of(KINDS, kind=kind)
        if len(kernels) != len(latency_ms):
            raise InputError(
                f"expected one latency per kernel, got {len(kernels)} kernels and {len(latency_ms)} latencies"
            )
        device_kernels = [n for n, kernel in enumerate(kernels) if kernel.node_op not in free_ops]
        kernels, latency_ms = [kernels[n] for n in device_kernels], [latency_ms[n] for n in device_kernels]
        bound = roofline or Roofline.fit(kernels, latency_ms)
        rows = [make_features(kernel) for kernel in kernels]
        encoder = FeatureEncoder.fit(rows)
        target = np.log(np.asarray(latency_ms, dtype=np.float64))
        if kind == RATIO:
            target -= np.log([bound.compute_bound_ms(kernel) for kernel in kernels])
        trees = TreeEnsemble.fit(
            encoder.transform(rows), target, FOREST if kind == FOREST else BOOSTED, seed=seed
        )
        return cls(kind=kind, roofline=bound, encoder=encoder, trees=trees, free_ops=tuple(sorted(free_ops)))

    def predict(self, kernels: Sequence[KernelSpec]) -> list[float]:
        """Predict the idle latency of each kernel in milliseconds; its operator must be supported."""
        import numpy as np

        if not kernels:
            return []
        latencies_ms = np.exp(
            self.trees.predict(self.encoder.transform([make_features(k) for k in kernels])).astype(float)
        )
        if self.kind == RATIO:
            latencies_ms = [
                max(ratio, 1.0) * self.roofline.compute_bound_ms(k)
                for k, ratio in zip(kernels, latencies_ms, strict=True)
            ]
        return [float(value) for value in latencies_ms]

    def supports(self, kernel: KernelSpec) -> bool:
        """Return whether kernels with this operator were learned."""
        row = make_features(kernel)
        return all(row[name] in values for name, values in self.encoder.categories.items())

    def estimate_idle_ms(
        self, kernels: Mapping[str, KernelSpec], measured_ms: Mapping[str, float]
    ) -> dict[str, tuple[float, str]]:
        """Return kernel id -> (idle latency of the isolated kernel in milliseconds, source)."""
        estimates = {name: (0.0, MEASURED) for name, k in kernels.items() if k.node_op in self.free_ops}
        known = [name for name in kernels if name in measured_ms and name not in estimates]
        estimates |= {name: (measured_ms[name], MEASURED) for name in known}
        remaining = {name: kernel for name, kernel in kernels.items() if name not in estimates}
        learned = [name for name, kernel in remaining.items() if self.supports(kernel)]
        predicted = self.predict([remaining[name] for name in learned])
        estimates |= {name: (ms, LEARNED) for name, ms in zip(learned, predicted, strict=True)}
        for name in remaining.keys() - estimates.keys():
            estimates[name] = (self.roofline.estimate_ms(remaining[name])[0], ROOFLINE)
        return estimates
