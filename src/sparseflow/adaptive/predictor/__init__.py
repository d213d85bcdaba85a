"""How long a request will take by a plan: a monotone quantile model that goes on learning."""

from __future__ import annotations

from sparseflow.adaptive.predictor.ask import AFTERS, After, Ask
from sparseflow.adaptive.predictor.model import LEVEL, Predictor

__all__ = ["AFTERS", "LEVEL", "After", "Ask", "Predictor"]
