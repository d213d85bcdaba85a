"""Which blocks a model can do without."""

from __future__ import annotations

from sparseflow.adaptive.importance.found import Chosen, Drop, Importance, space_of
from sparseflow.adaptive.importance.search import fewest_evaluations, importance

__all__ = ["Chosen", "Drop", "Importance", "fewest_evaluations", "importance", "space_of"]
