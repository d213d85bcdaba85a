"""What the host takes to issue a kernel: as measured, or what is usual of its operator."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparseflow.errors import FileFormatError, InputError
from sparseflow.latency.kernels import Kernel


@dataclass(frozen=True, kw_only=True)
class Issue:
    """Times of the host, milliseconds. Make one with `Issue.fit`.

    Attributes:
        known_ms: Kernel's id -> what it takes.
        usual_ms: Operator -> the median over its kernels.
        other_ms: The median over operators, of one that was not measured.
    """

    known_ms: Mapping[str, float]
    usual_ms: Mapping[str, float]
    other_ms: float

    @classmethod
    def fit(cls, kernels: Sequence[Kernel], host_ms: Sequence[float]) -> Issue:
        """From kernels that were measured in a stream.

        Args:
            kernels: The kernels.
            host_ms: What the host took to issue each.

        Raises:
            InputError: There are none.
        """
        if not kernels or len(kernels) != len(host_ms):
            raise InputError(f"{len(kernels)} kernels and {len(host_ms)} times of the host: both are needed")
        by_operator: dict[str, list[float]] = {}
        for kernel, ms in zip(kernels, host_ms, strict=True):
            by_operator.setdefault(kernel.node_op, []).append(ms)
        usual = {name: statistics.median(found) for name, found in sorted(by_operator.items())}
        return cls(
            known_ms={kernel.id: ms for kernel, ms in zip(kernels, host_ms, strict=True)},
            usual_ms=usual,
            other_ms=statistics.median(usual.values()),
        )

    def ms(self, kernel: Kernel) -> float:
        """What the host takes for a kernel, milliseconds."""
        found = self.known_ms.get(kernel.id)
        return self.usual_ms.get(kernel.node_op, self.other_ms) if found is None else found

    def to_dict(self) -> dict[str, Any]:
        """The times in JSON's types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Issue:
        """Read back what `to_dict` gave. Raises FileFormatError where it is something else."""
        try:
            found = cls(
                known_ms={str(name): float(ms) for name, ms in record["known_ms"].items()},
                usual_ms={str(name): float(ms) for name, ms in record["usual_ms"].items()},
                other_ms=float(record["other_ms"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileFormatError(f"what the host takes for kernels cannot be read: {error!r}") from error
        if not all(map(math.isfinite, (*found.known_ms.values(), *found.usual_ms.values(), found.other_ms))):
            raise FileFormatError("what the host takes for kernels cannot be read: a number is not finite")
        return found
