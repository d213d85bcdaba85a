"""Training data of a kernel regressor as a table of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sparseflow.latency.model.dataset import LatencyDataset
from sparseflow.latency.model.features import FeatureEncoder, make_features


@dataclass(frozen=True, kw_only=True)
class TrainingTable:
    """One row for each kernel that has device work, sorted by id.

    Attributes:
        kernel_ids: Ids of the kernels.
        columns: Names of the features.
        features: Encoded features, shape [kernels, columns]; sizes are base-2 logarithms.
        latency_ms: Idle latency of each kernel, the target of the regression.
    """

    kernel_ids: tuple[str, ...]
    columns: tuple[str, ...]
    features: np.ndarray
    latency_ms: tuple[float, ...]

    @classmethod
    def from_dataset(cls, data: LatencyDataset) -> TrainingTable:
        """Encode all kernels of a dataset, which has at least one."""
        names = data.list_device_kernels()
        rows = [make_features(data.kernels[name]) for name in names]
        encoder = FeatureEncoder.fit(rows)
        return cls(
            kernel_ids=tuple(names),
            columns=encoder.columns,
            features=encoder.transform(rows),
            latency_ms=tuple(data.idle_ms[name] for name in names),
        )

    def list_rows(self, count: int) -> list[dict[str, Any]]:
        """List the first rows: `kernel_id`, each feature by its name, and `latency_ms`."""
        return [
            {
                "kernel_id": name,
                **dict(zip(self.columns, values.tolist(), strict=True)),
                "latency_ms": latency,
            }
            for name, values, latency in zip(
                self.kernel_ids[:count], self.features, self.latency_ms, strict=False
            )
        ]
