"""Which blocks a model can do without."""

from __future__ import annotations

from sparseflow.adaptive.profile.importance.result import (
    AccuracyDrop,
    BlockImportance,
    SkippedBlocks,
    space_of,
)
from sparseflow.adaptive.profile.importance.search import fewest_evaluations, measure_importance

__all__ = [
    "AccuracyDrop",
    "BlockImportance",
    "SkippedBlocks",
    "fewest_evaluations",
    "measure_importance",
    "space_of",
]
