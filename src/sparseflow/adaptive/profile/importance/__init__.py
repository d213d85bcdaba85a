"""Block importance: which decoder blocks a model can skip, and at what loss of accuracy."""

from __future__ import annotations

from sparseflow.adaptive.profile.importance.result import (
    AccuracyDrop,
    BlockImportance,
    SkippedBlocks,
    load_plan_space,
)
from sparseflow.adaptive.profile.importance.search import measure_importance

__all__ = [
    "AccuracyDrop",
    "BlockImportance",
    "SkippedBlocks",
    "load_plan_space",
    "measure_importance",
]
