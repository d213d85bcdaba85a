"""Request latency prediction: a monotone quantile model with online correction.

Modules, from the input to the prediction:

- `features`: `LatencyQuery`, plan features, padding buckets and decode step buckets
- `table`: latency of one phase as an interpolated table, fitted by non-negative least squares
- `calibration`: tables, residual scales and conformal scores of a profile
- `online`: drift correction and adaptive conformal margins
- `cache`: latencies of all plans for recent request sizes
- `model`: `PlanLatencyPredictor`
- `validation`: coverage and error on held-out plans and prompt lengths
"""

from __future__ import annotations

from sparseflow.adaptive.predictor.features import COMPLETED_STAGES, CompletedStage, LatencyQuery
from sparseflow.adaptive.predictor.model import DEFAULT_LEVEL, PlanLatencyPredictor

__all__ = ["COMPLETED_STAGES", "DEFAULT_LEVEL", "CompletedStage", "LatencyQuery", "PlanLatencyPredictor"]
