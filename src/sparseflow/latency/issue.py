"""What the host takes to issue a kernel: as measured, or learned from kernels that were."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparseflow.core.costmodel.trees import FOREST
from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.kernels import Kernel
from sparseflow.latency.model import KernelModel

LEAST_MS = 1e-4
"""Less no call takes."""


@dataclass(frozen=True, kw_only=True)
class Issue:
    """Times of the host, milliseconds. Make one with `Issue.fit`.

    Attributes:
        known_ms: Kernel's id -> what it takes.
        model: A random forest over kernels.
        usual_ms: The median over operators, for one that was not measured.
    """

    known_ms: Mapping[str, float]
    model: KernelModel
    usual_ms: float

    @classmethod
    def fit(cls, kernels: Sequence[Kernel], host_ms: Sequence[float], *, seed: int = 0) -> Issue:
        """From kernels that were measured in a stream.

        Args:
            kernels: The kernels.
            host_ms: What the host took to issue each.
            seed: What trees draw from.

        Raises:
            InputError: There are none.
            MissingExtraError: XGBoost is missing.
        """
        if not kernels or len(kernels) != len(host_ms):
            raise InputError(f"{len(kernels)} kernels and {len(host_ms)} times of the host: both are needed")
        taken = [max(ms, LEAST_MS) for ms in host_ms]
        by_operator: dict[str, list[float]] = {}
        for kernel, ms in zip(kernels, taken, strict=True):
            by_operator.setdefault(kernel.node_op, []).append(ms)
        return cls(
            known_ms={kernel.id: ms for kernel, ms in zip(kernels, taken, strict=True)},
            model=KernelModel.fit(kernels, taken, FOREST, seed=seed),
            usual_ms=statistics.median(map(statistics.median, by_operator.values())),
        )

    def ms(self, kernels: Iterable[Kernel]) -> dict[str, float]:
        """Kernel's id -> what the host takes for it, milliseconds."""
        listed = list(kernels)
        found = {k.id: self.known_ms.get(k.id, self.usual_ms) for k in listed}
        learned = [k for k in listed if k.id not in self.known_ms and self.model.knows(k)]
        predicted = self.model.predict(learned)
        return found | {k.id: ms for k, ms in zip(learned, predicted, strict=True)}

    def to_dict(self) -> dict[str, Any]:
        """The times in JSON's types."""
        return {
            "known_ms": dict(self.known_ms),
            "model": self.model.to_dict(),
            "usual_ms": self.usual_ms,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Issue:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            found = cls(
                known_ms={str(name): float(ms) for name, ms in record["known_ms"].items()},
                model=KernelModel.from_dict(record["model"]),
                usual_ms=float(record["usual_ms"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"what the host takes for kernels cannot be read: {error!r}") from error
        if not all(math.isfinite(ms) and ms > 0.0 for ms in (*found.known_ms.values(), found.usual_ms)):
            raise FileFormatError("what the host takes for kernels cannot be read: a time is not above 0")
        return found
