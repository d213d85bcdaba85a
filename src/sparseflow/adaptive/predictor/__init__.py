"""How long a request will take by a plan: a monotone quantile model that goes on learning."""

from __future__ import annotations

from sparseflow.adaptive.predictor.features import AFTERS, After, LatencyQuery
from sparseflow.adaptive.predictor.model import LEVEL, PlanLatencyPredictor

__all__ = ["AFTERS", "LEVEL", "After", "LatencyQuery", "PlanLatencyPredictor"]
