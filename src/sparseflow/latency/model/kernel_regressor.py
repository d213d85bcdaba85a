"""Regression of the idle latency of kernels.

Three regressors share the features; each is a tree ensemble on a logarithm, so that errors are relative.
`ratio` learns the ratio of a kernel's latency to the device's roofline and never predicts below it; `xgboost`
and `random_forest` learn the latency itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
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
"""Source of an idle latency: the kernel was measured, its operator was measured and has a rule for its work,
or neither.
"""

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
        """Return whether kernels with this operator were learned and its work is known."""
        row = make_features(kernel)
        return kernel.flops_known and all(
            row[name] in values for name, values in self.encoder.categories.items()
        )

    def get_source(self, kernel: KernelSpec, measured_ms: Mapping[str, float]) -> str:
        """Return the source of a kernel's idle latency: `MEASURED`, `LEARNED` or `ROOFLINE`."""
        if kernel.node_op in self.free_ops or kernel.id in measured_ms:
            return MEASURED
        return LEARNED if self.supports(kernel) else ROOFLINE

    def estimate_idle_ms(
        self, kernels: Iterable[KernelSpec], measured_ms: Mapping[str, float]
    ) -> dict[str, float]:
        """Return kernel id -> idle latency of the isolated kernel: measured, learned or by roofline."""
        sources = {kernel: self.get_source(kernel, measured_ms) for kernel in kernels}
        learned = [kernel for kernel, source in sources.items() if source == LEARNED]
        learned_ms = dict(zip(learned, self.predict(learned), strict=True))
        estimates: dict[str, float] = {}
        for kernel, source in sources.items():
            if source == MEASURED:
                estimates[kernel.id] = 0.0 if kernel.node_op in self.free_ops else measured_ms[kernel.id]
            else:
                estimates[kernel.id] = learned_ms.get(kernel) or self.roofline.estimate_ms(kernel)[0]
        return estimates
