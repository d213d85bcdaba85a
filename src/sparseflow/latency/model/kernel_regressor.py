"""Regression of the idle latency of kernels.

Three regressors share the features; each is a tree ensemble on a logarithm, so that errors are relative.
`ratio` learns the ratio of a kernel's latency to the device's roofline and never predicts below it; `xgboost`
and `random_forest` learn the latency itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import NonNegativeFloat, PositiveInt

from sparseflow.core.artifact import DictField
from sparseflow.core.checks import check_one_of
from sparseflow.core.costmodel.trees import BOOSTED, FOREST, TreeEnsemble
from sparseflow.errors import InputError
from sparseflow.latency.graph.kernels import KernelSpec, get_main_operator
from sparseflow.latency.model.features import OP, OPERATOR, FeatureEncoder, make_features
from sparseflow.latency.model.roofline import Roofline

MEASURED, LEARNED, RELATED, ROOFLINE = "measured", "learned", "related", "roofline"
"""Source of an idle latency: the kernel was measured; its operator was measured and has a rule for its work;
only its main operator was measured, in another fusion, layout or type; or none of them.
"""

_MAX_EXTRAPOLATION = 2.0
"""Largest work of a kernel over that of the learned ones at which their errors apply to it."""

RATIO = "ratio"
KINDS = (RATIO, BOOSTED, FOREST)


def get_variant(kernel: KernelSpec) -> str:
    """Return the canonical name, domain, operator, type and rank of a kernel, whose errors are alike."""
    rank = len(kernel.inputs[0].shape) if kernel.inputs else 0
    return f"{kernel.op}:{make_features(kernel)[OPERATOR]}:{rank}"


@dataclass(frozen=True, kw_only=True)
class OperatorRange:
    """Learned kernels of a variant of an operator.

    Attributes:
        kernels: Number of kernels.
        flops: Most operations of one of them.
        bytes_moved: Most bytes of one of them.
    """

    kernels: PositiveInt
    flops: NonNegativeFloat
    bytes_moved: NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class KernelRegressor:
    """A fitted regressor; create one with `KernelRegressor.fit`.

    Attributes:
        kind: One of `KINDS`.
        roofline: Roofline of the device.
        encoder: Encoder of the features.
        trees: Tree ensemble.
        free_ops: Operators without device work, which are not learned.
        ranges: Variant of an operator (see `get_variant`) -> range of learned kernels.
    """

    kind: str
    roofline: Roofline
    encoder: FeatureEncoder
    trees: Annotated[TreeEnsemble, DictField()]
    free_ops: tuple[str, ...]
    ranges: Mapping[str, OperatorRange]

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
        return cls(
            kind=kind,
            roofline=bound,
            encoder=encoder,
            trees=trees,
            free_ops=tuple(sorted(free_ops)),
            ranges=_collect_ranges(kernels),
        )

    def predict(self, kernels: Sequence[KernelSpec]) -> list[float]:
        """Predict the idle latency of each kernel in milliseconds.

        Its operator must be supported, or a related one.
        """
        import numpy as np

        if not kernels:
            return []
        rows = [make_features(kernel) for kernel in kernels]
        for kernel, row in zip(kernels, rows, strict=True):
            if not self.supports(kernel):
                row |= self._find_related_categories(kernel) or {}
        latencies_ms = np.exp(self.trees.predict(self.encoder.transform(rows)).astype(float))
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

    def count_similar(self, kernel: KernelSpec) -> int:
        """Return how many kernels of its variant were learned; 0 for a kernel of far more work than they."""
        known = self.ranges.get(get_variant(kernel))
        if (
            known is None
            or kernel.flops > _MAX_EXTRAPOLATION * known.flops
            or kernel.bytes_moved > _MAX_EXTRAPOLATION * known.bytes_moved
        ):
            return 0
        return known.kernels

    def get_source(self, kernel: KernelSpec, measured_ms: Mapping[str, float]) -> str:
        """Return the source of an idle latency: `MEASURED`, `LEARNED`, `RELATED` or `ROOFLINE`."""
        if kernel.node_op in self.free_ops or kernel.id in measured_ms:
            return MEASURED
        if self.supports(kernel):
            return LEARNED
        return ROOFLINE if self._find_related_categories(kernel) is None else RELATED

    def _find_related_categories(self, kernel: KernelSpec) -> dict[str, str] | None:
        """Return the learned categories that are closest to a kernel's; None without its main operator."""
        ops = self.encoder.categories.get(OP, ())
        operators = self.encoder.categories.get(OPERATOR, ())
        main = get_main_operator(kernel.op)
        related_ops = [op for op in ops if get_main_operator(op) == main]
        related_operators = [o for o in operators if get_main_operator(o.split(":")[1]) == main]
        if not kernel.flops_known or not related_ops or not related_operators:
            return None
        parts = set(kernel.op.split("_"))
        domain, node_op, dtype = str(make_features(kernel)[OPERATOR]).split(":")

        def count_equal_parts(op: str) -> tuple[int, int]:
            return len(parts.intersection(op.split("_"))), -len(op)

        def count_equal_fields(operator: str) -> tuple[bool, bool, bool]:
            other_domain, other_op, other_dtype = operator.split(":")
            return dtype == other_dtype, domain == other_domain, node_op == other_op

        return {
            OP: max(related_ops, key=count_equal_parts),
            OPERATOR: max(related_operators, key=count_equal_fields),
        }

    def estimate_idle_ms(
        self, kernels: Iterable[KernelSpec], measured_ms: Mapping[str, float]
    ) -> dict[str, float]:
        """Return kernel id -> idle latency of the isolated kernel, of the best source."""
        sources = {kernel: self.get_source(kernel, measured_ms) for kernel in kernels}
        learned = [kernel for kernel, source in sources.items() if source in (LEARNED, RELATED)]
        learned_ms = dict(zip(learned, self.predict(learned), strict=True))
        estimates: dict[str, float] = {}
        for kernel, source in sources.items():
            if source == MEASURED:
                estimates[kernel.id] = 0.0 if kernel.node_op in self.free_ops else measured_ms[kernel.id]
            else:
                estimates[kernel.id] = learned_ms.get(kernel) or self.roofline.estimate_ms(kernel)[0]
        return estimates


def _collect_ranges(kernels: Iterable[KernelSpec]) -> dict[str, OperatorRange]:
    by_variant: dict[str, list[KernelSpec]] = {}
    for kernel in kernels:
        by_variant.setdefault(get_variant(kernel), []).append(kernel)
    return {
        variant: OperatorRange(
            kernels=len(members),
            flops=max(kernel.flops for kernel in members),
            bytes_moved=max(kernel.bytes_moved for kernel in members),
        )
        for variant, members in by_variant.items()
    }
