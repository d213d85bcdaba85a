"""What a kernel takes at rest, learned from kernels that were measured.

Three regressors over the same features, each an ensemble of trees on a logarithm, so that errors count as
shares: `ratio` learns how far above the device's roofline a kernel stays and never predicts below it;
`xgboost` and `random_forest` learn the latency itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseflow.core.costmodel.feature_encoder import FeatureEncoder
from sparseflow.core.costmodel.trees import BOOSTED, FOREST, TreeEnsemble
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.features import features
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.roofline import Roofline

MEASURED, LEARNED, ROOFLINE = "measured", "learned", "roofline"
"""Where a kernel's latency at rest is from: it was measured itself, its operator was, or nothing like it."""

RATIO = "ratio"
KINDS = (RATIO, BOOSTED, FOREST)


@dataclass(frozen=True, kw_only=True)
class KernelModel:
    """A fitted regressor. Make one with `KernelModel.fit`.

    Attributes:
        kind: One of `KINDS`.
        roofline: The device's bound.
        space: Features that the trees read.
        trees: The ensemble.
        nothing: Operators that are nothing to the device and were not learned from.
    """

    kind: str
    roofline: Roofline
    space: FeatureEncoder
    trees: TreeEnsemble
    nothing: frozenset[str] = frozenset()

    @classmethod
    def fit(
        cls,
        kernels: Sequence[Kernel],
        latency_ms: Sequence[float],
        kind: str = RATIO,
        *,
        roofline: Roofline | None = None,
        nothing: Collection[str] = (),
        seed: int = 0,
    ) -> KernelModel:
        """Learn from kernels and what they took at rest.

        Args:
            kernels: What was measured.
            latency_ms: What each took, milliseconds.
            kind: One of `KINDS`.
            roofline: The device's bound; by default that of these kernels.
            nothing: Operators that are nothing to the device; their kernels are left out.
            seed: What trees draw from.

        Raises:
            InputError: There is nothing to learn from, or the kind is unknown.
            MissingExtraError: XGBoost is missing.
        """
        import numpy as np

        if kind not in KINDS:
            raise InputError(f"`kind` (={kind!r}) must be one of: {', '.join(KINDS)}")
        if len(kernels) != len(latency_ms):
            raise InputError(f"{len(kernels)} kernels and {len(latency_ms)} latencies")
        working = [n for n, kernel in enumerate(kernels) if kernel.node_op not in nothing]
        kernels, latency_ms = [kernels[n] for n in working], [latency_ms[n] for n in working]
        bound = roofline or Roofline.fit(kernels, latency_ms)
        rows = [features(kernel) for kernel in kernels]
        space = FeatureEncoder.fit(rows)
        target = np.log(np.asarray(latency_ms, dtype=np.float64))
        if kind == RATIO:
            target -= np.log([bound.floor_ms(kernel) for kernel in kernels])
        trees = TreeEnsemble.fit(
            space.transform(rows), target, FOREST if kind == FOREST else BOOSTED, seed=seed
        )
        return cls(kind=kind, roofline=bound, space=space, trees=trees, nothing=frozenset(nothing))

    def predict(self, kernels: Sequence[Kernel]) -> list[float]:
        """What each kernel takes at rest, milliseconds; its operator must be one that was learned."""
        import numpy as np

        if not kernels:
            return []
        found = np.exp(self.trees.predict(self.space.transform([features(k) for k in kernels])).astype(float))
        if self.kind == RATIO:
            found = [
                max(ratio, 1.0) * self.roofline.floor_ms(k) for k, ratio in zip(kernels, found, strict=True)
            ]
        return [float(value) for value in found]

    def knows(self, kernel: Kernel) -> bool:
        """Whether kernels of this operator were learned from."""
        row = features(kernel)
        return all(row[name] in values for name, values in self.space.categories.items())

    def alone(
        self, kernels: Mapping[str, Kernel], known_ms: Mapping[str, float]
    ) -> dict[str, tuple[float, str]]:
        """Kernel's id -> (latency alone at rest in milliseconds, where that is from)."""
        found = {name: (0.0, MEASURED) for name, k in kernels.items() if k.node_op in self.nothing}
        known = [name for name in kernels if name in known_ms and name not in found]
        found |= {name: (known_ms[name], MEASURED) for name in known}
        unseen = {name: kernel for name, kernel in kernels.items() if name not in found}
        learned = [name for name, kernel in unseen.items() if self.knows(kernel)]
        predicted = self.predict([unseen[name] for name in learned])
        found |= {name: (ms, LEARNED) for name, ms in zip(learned, predicted, strict=True)}
        for name in unseen.keys() - found.keys():
            found[name] = (self.roofline.guess_ms(unseen[name])[0], ROOFLINE)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The regressor in JSON's types."""
        return {
            "kind": self.kind,
            "roofline": self.roofline.to_dict(),
            "space": self.space.to_dict(),
            "trees": self.trees.to_dict(),
            "nothing": sorted(self.nothing),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> KernelModel:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            model = cls(
                kind=str(record["kind"]),
                roofline=Roofline.from_dict(record["roofline"]),
                space=FeatureEncoder.from_dict(record["space"]),
                trees=TreeEnsemble.from_dict(record["trees"]),
                nothing=frozenset(map(str, record["nothing"])),
            )
        except (KeyError, TypeError) as error:
            raise FileFormatError(f"a kernel regressor cannot be read: {error!r}") from error
        if model.kind not in KINDS or model.trees.columns != len(model.space.columns):
            raise FileFormatError("a kernel regressor cannot be read: its parts do not fit each other")
        return model
